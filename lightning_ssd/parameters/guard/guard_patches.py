"""Uses of weights past their class: seen by standing in for a few functions of PyTorch.

They stand there as long as weights of a device wait somewhere (:data:`guard_patches`), and do what they did before, but
for telling:

* ``tensor.data`` of a weight in the forward of its unit, and of a view of a weight: its holder may change bytes
  without a sign in the version; of any tensor that is given the memory of a weight;
* ``tensor.grad = gradient``, which asks only the class of the tensor: autograd would add to memory that is away;
* ``torch.autograd.backward`` and ``grad``, which compute in C with the gradients that they are given, and with those
  that a custom function returns, which is an error;
* ``nn.Parameter(weight)``, which takes plain parameters only, and ``torch.Tensor._make_subclass``, which asks no
  class;
* ``tensor.set_(weight)``, which asks no class either, and gives a storage without memory memory of its own: code that
  reads it finds arbitrary bytes;
* ``torch.overrides.has_torch_function``, by which modules choose between two implementations: bits would depend on
  where a weight is;
* setting another current stream in the forward of a unit: it has to wait for the copies of the weights, too, and their
  memory for it;
* entering hooks for saved tensors, which may give autograd a weight that is away;
* sending the memory of a weight to another process, which would not see that the weight has got other memory;
* transforms of ``torch.func``, which wrap a tensor without asking its class;
* the lists of classes for which optimizers and clipping take their ``foreach`` or ``fused`` implementation: an
  optimizer that is not offloaded may see weights that are away, and clipping sees gradients. On a CUDA card the norm
  that a list is asked for may have another last bit than that of its tensors one by one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.sent_storages import noting_sent, sending_is_noted
from lightning_ssd.common.tensors import PLAIN_TYPES
from lightning_ssd.parameters.guard.guard import GUARDED_OF, Door, door_of, is_guarded, using

__all__ = ["guard_patches"]

_Hooks = torch.autograd.graph.saved_tensors_hooks
_push_hooks: Any = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks: Any = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_data: Any = torch._C.TensorBase.data
_GRADS: dict[str, Any] = {"grad": torch._C.TensorBase.grad, "_grad": torch._C.TensorBase._grad}
_ENGINES: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
_plain_run_backward: Any = _ENGINES[0]._engine_run_backward
_Backward: Any = torch.autograd.function.BackwardCFunction
_plain_new = nn.Parameter.__new__
_plain_set: Any = torch._C.TensorBase.set_
_plain_subclass: Any = torch.Tensor._make_subclass
_plain_has_torch_function: Any = torch.overrides.has_torch_function
_FOREACH_TYPES: tuple[list[Any], ...] = tuple(
    importlib.import_module(name)._foreach_supported_types
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")
)
"""Types by which optimizers and clipping decide, for which parameters are no plain tensors."""
_WRAPPERS = {
    "torch._functorch.vmap": ("_add_batch_dim",),
    "torch._functorch.eager_transforms": ("_wrap_for_grad", "_wrap_functional_tensor"),
}
"""Functions in C that transforms begin with."""


class _GuardPatches:
    """Holds the patches of this process."""

    def __init__(self) -> None:
        # Guards users and what stands in. A leaf lock.
        self._lock = threading.Lock()
        self._users: tuple[Door, ...] = ()
        self._put_back: list[Callable[[], None]] = []

    def add_user(self, user: Door) -> None:
        with self._lock:
            self._users = (*self._users, user)
            if len(self._users) == 1:
                self._begin()

    def remove_user(self, user: Door) -> None:
        with self._lock:
            self._users = tuple(other for other in self._users if other is not user)
            while not self._users and self._put_back:
                self._put_back.pop()()

    def stream_changed(self) -> None:
        """The calling thread has another current stream. Our own threads' streams wait for what they must anyway."""
        if not threading.current_thread().name.startswith("lightning_ssd"):
            for user in self._users:
                user.follow_stream()

    def _begin(self) -> None:
        self._stand_in(torch.Tensor, "data", property(_get_data, _set_data))
        for name, plain in _GRADS.items():
            self._put_back.append(partial(_take_away, name))
            setattr(torch.Tensor, name, _Gradient(plain))
        self._stand_in(nn.Parameter, "__new__", staticmethod(_new_parameter))
        self._stand_in(torch.Tensor, "_make_subclass", staticmethod(_with_memory(_plain_subclass)))
        self._stand_in(torch.Tensor, "set_", _set_storage)
        for owner in (torch.cuda, torch.accelerator):
            if (set_stream := getattr(owner, "set_stream", None)) is not None:
                self._stand_in(owner, "set_stream", _then_follow(set_stream))
        self._stand_in(torch.overrides, "has_torch_function", _has_torch_function)
        self._stand_in(_Hooks, "__enter__", lambda hooks: _push(hooks.pack_hook, hooks.unpack_hook))
        _enter_again()
        storages: Any = torch.UntypedStorage
        self._stand_in(storages, "_share_cuda_", noting_sent(storages._share_cuda_))
        sending_is_noted()
        for module in _ENGINES:
            # Not what stands there now: torch.compiler stands in for both, too, for a while.
            self._put_back.append(partial(setattr, module, "_engine_run_backward", _plain_run_backward))
            module._engine_run_backward = _run_backward
        for name in ("apply", "apply_boxed", "apply_jvp"):
            if (apply := getattr(_Backward, name, None)) is not None:
                self._stand_in(_Backward, name, _refusing_what_is_away(apply))
        for types in _FOREACH_TYPES:
            for own, kind in GUARDED_OF.items():
                if own in types:
                    self._put_back.append(partial(types.remove, kind))
                    types.append(kind)  # as DTensor does
        for module_name, names in _WRAPPERS.items():
            module = importlib.import_module(module_name)
            for name in names:
                self._stand_in(module, name, _with_memory(getattr(module, name)))

    def _stand_in(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner).get(name)  # as it stands there; None: a base class has it, and it is found there again
        self._put_back.append(partial(delattr, owner, name) if own is None else partial(setattr, owner, name, own))
        setattr(owner, name, value)


