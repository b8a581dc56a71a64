"""Memory that belongs to the CUDA graphs of ``torch.compile(mode="reduce-overhead")``.

What such a graph gives lies in a pool of its own, at the same addresses each time. The compiler notes which of it lives
when the next graph begins: whatever we let go earlier, or bring back elsewhere, would have it record anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GraphMemory"]

_TREES = "torch._inductor.cudagraph_trees"


class GraphMemory:
    """Knows the CUDA graphs' memory of one device. Costs a look into a dictionary where nothing was compiled.

    PyTorch has no public word for it. If its own one changes, everything counts as such memory while there are graphs.

    Note: Why graphs that train want no hooks
        A graph is replayed where what was dead when it was recorded is dead again. Of what it gives anew at the same
        address PyTorch counts who refers to it in Python, and not who does in C++: as autograd does itself, and not
        what hooks give it to hold. So it sees saved tensors live longer than without hooks, and may refuse to replay
        ("an input tensor deallocate during graph recording that did not occur during replay"). Graphs are warmed up in
        one pass and recorded in a later one: until it is known that they train, what they give is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A weak reference: the node holds the memory of its graphs, also when these have been reset. Together with its
        # addresses, since each thread has nodes of its own.
        self._known: tuple[Callable[[], object], frozenset[int]] = _nobody, frozenset()

    def holds(self, address: int) -> bool:
        """Whether the storage at this address was made by the graphs that have run in this step."""
        try:
            manager = self._manager()
            node = None if manager is None else manager.current_node
            if node is None:
                return False
            known, addresses = self._known
            if node is not known():
                addresses = frozenset(output.data_ptr() for output in node.path_live_weakrefs())
                self._known = weakref.ref(node), addresses
        except (AttributeError, TypeError):
            return True
        return address in addresses

    @property
    def wants_no_hooks(self) -> bool:
        """Whether there are graphs of a backward."""
        try:
            manager = self._manager()
            # Copied in C: another thread may add a graph meanwhile.
            modes = () if manager is None else list(manager.id_to_mode.values())
            return any(mode.name == "BACKWARD" for mode in modes)
        except (AttributeError, TypeError):
            return True

    def _manager(self) -> Any:
        trees = sys.modules.get(_TREES)
        if trees is None or self._device.type != "cuda":
            return None
        try:
            return trees.get_manager(self._device.index, create_if_none_exists=False)
        except AssertionError:  # older versions: this thread can have no graphs
            return None


def _nobody() -> None:
    """In the place of a reference, before there is one."""
