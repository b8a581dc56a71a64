"""Memory that belongs to the CUDA graphs of ``torch.compile(mode="reduce-overhead")``.

What such a graph gives lies in a pool of its own, at the same addresses each time. The compiler notes which of it lives
when the next graph begins: whatever we let go earlier, or bring back elsewhere, would have it record anew.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["GraphMemory"]

_TREES = "torch._inductor.cudagraph_trees"


class GraphMemory:
    """Of one device. Costs a look into a dictionary where nothing was compiled.

    PyTorch has no public word for it. If its own one changes, everything counts as such memory while there are graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._node: object = None
        self._addresses: frozenset[int] = frozenset()

    def holds(self, address: int) -> bool:
        """Whether the storage at this address was made by the graphs that have run in this step."""
        trees = sys.modules.get(_TREES)
        if trees is None or self._device.type != "cuda":
            return False
        try:
            manager = trees.get_manager(self._device.index, create_if_none_exists=False)
            node = None if manager is None else manager.current_node
            if node is None:
                return False
            if node is not self._node:
                self._addresses = frozenset(output.data_ptr() for output in node.path_live_weakrefs())
                self._node = node
        except (AttributeError, TypeError):
            return True
        return address in self._addresses