def _then_follow(set_stream: Callable[..., Any]) -> Callable[..., Any]:
    def set_and_follow(*args: Any, **kwargs: Any) -> Any:
        result = set_stream(*args, **kwargs)
        guard_patches.stream_changed()
        return result

    return set_and_follow


def _get_data(tensor: torch.Tensor) -> torch.Tensor:
    _tell_exposed(tensor)
    found: torch.Tensor = _data.__get__(tensor)
    return found


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor is value:
        return  # as Module.to() does with what it has not moved
    if type(tensor) is nn.Parameter:  # a view that is given other memory leaves the weight as it is
        _tell_exposed(tensor)
    with using([value] if is_guarded(value) else []):
        _data.__set__(tensor, value)


class _Gradient(property):
    """``tensor.grad`` whose setter asks the class of what is set, too.

    Else it is PyTorch's own: read and deleted in C, without a frame that a warning would name. Code that asks
    ``torch.Tensor.grad`` for its functions, as ``__torch_function__`` is told, gets PyTorch's.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__(plain.__get__, partial(_set_grad, plain), plain.__delete__)
        self.__dict__.update({name: getattr(plain, name) for name in ("__get__", "__set__", "__delete__")})


def _set_grad(plain: Any, tensor: torch.Tensor, gradient: Any) -> None:
    """A gradient that is given to another tensor, too, is held by both, and leaves no more."""
    is_given = is_guarded(gradient) and plain.__get__(tensor) is not gradient
    with using([gradient] if is_given else []):
        plain.__set__(tensor, gradient)


def _take_away(name: str) -> None:
    if isinstance(vars(torch.Tensor).get(name), _Gradient):
        delattr(torch.Tensor, name)


def _set_storage(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In the place of ``tensor.set_()``: both have the same memory afterwards, and each its own version."""
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
    with using([one for one in (tensor, *given) if is_guarded(one)]):
        _tell_exposed(tensor)
        for one in given:
            _tell_exposed(one)
        found: torch.Tensor = _plain_set(tensor, *args, **kwargs)
    return found


def _tell_exposed(tensor: torch.Tensor) -> None:
    if type(tensor) in PLAIN_TYPES and (door := door_of(tensor)) is not None:
        door.exposed(tensor)


def _new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    with using([data] if is_guarded(data) else []):
        return _plain_new(cls, data, requires_grad)


def _has_torch_function(args: Any) -> bool:
    found: bool = _plain_has_torch_function([arg for arg in args if not is_guarded(arg)])
    return found


def _push(pack: Any, unpack: Any) -> Any:
    module: str = getattr(getattr(pack, "func", pack), "__module__", None) or ""
    return _push_hooks(pack, unpack if module.startswith("lightning_ssd.") else _bringing_back(unpack))


def _enter_again() -> None:
    """Enter the hooks of this thread again, in the same order: they were entered when nothing was away."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # in no stub
        return
    entered = []
    with deferring_interrupts():
        while (hooks := _top_hooks(True)) is not None:
            entered.append(hooks)
            _pop_hooks()
        while entered:
            _push(*entered.pop())


def _bringing_back(unpack: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """Autograd computes in C with what the hook gives, and asks no class."""

    def unpacked(packed: Any) -> torch.Tensor:
        tensor = unpack(packed)
        if not is_guarded(tensor):
            return tensor
        with using([tensor]):  # no class is asked in the backward of a subclass
            return tensor.detach()

    return unpacked


def _run_backward(outputs: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
    """Gradients that a backward begins with are in memory until it is over: it is unknown when it reads them."""
    with using([one for one in gradients if is_guarded(one)]):
        return _plain_run_backward(outputs, gradients, *args, **kwargs)


def _refusing_what_is_away(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what a custom function returns while it is away: autograd adds to it in C, and asks no class."""

    def applied(*args: Any) -> Any:
        given = apply(*args)
        if any(map(is_guarded, given if isinstance(given, tuple) else (given,))):
            raise RuntimeError(
                "a custom torch.autograd.Function returned an offloaded weight or gradient itself, whose memory "
                "autograd would read while it is away. Return a copy (tensor.clone()), or set "
                "OffloadPolicy.parameters='keep' and gradients='keep'"
            )
        return given

    return applied


def _with_memory(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A weight is brought back, and stays as long as what is wrapped around it: that holds it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with using([arg for arg in args if is_guarded(arg)]):
            return wrap(*args, **kwargs)

    return wrapped


guard_patches = _GuardPatches()
