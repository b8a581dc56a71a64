"""Saved tensors that a ``torch.autograd.Function`` in Python was given, and may return as gradients."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

__all__ = ["HandedOut"]

_Kind = tuple[torch.dtype, tuple[int, ...]]
_MAX_NODES = 64
_keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _Held(NamedTuple):
    """Of one thread."""

    node: tuple[int, int]
    """The node that was given the tensors: its address, which may be lent again, and its number."""
    kinds: frozenset[_Kind] | None
    """What of it may become a leaf's gradient; ``None``: anything."""
    tensors: list[torch.Tensor]


class HandedOut:
    """Refers to what the ``Function`` that runs has been given, so that it does not become a gradient itself.

    Autograd makes the tensor that it gets for a leaf the leaf's ``grad``, without a copy, if nobody else refers to it
    (``AccumulateGrad``). A saved tensor it refers to itself, but with hooks, each time that it is asked for, it gets an
    object of its own over memory that others may have, too: two leaves would have one gradient, or a batch would be
    cleared by ``zero_grad``. The leaves of a ``Function`` have had their gradients when another one runs.

    What has another shape or dtype than any leaf that the returned gradients can get to as they are is let go at once:
    a compiled block is a ``Function``, which frees each saved tensor behind its last use, and would hold all of them
    until the next block begins.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, _Held] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """The node that runs in this thread is given a tensor."""
        node: Any = torch._C._current_autograd_node()
        thread = threading.get_ident()
        held = self._by_thread.get(thread)
        if not isinstance(node, BackwardCFunction):
            if held is not None:
                self._by_thread.pop(thread, None)
            return
        name = id(node), node._sequence_nr()
        if held is None or held.node != name:
            held = self._by_thread[thread] = _Held(name, None if _keeps_graph() else _leaves_of(node), [])
        if held.kinds is None or (tensor.dtype, tuple(tensor.shape)) in held.kinds:
            held.tensors.extend((tensor, tensor))  # twice: a single reference of Python's counts as the tensor's own

    def clear(self, *, everywhere: bool) -> None:
        """A backward of this thread is over; ``everywhere``: and no other one is under way."""
        if everywhere:
            self._by_thread.clear()
        else:
            self._by_thread.pop(threading.get_ident(), None)


def _leaves_of(node: Any) -> frozenset[_Kind] | None:
    """Of the leaves to which a tensor that a node returns may be passed on as it is, by nodes such as that of a sum;
    ``None``: nobody knows.

    What is passed on as it is has the dtype and the shape that each node on its way expects.
    """
    try:
        found: set[_Kind] = set()
        seen: dict[tuple[int, int], Any] = {}  # they live as long, so that no address names another one
        ways: list[tuple[Any, _Kind | None]] = [(node, None)]
        while ways:
            now, kind = ways.pop()
            for following, number in now.next_functions:
                if following is None or (id(following), number) in seen:
                    continue
                metadata = following._input_metadata[number]
                theirs = metadata.dtype, tuple(metadata.shape)
                if kind is not None and theirs != kind:
                    continue
                seen[id(following), number] = following
                if hasattr(following, "variable"):
                    found.add(theirs)
                elif len(seen) >= _MAX_NODES:
                    return None
                else:
                    ways.append((following, theirs))
    except (AttributeError, IndexError, RuntimeError, TypeError):  # PyTorch has no public word for it
        return None
    return frozenset(found)
