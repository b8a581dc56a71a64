"""Saved tensors that a ``torch.autograd.Function`` in Python was given, and may return as gradients."""

from __future__ import annotations

import threading

import torch
from torch.autograd.function import BackwardCFunction

__all__ = ["HandedOut"]


class HandedOut:
    """Refers to what the ``Function`` that runs has been given, so that it does not become a gradient itself.

    Autograd makes the tensor that it gets for a leaf the leaf's ``grad``, without a copy, if nobody else refers to it
    (``AccumulateGrad``). A saved tensor it refers to itself, but with hooks, each time that it is asked for, it gets an
    object of its own over memory that others may have, too: two leaves would have one gradient, or a batch would be
    cleared by ``zero_grad``. The leaves of a ``Function`` have had their gradients when another one runs.
    """

    def __init__(self) -> None:
        self._by_thread: dict[int, tuple[int, list[torch.Tensor]]] = {}
        """The number of a node, and what it was given."""

    def add(self, tensor: torch.Tensor) -> None:
        """The node that runs in this thread is given a tensor."""
        node, thread = torch._C._current_autograd_node(), threading.get_ident()
        is_function = isinstance(node, BackwardCFunction)
        held = self._by_thread.get(thread)
        if held is not None and held[0] != id(node):
            self._by_thread.pop(thread, None)
            held = None
        if is_function:
            if held is None:
                held = self._by_thread[thread] = id(node), []
            held[1].extend((tensor, tensor))  # twice: a single reference of Python's counts as the tensor's own

    def clear(self, *, everywhere: bool) -> None:
        """A backward of this thread is over; ``everywhere``: and no other one is under way."""
        if everywhere:
            self._by_thread.clear()
        else:
            self._by_thread.pop(threading.get_ident(), None)
