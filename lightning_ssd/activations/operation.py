"""Which operation saves a tensor, and whether it may still be running.

Note: What is saved before it is filled
    Autograd makes an operation's node, saves its inputs, computes, and saves outputs. ``rrelu`` fills an input, the
    noise: it is saved first and drawn afterwards, which counts no version. Norms do so with running statistics. So a
    copy may be made only when the operation is over: when its thread has made another node, which has the next number,
    or when the forward is over. No gradient goes to an input that is filled, so that others need not wait.
"""

from __future__ import annotations

from threading import get_ident
from typing import NamedTuple

import torch

__all__ = ["Operation"]

_next_number = torch._C._autograd._get_sequence_nr


class Operation(NamedTuple):
    """The operation of one thread, between the making of its node and that of the next one."""

    thread: int
    number: int

    @classmethod
    def current(cls) -> Operation:
        """The one that saves just now."""
        return cls(get_ident(), _next_number())

    @property
    def may_run(self) -> bool:
        """Whether it may not be over, as far as this thread can tell."""
        return self.thread != get_ident() or self.number == _next_number()
