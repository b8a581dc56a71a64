"""The state that one call of a module depends on, as far as it can be seen, and putting it back for a repetition."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_ssd.recompute.fingerprint import differs
from lightning_ssd.recompute.global_modes import GlobalModes
from lightning_ssd.recompute.side_effects import SideEffectSnapshot

__all__ = ["CallState"]

_SMALL_BYTES = 64 << 10

_Buffers = dict[str, torch.Tensor | None]


class CallState:
    """All of it as it was before one call.

    Args:
        modules: the one that is called, and those among its arguments.
        functions: among its arguments.
    """

    def __init__(self, modules: Sequence[nn.Module], functions: Sequence[FunctionType] = ()) -> None:
        self._parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._reach = SideEffectSnapshot(self._parts, functions)
        self._modes = GlobalModes()
        self._context = contextvars.copy_context()
        self._buffers = [
            (part, name, buffer, buffer._version, buffer.detach().clone())
            for part in self._parts
            for name, buffer in part._buffers.items()
            # What inference mode has made, nothing edits outside of it.
            if buffer is not None and not isinstance(buffer, nn.UninitializedBuffer) and not buffer.is_inference()
        ]
        self._copies: list[tuple[_Buffers, str, torch.Tensor]] = []
        self.addresses = self._reach.addresses
        """Addresses of storages whose identity and version are compared."""
        self.opaque = self._reach.opaque
        self.is_unmade = self._reach.is_unmade
        """See :class:`SideEffectSnapshot`."""

    def settle(self) -> str | None:
        """After the call: keep what is needed to repeat it. Returns what was edited in place and cannot be put back."""
        edited = self._reach.settle()
        for part, name, buffer, version, copy in self._buffers:
            if _is_edited(part, buffer, version, copy):
                self._copies.append((part._buffers, name, copy))
            else:
                self._reach.watch_over(f"{type(part).__name__}.{name}", buffer)
        self._buffers.clear()
        self._parts.clear()
        return edited

    def claim(self) -> AbstractContextManager[object]:
        """Around all that :meth:`as_before` is for."""
        return self._modes.claim()

    def why_not(self) -> str | None:
        """Return what :meth:`as_before` cannot undo; ``None``: nothing that can be seen. Ask within :meth:`claim`."""
        return self._modes.why_not() or self._reach.change()

    def probes(self) -> list[tuple[str, weakref.ref[torch.Tensor], int]]:
        """See :meth:`SideEffectSnapshot.probes`."""
        return self._reach.probes()

    def as_before(self) -> AbstractContextManager[Callable[..., Any]]:
        """While it is entered all is as it was before the call; then as it was when it was entered.

        Buffers that the call edits are copies of copies meanwhile: it may be repeated again, and others may have saved
        the module's own.

        Gives what runs a function among the context variables of the call.
        """
        # A call that asks for gradients in its own forward is repeated before it has ended.
        edited = [
            (part._buffers, name, copy)
            for part, name, buffer, version, copy in self._buffers
            if _is_edited(part, buffer, version, copy)
        ]
        return _Before(self._modes, self._reach, self._copies + edited, self._context)


def _is_edited(part: nn.Module, buffer: torch.Tensor, version: int, copy: torch.Tensor) -> bool:
    """Tell whether a call may have edited a buffer.

    Batch norms, ``data`` and NumPy edit without raising a version. On a CPU the bytes tell. A device is not waited for:
    small buffers count as edited there, large ones go by their version.
    """
    if isinstance(part, _NormBase) or buffer._version != version:
        return True
    if buffer.device.type == "cpu":
        return differs(buffer, copy)
    return copy.nbytes <= _SMALL_BYTES


class _Before(AbstractContextManager[Callable[..., Any]]):
    """No generator: one that an interrupt leaves halfway goes on when it is dropped, where the next would be lost."""

    def __init__(
        self,
        modes: GlobalModes,
        reach: SideEffectSnapshot,
        copies: list[tuple[_Buffers, str, torch.Tensor]],
        context: contextvars.Context,
    ) -> None:
        self._modes, self._reach, self._copies, self._context = modes, reach, copies, context
        self._entered = ExitStack()

    def __enter__(self) -> Callable[..., Any]:
        self._entered.enter_context(self._modes.as_before())
        self._entered.enter_context(self._reach.as_before())
        for buffers, name, copy in self._copies:
            buffers[name] = copy.clone()
        return self._context.copy().run

    def __exit__(self, *exc_info: object) -> None:
        self._entered.close()
