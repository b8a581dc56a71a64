"""Keep ``torch.compile`` out of this package, and out of user code that the package only tries."""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["compiler_is_at_work", "hide_from_compiler", "uncompiled"]

_frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
_PACKAGE = __name__.partition(".")[0]
_TRACED = f"{_PACKAGE}.recompute.blocks"
"""Stands in for the forward of blocks, so that the compiler has to look through it: a graph would be split there."""
_hidden: list[str] = []


def compiler_is_at_work() -> bool:
    """Return whether this call is traced, or is called by code that ``torch.compile`` runs as it is.

    A caller that disables the compiler (as ``torch.utils.checkpoint`` does) also disables it for the code that it
    calls. Plain training compiles that code, so that the bits would differ.
    """
    return torch.compiler.is_compiling() or _frame_callback() is not None


# Guards the stance. First in the order of locks, because user code runs under it.
_trials = threading.RLock()


def _after_fork() -> None:
    """Make the lock anew, because a fork has no thread that would give it back."""
    global _trials
    # In the order of locks: as the one before.
    _trials = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they were written, for a trial of user code under a mode of ``__torch_dispatch__``.

    Dynamo compiles nothing under such a mode, and marks each function that it meets there as never to be compiled, for
    the whole process. This stance of the process prevents that. Other threads run uncompiled meanwhile, too; their
    trials wait for this one.
    """
    with _trials, torch.compiler.set_stance("force_eager"):
        yield


def hide_from_compiler() -> None:
    """Have the compiler run this package as it is, except the stand-ins for the forward of blocks.

    Autograd calls saved-tensor hooks from within a compiled region too, where Dynamo would trace the hooks and fail.
    ``torch.compiler.disable`` costs a microsecond per call. Importing Dynamo takes seconds, so that nothing happens
    until user code has imported it.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is None or _hidden:
        return
    for parent in (_PACKAGE, _TRACED.rpartition(".")[0]):
        for found in pkgutil.iter_modules(sys.modules[parent].__path__, f"{parent}."):
            if not _TRACED.startswith(found.name):
                rules.add(found.name)
    _hidden.append(_PACKAGE)
