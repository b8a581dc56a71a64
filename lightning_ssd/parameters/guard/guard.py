"""The class of a weight whose bytes may be away: a use outside of its unit's forward brings it back first.

PyTorch asks a subclass of its tensors before each function (``__torch_function__``). So a weight that waits has a
subclass of its own class, and its own class again as long as its bytes are needed: where it is computed with, kernels,
optimizers, the compiler and ``type(weight)`` see a plain parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from lightning_ssd.common.tensors import storage_of

__all__ = ["GUARDED", "GUARDED_OF", "Door", "door_of", "forget_door", "guard", "is_guarded", "own_class", "using"]

_PIECE_BYTES = 64 << 20
"""Bytes of a list, treated one by one, that are brought in at a time; at least one tensor."""

_NAMES_OF_METADATA = (
    "shape size dim ndim numel nelement element_size itemsize nbytes dtype device layout names name stride "
    "storage_offset is_contiguous is_leaf is_cuda is_cpu is_meta is_xla is_xpu is_mps is_mkldnn is_sparse "
    "is_sparse_csr is_quantized is_nested is_floating_point is_complex is_signed is_inference is_conj is_neg "
    "is_pinned is_same_size get_device grad grad_fn _version _base _is_view output_nr retains_grad _backward_hooks "
    "_post_accumulate_grad_hooks _grad _grad_fn register_hook register_post_accumulate_grad_hook retain_grad "
    "has_names __len__ __hash__ _is_zerotensor is_vulkan is_ipu is_maia is_mtia is_hpu"
)


def _functions(name: str) -> Iterator[Any]:
    """Yield what PyTorch hands to ``__torch_function__`` for an attribute, or for a method."""
    found = getattr(torch.Tensor, name, None)
    if found is None:
        return
    if callable(found):
        yield found
        return
    for access in ("__get__", "__set__", "__delete__"):
        if hasattr(found, access):
            yield getattr(found, access)


_Tensor: Any = torch.Tensor  # without types: some of these are in no stub
_Torch: Any = torch
_METADATA = frozenset(function for name in _NAMES_OF_METADATA.split() for function in _functions(name)) | {
    _Tensor.requires_grad.__get__,
    _Tensor.requires_grad.__set__,
    _Tensor.requires_grad_,
    torch._has_compatible_shallow_copy_type,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Functions that need none of the bytes. ``shape`` and ``grad`` are asked for all over PyTorch."""
_NAMES_OF_EXPOSING = (
    "data data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ __cuda_array_interface__ set_ "
    "resize_ share_memory_ apply_ map_"
)
_EXPOSING = frozenset(function for name in _NAMES_OF_EXPOSING.split() for function in _functions(name)) | {
    _Torch._amp_foreach_non_finite_check_and_unscale_,
    *(getattr(torch, name) for name in dir(torch) if name.startswith("_fused_") and name.endswith("_")),
}
"""Functions that may change bytes without a sign in the version.

What ``GradScaler`` unscales with does so, and fused optimizers that unscale by themselves.
"""
_ADDRESSES = frozenset(function for name in ("data_ptr", "__cuda_array_interface__") for function in _functions(name))
"""Functions that give an address away, which holds no memory."""
_ARRAYS = frozenset(_functions("__cuda_array_interface__"))
"""Functions by which arrays of CuPy and Numba are made: they hold the tensor, an object of Python, and go to its memory
past its class as long as they live.
"""

_ONE_BY_ONE = frozenset(
    (
        _Torch._foreach_norm,
        _Torch._foreach_mul_,
        _Torch._foreach_clamp_min_,
        _Torch._foreach_clamp_max_,
        _Torch._foreach_zero_,
        _Torch._amp_foreach_non_finite_check_and_unscale_,
    )
)
"""Functions of clipping, scaling and ``zero_grad`` for lists of gradients: to each tensor of its own the same."""


