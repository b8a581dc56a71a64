"""Fingerprints of what a call has saved for backward, told apart from what its repetition saves, without holding it.

Gradients depend on nothing else that is computed again, so that a repetition which saves the same gives the same
gradients. Of each saved tensor its type, shape and device are compared, and its bytes: all of a small one, of a larger
one every 251st element, so that no other 251 elements in a row pass, and of the last large one (through which has
passed what the call's result is made of) and of integers sums over all bytes as well. ``full`` takes these sums of
every large one.

Integers may be memory that was never written (seeds of kernels that drop nothing, reserved space): where only they
differ, and look like it, the caller has to find out whether it matters, see ``checkpointed_call.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_ssd.common.dtensor import is_shard, local_of
from lightning_ssd.common.tensors import class_of, storage_of

__all__ = ["Fingerprint", "differs"]

_SMALL_BYTES = 64 << 10
_STRIDE = 251
"""A prime: no row length of a model is a multiple of it, so that columns are met in turn."""
_COLUMNS = 512
_NUM_UNREAD = 2
"""So many tensors wait for the next one before they are read: ``rrelu`` fills its noise after it has saved two."""
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32, torch.uint64})
_KNOWN_DEVICES = ("cpu", "cuda")
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """A fingerprint of the tensors that one call has saved, in order.

    Args:
        full: every byte counts.
        weights: addresses of storages whose identity and version others compare.
        frontier: which tensor, and which part of it, was the last large one of the call that this is to be compared
            with; ``None``: this is the first such call, and finds out.
    """

    def __init__(
        self, *, full: bool = False, weights: Container[int] = (), frontier: tuple[int, int] | None = None
    ) -> None:
        self.frontier = -1, 0
        """After :meth:`close`: which tensor, and which part of it, was the last large one; -1: there was none."""
        self._full = full
        self._weights = weights
        self._wanted = frontier
        self._last: tuple[tuple[int, int], torch.Tensor, int] | None = None
        self._kinds: list[tuple[Any, ...]] = []
        self._unread: deque[tuple[torch.Tensor, object]] = deque()
        """With what keeps a weight from leaving its device before it has been read."""
        self._prints: list[list[torch.Tensor]] = []
        self._integers: dict[int, torch.Tensor] = {}
        self._joined: dict[torch.device, torch.Tensor] = {}
        self.is_closed = False
        """Whether the call is over."""

    @property
    def has_integers(self) -> bool:
        """Whether integers are among them."""
        return bool(self._integers)

    def add(self, tensor: torch.Tensor) -> None:
        """One more."""
        if class_of(tensor) is not type(tensor):
            tensor = tensor.detach()  # of an offloaded weight: its bytes are here as long as this is held
        is_parameter = type(tensor) is torch.nn.Parameter
        # One that is an input comes back from autograd as a tensor.
        kind = torch.Tensor if is_parameter else type(tensor)
        self._kinds.append((kind, tensor.dtype, tuple(tensor.shape), tensor.device))
        is_weight = is_parameter and tensor.layout is torch.strided
        self._unread.append((tensor, storage_of(tensor) if is_weight else None))
        if len(self._unread) > _NUM_UNREAD:
            self._read(self._unread.popleft()[0])

    def _read(self, tensor: torch.Tensor) -> None:
        index = len(self._prints)
        prints: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []  # behind the samples: those of a first call are known at its end
        self._prints.append(prints)
        modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with torch._C.DisableTorchFunction(), modes:
            for number, part in enumerate(_parts(tensor)):
                raw = _raw(part)
                is_large = raw.nbytes > _SMALL_BYTES
                if part.dtype in _INTEGERS and not number:
                    self._integers[index] = torch.cat([_sample(raw), _sums(raw)]) if is_large else _sample(raw)
                    continue
                prints.append(_sample(raw))
                if not is_large:
                    continue
                if self._full or (index, number) == self._wanted:
                    sums.append(_sums(raw))
                elif self._wanted is None and part.untyped_storage()._cdata not in self._weights:
                    self._last = (index, number), raw, raw._version
        prints += sums

    def close(self) -> None:
        """The call is over: hold little from now on."""
        while self._unread:
            self._read(self._unread.popleft()[0])
        if self._last is not None:
            place, raw, version = self._last
            self._last = None
            if raw._version == version:  # else it is no longer what was saved
                self.frontier = place
                self._prints[place[0]].append(_sums(raw))
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for part in (part for prints in self._prints for part in prints):
            by_device.setdefault(part.device, []).append(part)
        self._joined = {device: torch.cat(parts) for device, parts in by_device.items()}
        self.is_closed = True
        if self._wanted is None:
            self._prints.clear()

    def drop(self) -> None:
        """The call has failed: hold nothing. Its graph, which may hold us, would be held for ever."""
        self._unread.clear()
        self._last = None

    def difference(self, other: Fingerprint) -> str | None:
        """Return what ``other``, of a repetition, has saved otherwise. On CUDA this waits for the device.

        Integers are left out, see :meth:`differing_integers`.
        """
        for index, (one, two) in enumerate(zip(self._kinds, other._kinds, strict=False)):
            if one != two:
                return f"saved tensor {index} is {_described(two)} instead of {_described(one)}"
        if len(self._kinds) != len(other._kinds):
            return f"{len(other._kinds)} tensors are saved instead of {len(self._kinds)}"
        for device, joined in self._joined.items():
            again = other._joined.get(device)
            if again is None or not torch.equal(joined, again):
                return self._first_difference(other, device)
        return None

    def _first_difference(self, other: Fingerprint, device: torch.device) -> str:
        joined, start = self._joined[device], 0
        for index, prints in enumerate(other._prints):
            for part in (part for part in prints if part.device == device):
                if not torch.equal(joined[start : start + part.numel()], part):
                    return f"the values of saved tensor {index}, {_described(self._kinds[index])}, differ"
                start += part.numel()
        return "the values of the saved tensors differ"

    def differing_integers(self, other: Fingerprint) -> list[int]:
        """The numbers of the integer tensors that differ."""
        return [index for index, values in self._integers.items() if not torch.equal(values, other._integers[index])]

    def may_be_unwritten(self, index: int) -> bool:
        """Whether these integers look like a seed or reserved space. Others are indices, say, on which gradients depend
        even where the output does not.

        Attention on CUDA saves its seed and offset as a pair and a number of ``uint64``, or as two numbers on the CPU;
        recurrent layers reserve bytes. Of other devices it is not known where they put them.
        """
        _, dtype, shape, device = self._kinds[index]
        if dtype is torch.uint8 or (dtype is torch.uint64 and shape in ((), (2,))):
            return True
        return dtype is torch.int64 and shape == () and (self._is_elsewhere(index) or device.type not in _KNOWN_DEVICES)

    def cannot_be_index(self, index: int) -> bool:
        """Whether no operation takes such integers for an index: of another type, or not where the others are."""
        return self._kinds[index][1] is not torch.int64 or self._is_elsewhere(index)

    def _is_elsewhere(self, index: int) -> bool:
        return self._kinds[index][3].type == "cpu" and any(device.type != "cpu" for *_, device in self._kinds)

    @property
    def kinds(self) -> int:
        """A number that calls have in common which have saved tensors of the same types, shapes and devices."""
        return hash(tuple(self._kinds))


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare the bytes of two tensors. Waits for their device."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return True
    with torch.no_grad(), torch._C.DisableTorchFunction():
        pairs = zip(_parts(one), _parts(other), strict=True)
        return not all(torch.equal(_raw(part), _raw(again)) for part, again in pairs)


def _described(kind: tuple[Any, ...]) -> str:
    _, dtype, shape, device = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of. None of one that has no bytes to compare."""
    if is_shard(tensor):
        yield from _parts(local_of(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._values(), tensor._indices())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.values(), tensor.crow_indices(), tensor.col_indices())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.values(), tensor.ccol_indices(), tensor.row_indices())
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.is_quantized:
        yield tensor.int_repr()
    elif tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor._is_zerotensor():
        yield tensor


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return these bytes as integers, so that a NaN equals itself."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex() and tensor.element_size() > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_AS_INTEGER[tensor.element_size()])


def _sample(raw: torch.Tensor) -> torch.Tensor:
    if raw.nbytes <= _SMALL_BYTES:
        chosen = raw.reshape(-1).clone()
    elif raw.is_contiguous():
        chosen = raw.view(-1)[::_STRIDE].contiguous()
    else:
        chosen = torch.take(raw, torch.arange(0, raw.numel(), _STRIDE, device=raw.device))
    return chosen.view(torch.uint8)


def _sums(raw: torch.Tensor) -> torch.Tensor:
    """Return the sum of each of 512 columns over all rows; the rest as it is. It wraps: any one change is seen."""
    flat = raw.contiguous().view(-1)
    if flat.nbytes % 8 == 0:
        if flat.storage_offset() * flat.element_size() % 8:  # which may be another one in the repetition
            flat = flat.clone()
        flat = flat.view(torch.int64)
    num_whole = flat.numel() // _COLUMNS * _COLUMNS
    sums = flat[:num_whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    return torch.cat([sums.view(torch.uint8), flat[num_whole:].view(torch.uint8)])
