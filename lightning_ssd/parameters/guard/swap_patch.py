"""``torch.utils.swap_tensors`` of what waits, and the hooks of parameters that such a swap leaves behind."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from lightning_ssd.parameters.guard.guard import is_guarded, using

__all__ = ["ParameterHooks", "SwapUser", "swap_patch"]

_plain_swap: Any = torch.utils.swap_tensors


class SwapUser(Protocol):
    """Who refers to parameters."""

    def will_swap(self, tensor: torch.Tensor) -> None:
        """A tensor is about to exchange everything with another one: it is waited for no more, nor is its gradient,
        and nothing refers to it, not even weakly.
        """


class _SwapPatch:
    """Stands in for the function as long as it has users. ``load_state_dict()`` and ``Module.to()`` call it, too, with
    ``torch.__future__.set_swap_module_params_on_conversion(True)``.
    """

    def __init__(self) -> None:
        # Guards the users. A leaf lock.
        self._lock = threading.Lock()
        self._users: tuple[SwapUser, ...] = ()

    def add_user(self, user: SwapUser) -> None:
        """Add a user, who refers to parameters."""
        with self._lock:
            self._users = (*self._users, user)
            torch.utils.swap_tensors = self._swap

    def remove_user(self, user: SwapUser) -> None:
        """Remove what :meth:`add_user` has added."""
        with self._lock:
            self._users = tuple(other for other in self._users if other is not user)
            if not self._users and torch.utils.swap_tensors == self._swap:
                torch.utils.swap_tensors = _plain_swap

    def _swap(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """PyTorch refuses to swap what has weak references, and those of users end here.

        Those of a graph that has saved a weight do not: PyTorch refuses then, as it does where the graph has the weight
        itself.
        """
        for tensor in (one, other):
            for user in self._users:
                user.will_swap(tensor)
        with using([tensor for tensor in (one, other) if is_guarded(tensor)]):  # which refuses what is lost
            _plain_swap(one, other)


swap_patch = _SwapPatch()


class ParameterHooks:
    """Hooks of one parameter, which is held weakly.

    A swap leaves PyTorch's dictionary of hooks with the object, and takes what calls them away: hooks that come into
    that dictionary later never run. So none is left behind that the user has put nothing into.
    """

    def __init__(self, parameter: torch.Tensor, handles: Sequence[RemovableHandle]) -> None:
        self._parameter = weakref.ref(parameter)
        self._handles = handles

    @property
    def parameter(self) -> torch.Tensor | None:
        """``None``: it is gone."""
        return self._parameter()

    def are_of(self, parameter: torch.Tensor) -> bool:
        """Whether it is the parameter that the hooks are of, and no other one in its place."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        return hooks is not None and self._handles[-1].hooks_dict_ref() is hooks

    def remove(self) -> None:
        """They are called no more."""
        for handle in self._handles:
            handle.remove()
        parameter: Any = self._parameter()
        if parameter is None:
            return
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, name)
            if hooks is not None and not hooks:
                setattr(parameter, name, None)
