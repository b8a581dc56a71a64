"""Copies of frozen weights that autocast has made: told from activations by their bytes, let go of, and made again.

Autocast casts a frozen weight at each use, and autograd saves the copy like an activation. Where the weight waits, its
copy need not: backward casts the weight again, as forward did.

Note: How a copy is known
    Nobody tells where a tensor comes from. But what has all the bits of a weight's copy may be made from the weight,
    whoever made it. So it is compared as a whole with each frozen weight of as many elements that a forward under way
    may use. The first few thousand elements tell nearly all others.

Note: When it may go
    When nobody else holds it any more. Whoever does may edit it, with or without a sign in its version; an operation
    may fill what it has saved (``operation.py``), in memory that still has the bits of a copy that was there before. If
    that has happened, which a checksum tells, it stays, and backward gets it as it is.

Note: What proves that it is the same again
    The same checksum. A weight that was edited between forward and backward is an error: plain PyTorch would go on with
    the copy that it has.

Copies of trained weights are left alone: they lie in autocast's cache until the forward is over, and an optimizer may
step before backward wants them (as of two networks that train each other), where plain PyTorch goes on. So are those on
devices: to compare one is to wait for all that the device has to do, and so is to prove that it is the same again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from typing import Any

import torch

from lightning_ssd.common.inplace_edits import VersionProbe, inplace_error, resized_error
from lightning_ssd.common.tensors import Region, StorageKey, TensorSpec, can_count_holders, use_count
from lightning_ssd.parameters.casts import cast, is_cast, plain_tensors
from lightning_ssd.parameters.pager import Pager
from lightning_ssd.tiers.checksum import checksum

__all__ = ["SavedCopy", "WeightCopies"]

_DTYPES = frozenset({torch.bfloat16, torch.float16})
_WEIGHT_DTYPES = _DTYPES | {
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
}
"""Of weights that are looked at. Others PyTorch casts with a warning (complex ones), or not at all (packed bits)."""
_NUM_LOOKED_AT = 4


class WeightCopies:
    """Finds them among what autograd saves.

    Args:
        pager: of the weights.
    """

    def __init__(self, pager: Pager[Any]) -> None:
        _references_of_one()  # learnt now: it makes a tensor, which modes of the user's would see later
        self._pager = pager
        self._held: dict[int, weakref.ref[_Copy]] = {}
        """Whose memory has not gone yet, by the address of the storage. Single operations on it are atomic."""

    def save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedCopy | None:
        """What autograd is to hold in place of a saved tensor; ``None``: it shows no copy of a weight that waits.

        Args:
            tensor: a plain one, in memory of the host.
            storage: of the tensor.
        """
        if tensor.dtype not in _DTYPES or tensor.requires_grad:
            return None
        self._look(_NUM_LOOKED_AT)
        known = self._held.get(storage._cdata)
        copy = None if known is None else known()
        if copy is None or copy.storage is None:
            copy = self._recognise(tensor.dtype, storage)
            if copy is None:
                return None
            self._held[storage._cdata] = weakref.ref(copy)
        return SavedCopy(copy, tensor)

    def _recognise(self, dtype: torch.dtype, storage: torch.UntypedStorage) -> _Copy | None:
        numel, rest = divmod(storage.nbytes(), dtype.itemsize)
        candidates = self._pager.in_use(numel)
        if not candidates or rest or not can_count_holders():
            return None
        with plain_tensors():
            for weight, part in candidates:
                memory = weight.memory.key.resolve()
                unit = self._pager.by_storage.get(weight.memory.key.cdata)
                if memory is None or unit is None or not weight.is_frozen:
                    continue
                if part.dtype is dtype or part.dtype not in _WEIGHT_DTYPES:
                    continue
                source = part.of(memory)
                if is_cast(Region.of(storage), dtype, source):
                    bring_in = partial(self._pager.wanted, unit)
                    return _Copy(storage, dtype, source, bring_in, name=", ".join(weight.names))
        return None

    def look_at_all(self) -> None:
        """A forward is over: let go of what nobody else holds any more."""
        self._look(len(self._held))

    def _look(self, num: int) -> None:
        for cdata in list(islice(self._held, num)):
            known = self._held.pop(cdata, None)
            copy = None if known is None else known()
            if known is not None and copy is not None and not copy.is_settled():
                self._held[cdata] = known  # behind all others


class _Copy:
    """One copy of a weight, whatever number of saved tensors show it.

    Args:
        storage: of the copy.
        dtype: of the copy.
        source: the weight, flat. It keeps the weight's storage alive, not in memory.
        bring_in: blocks until the weight is in memory.
        name: of the weight.
    """

    __slots__ = ("__weakref__", "_again", "_bring_in", "_checksum", "_dtype", "_name", "_source", "storage")

    def __init__(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        source: torch.Tensor,
        bring_in: Callable[[], None],
        *,
        name: str,
    ) -> None:
        self.storage: torch.UntypedStorage | None = storage  # until it has gone
        self._again: StorageKey | None = None
        """Of what was made in its place last. Whoever is given it while another one has it sees what that one does."""
        self._dtype, self._source, self._bring_in, self._name = dtype, source, bring_in, name
        self._checksum = checksum(Region.of(storage))

    def is_settled(self) -> bool:
        """Let go of the memory if that may be; whether there is nothing more to be done."""
        storage = self.storage
        if storage is None:
            return True
        if not _is_alone(storage):
            return False
        if checksum(Region.of(storage)) == self._checksum:
            self.storage = None
        return True

    def whole(self) -> torch.UntypedStorage:
        """Its memory, made again if it has gone and nobody has what was made before.

        Raises:
            RuntimeError: the weight has other values than it had, or the memory was resized.
            StorageError: the drive refuses to read the weight.
        """
        nbytes, storage, again = self._source.numel() * self._dtype.itemsize, self.storage, self._again
        if storage is None and again is not None:
            storage = again.resolve()
        if storage is not None and storage.nbytes() < nbytes:
            raise resized_error(nbytes, storage.nbytes())
        if storage is not None:
            return storage
        self._bring_in()
        with plain_tensors():
            storage = cast(self._source, self._dtype).untyped_storage()
        if checksum(Region.of(storage)) != self._checksum:
            dtype = str(self._dtype).removeprefix("torch.")
            raise RuntimeError(
                f"backward needs the {dtype} copy of frozen weight {self._name} that forward has computed with, which "
                "is made again from the weight; the weight has other values now than in forward; change weights when "
                "backward is over, or set OffloadPolicy.parameters='keep'"
            )
        self._again = StorageKey(storage)
        return storage


class SavedCopy:
    """What autograd holds of a saved copy of a weight: which it is, and which view of it."""

    __slots__ = ("_copy", "_device", "_probe", "_spec")

    def __init__(self, copy: _Copy, tensor: torch.Tensor) -> None:
        self._copy = copy
        self._device = tensor.device
        self._spec = TensorSpec.of(tensor)
        self._probe = VersionProbe(tensor)

    @property
    def lease(self) -> Callable[[], object | None]:
        """Returns ``None`` once nobody can ask for the copy again."""
        return weakref.ref(self._copy)

    def tensor(self) -> torch.Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: it was edited in place since, in PyTorch's words; or the weight was.
        """
        if self._probe.version != self._probe.saved:
            description = self._spec.dtype, self._device, self._spec.size
            raise inplace_error(description, None, version=self._probe.version, expected=self._probe.saved)
        return self._probe.rebuild(self._spec, self._copy.whole())


def _is_alone(storage: torch.UntypedStorage) -> bool:
    """Whether only a :class:`_Copy` refers to a storage, no tensor and no other object."""
    return use_count(storage._cdata) <= 1 and sys.getrefcount(storage) <= _references_of_one()


@cache
def _references_of_one() -> int:
    """To a storage object that only one object refers to, seen as in :func:`_is_alone`."""

    def count(storage: torch.UntypedStorage) -> int:
        return sys.getrefcount(storage)

    owner = [torch.empty(1, device="cpu").untyped_storage()]
    storage = owner[0]
    return count(storage)
