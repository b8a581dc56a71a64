"""What is done to weights past their class: told by standing in for a few functions of PyTorch.

They stand there as long as weights of a device wait somewhere (:data:`unseen_uses`), and do what they did before, but
for telling:

* ``parameter.data`` of a plain parameter, in the forward of its unit: whoever has it may change bytes without a sign in
  the version;
* entering hooks for saved tensors that may hold a weight itself, where nobody can count it;
* transforms of ``torch.func``, which wrap a tensor without asking its class.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_ssd.parameters.guard import door_of, is_guarded

__all__ = ["may_hold_weights", "unseen_uses"]

_Hooks = torch.autograd.graph.saved_tensors_hooks
_plain_enter = _Hooks.__enter__
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_data: Any = torch._C.TensorBase.data
_WRAPPERS = {
    "torch._functorch.vmap": ("_add_batch_dim",),
    "torch._functorch.eager_transforms": ("_wrap_for_grad", "_wrap_functional_tensor"),
}
"""Functions in C that transforms begin with."""


class _UnseenUses:
    """Of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._put_back: list[Callable[[], None]] = []
        self.num_hooks = 0
        """How often hooks were entered that may hold a saved weight itself."""

    def add_user(self) -> None:
        """Somebody has weights that wait."""
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._begin()

    def remove_user(self) -> None:
        """Of :meth:`add_user`."""
        with self._lock:
            self._num_users -= 1
            while self._num_users == 0 and self._put_back:
                self._put_back.pop()()

    def _begin(self) -> None:
        parameter: Any = nn.Parameter
        parameter.data = property(_get_data, _set_data)
        self._put_back.append(lambda: delattr(nn.Parameter, "data"))
        self._stand_in(_Hooks, "__enter__", _enter_hooks)
        for module_name, names in _WRAPPERS.items():
            module = importlib.import_module(module_name)
            for name in names:
                self._stand_in(module, name, _with_memory(getattr(module, name)))

    def _stand_in(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        before = getattr(owner, name)
        self._put_back.append(lambda: setattr(owner, name, before))
        setattr(owner, name, function)


def _get_data(parameter: torch.Tensor) -> torch.Tensor:
    _tell_exposed(parameter, replaces=False)
    found: torch.Tensor = _data.__get__(parameter)
    return found


def _set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    _tell_exposed(parameter, replaces=True)
    _data.__set__(parameter, value)


def _tell_exposed(parameter: torch.Tensor, *, replaces: bool) -> None:
    if type(parameter) is nn.Parameter and (door := door_of(parameter)) is not None:
        door.exposed(parameter, replaces=replaces)


def _enter_hooks(hooks: Any) -> Any:
    unseen_uses.num_hooks += _may_hold(hooks.pack_hook)
    return _plain_enter(hooks)


def _with_memory(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A weight goes in as a view of itself, which is a use of it, and holds its memory."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.detach() if isinstance(arg, torch.Tensor) and is_guarded(arg) else arg for arg in args)
        return wrap(*args, **kwargs)

    return wrapped


def may_hold_weights() -> bool:
    """Whether hooks are entered in this thread that may hold a saved weight itself, where nobody counts it."""
    hooks = _top_hooks(True)
    return hooks is not None and _may_hold(hooks[0])


def _may_hold(pack: Any) -> bool:
    """Ours hold none, nor do those of PyTorch: checkpointing holds no saved tensor, ``save_on_cpu`` holds copies."""
    module = getattr(getattr(pack, "func", pack), "__module__", None) or ""
    return not module.startswith(("lightning_ssd.", "torch."))


unseen_uses = _UnseenUses()