class Door(Protocol):
    """A door: it brings weights back before they are used."""

    def using(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        exposes: bool = False,
        pins: bool = False,
    ) -> AbstractContextManager[None]:
        """While it is entered the tensors have their bytes, and their own class.

        Args:
            tensors: weights of this door.
            exposes: bytes may change afterwards without a sign in the version.
            pins: the program may know the address afterwards: they stay there until a backward is over.

        Raises:
            OffloaderClosedError: the bytes are lost.
        """

    def follow_stream(self) -> None:
        """The current stream may use weights that are in use, too."""

    def will_be_array(self, tensor: torch.Tensor) -> None:
        """Bring it back for good: the program may go to its memory for ever, without a sign."""

    def exposed(self, tensor: torch.Tensor) -> None:
        """Prepare for a program that is about to get hold of its bytes."""

    def shown(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The bytes in memory of the host, where a copy for a checkpoint is made; ``None``: they come back as usual."""


# Of each storage that a door guards, the door, by the address of the storage.
_doors: dict[int, weakref.ref[Door]] = {}


def guard(tensor: torch.Tensor, door: Door) -> None:
    """Have the door asked before each use of a plain parameter, or of a plain tensor."""
    _doors[storage_of(tensor)._cdata] = weakref.ref(door)
    tensor.__class__ = GUARDED_OF.get(type(tensor), type(tensor))


def own_class(tensor: torch.Tensor) -> None:
    """Give a guarded tensor its own class: no door is asked any more."""
    kind: Any = type(tensor)
    if kind in GUARDED:
        tensor.__class__ = kind.own_class_when_used


def is_guarded(tensor: torch.Tensor) -> bool:
    """Whether its bytes may be away."""
    return type(tensor) in GUARDED


def forget_door(number: int) -> None:
    """A storage has no door any more."""
    _doors.pop(number, None)


def door_of(tensor: torch.Tensor) -> Door | None:
    """Return the door to ask before the tensor is used; ``None``: there is none."""
    try:
        reference = _doors.get(storage_of(tensor)._cdata)
    except (NotImplementedError, RuntimeError):  # it has no storage
        return None
    return None if reference is None else reference()


def _is_there(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether ``tensor.to(...)`` is the tensor itself."""
    if kwargs.pop("copy", False) or any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
        return False
    parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, _, memory_format = parsed
    with torch._C.DisableTorchFunctionSubclass():
        return (
            (device is None or device == tensor.device)
            and (dtype is None or dtype == tensor.dtype)
            and memory_format is None
        )


def _guarded_in(value: Any) -> Iterator[torch.Tensor]:
    if type(value) in GUARDED:
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _guarded_in(item)
    elif isinstance(value, dict):
        yield from _guarded_in(list(value.values()))


@contextmanager
def using(tensors: Sequence[torch.Tensor], **how: bool) -> Iterator[None]:
    """Bring guarded tensors back while it is entered, each by its own door (see :meth:`Door.using`)."""
    with ExitStack() as stack:
        doors: dict[int, tuple[Door, list[torch.Tensor]]] = {}
        for tensor in tensors:
            door = door_of(tensor)
            if door is not None:
                doors.setdefault(id(door), (door, []))[1].append(tensor)
        for door, own in doors.values():
            stack.enter_context(door.using(own, **how))
        for tensor in tensors:  # also one that was made of a guarded class, over the memory of a weight
            own_class(tensor)
        yield


def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of PyTorch, with what it needs of guarded tensors."""
    if func in _ARRAYS:
        for tensor in _guarded_in(args):
            if (door := door_of(tensor)) is not None:
                door.will_be_array(tensor)
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is _Tensor.to and _is_there(*args, **kwargs):
        return args[0]
    if func == _Tensor.data.__set__ and args[0] is args[1]:
        return None  # as Module.to() does with what it has not moved
    guarded = list(_guarded_in((args, kwargs)))
    if func is torch.Tensor.detach and guarded and (door := door_of(guarded[0])) is not None:
        found = door.shown(guarded[0])
        if found is not None:
            return found
    if func in _ONE_BY_ONE and _may_be_cut(args, kwargs):
        return _in_pieces(func, *args, **kwargs)
    with using(guarded, exposes=_may_write_unseen(func), pins=func in _ADDRESSES):
        return func(*args, **kwargs)


def _may_write_unseen(func: Any) -> bool:
    """Whether a function may change bytes without a sign in the version.

    Few operators of extensions leave a sign. While a mode of ``__torch_dispatch__`` (``FlopCounterMode``) is entered,
    lists and ``out=`` leave none.
    """
    is_operator = isinstance(func, OpOverload | OpOverloadPacket)
    return func in _EXPOSING or is_operator or bool(_Torch._C._len_torch_dispatch_stack())


def _may_be_cut(args: Any, kwargs: Any) -> bool:
    """Whether a function of a list treats the parts of the list as it would treat the whole.

    Kernels look at the list for their implementation: tensors of one kind, without gaps, have the same one in any part.
    """
    others = (*args[1:], *kwargs.values())
    if not args or not isinstance(args[0], list | tuple) or any(isinstance(one, list | tuple) for one in others):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        kinds = {(tensor.dtype, tensor.device, tensor.layout) for tensor in args[0]}
        return len(kinds) == 1 and all(
            tensor.is_contiguous() and not (torch.is_grad_enabled() and tensor.requires_grad) for tensor in args[0]
        )


def _in_pieces(func: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a function with a part of the list at a time, so that not all of it has to be in memory."""
    results: list[Any] = []
    pieces: list[list[torch.Tensor]] = []
    left = 0
    for tensor in tensors:
        with torch._C.DisableTorchFunctionSubclass():
            nbytes = tensor.nbytes
        if not pieces or left < nbytes:
            pieces.append([])
            left = _PIECE_BYTES
        pieces[-1].append(tensor)
        left -= nbytes
    for piece in pieces:
        with using(list(_guarded_in(piece)), exposes=_may_write_unseen(func)):
            results.append(func(piece, *args, **kwargs))
    # Lists of PyTorch's are tuples; what works in place returns nothing.
    return None if results[0] is None else type(results[0])(one for result in results for one in result)


class _Guarding:
    """Has the door asked before whatever is done with a tensor."""

    __slots__ = ()
    own_class_when_used: Any

    @classmethod
    # The compiler's graph would have a weight that is away for an input.
    @_Torch._disable_dynamo  # type: ignore[untyped-decorator]
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ask(func, args, kwargs or {})

    # These two are asked as attributes, not as functions of PyTorch.
    def __deepcopy__(self: Any, memo: Any) -> Any:
        own = self.own_class_when_used
        with using([self]):
            return own.__deepcopy__(self, memo)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        own = self.own_class_when_used
        with using([self], exposes=True):  # what is pickled is the storage
            return own.__reduce_ex__(self, protocol)


class _Guarded(_Guarding, nn.Parameter):
    """A parameter whose bytes may be away."""

    own_class_when_used = nn.Parameter


class _GuardedTensor(_Guarding, torch.Tensor):
    """A gradient whose bytes may be away."""

    own_class_when_used = torch.Tensor


GUARDED_OF: dict[type[torch.Tensor], Any] = {kind.own_class_when_used: kind for kind in (_Guarded, _GuardedTensor)}
"""By the class that a tensor has when it is used; also for lists of classes that PyTorch goes by."""
GUARDED: tuple[type[torch.Tensor], ...] = tuple(GUARDED_OF.values())
