"""Keep ``torch.compile`` out of this package, and out of user code that the package only tries."""

from __future__ import annotations

import pkgutil
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
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


class _Uncompiled(AbstractContextManager[None]):
    """The stance of the process, which the first entry sets and the last exit takes back, whatever their order."""

    def __init__(self) -> None:
        # A leaf lock: only Dynamo's own code runs under it.
        self._lock = threading.Lock()
        self._num_entered = 0
        self._stance: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_entered += 1
            if self._num_entered == 1:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._num_entered -= 1
            if self._num_entered == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)


_uncompiled = _Uncompiled()


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions as they were written, for a trial of user code under a mode of ``__torch_dispatch__``.

    Dynamo compiles nothing under such a mode, and marks each function that it meets there as never to be compiled, for
    the whole process. This stance prevents that. Other threads run uncompiled meanwhile, too.
    """
    return _uncompiled


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
