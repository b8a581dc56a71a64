"""Which bytes of a storage its saved tensors show, and when a storage that has been saved in part may leave.

Note: Why parts count
    PyTorch's own operations count a version when they write into a storage. A kernel from elsewhere (Triton, an
    extension, NumPy on a CPU) does not: it may fill the second half of a buffer when the first half has been saved, or
    even written. So what is saved later is there behind a mark taken *then*, and a copy made before does not have it.
    The program holds until then what will be saved later, so that writing the storage earlier would free nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from lightning_ssd.common.tensors import can_count_holders, is_released

if TYPE_CHECKING:
    from lightning_ssd.activations.saved_storage import SavedStorage

__all__ = ["WHOLE", "DeferredWrites", "SavedParts"]

_NUM_LOOKED_AT = 4
_MAX_DEFERRED = 64

_Part = tuple[int, tuple[tuple[int, int], ...]]
"""First byte, and (stride, size) of each dimension in bytes, the innermost one first."""


class SavedParts:
    """The saved parts of one storage.

    Args:
        nbytes: of the storage.
        tensor: the first one over it that is saved.
    """

    __slots__ = ("_nbytes", "_parts", "is_whole")

    def __init__(self, nbytes: int, tensor: torch.Tensor) -> None:
        self._nbytes = nbytes
        self.is_whole = tensor.nbytes == nbytes and tensor.is_contiguous()
        self._parts = [] if self.is_whole else [_part(tensor)]

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether those before it show all that this one shows."""
        return self.is_whole or _is_within(_part(tensor), self._parts)

    def add(self, tensor: torch.Tensor) -> None:
        """This one shows more."""
        new = _part(tensor)
        if _is_dense(new):
            begin, end = _range(new)
            for old in filter(_is_dense, list(self._parts)):
                if _range(old)[0] <= end and begin <= _range(old)[1]:
                    self._parts.remove(old)
                    begin, end = min(begin, _range(old)[0]), max(end, _range(old)[1])
            new = begin, ((1, end - begin),)
        self._parts.append(new)
        self.is_whole = new == (0, ((1, self._nbytes),))


WHOLE = SavedParts(0, torch.empty(0, device="cpu"))
"""Parts of storages whose first saved tensor shows all of them: none is ever added."""


def _part(tensor: torch.Tensor) -> _Part:
    """Equal for tensors over the same bytes, however they are viewed, unless elements overlap."""
    itemsize = tensor.element_size()
    begin = int(tensor.storage_offset()) * itemsize
    if tensor.numel() == 0:
        return begin, ((1, 0),)
    dims = [(1, itemsize)]
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1 or stride == 0:
            continue
        last_stride, last_size = dims[-1]
        if stride * itemsize == last_stride * last_size:
            dims[-1] = last_stride, last_size * size
        else:
            dims.append((stride * itemsize, size))
    return begin, tuple(dims)


def _range(part: _Part) -> tuple[int, int]:
    begin, dims = part
    return begin, begin + 1 + sum(stride * (size - 1) for stride, size in dims)


def _is_dense(part: _Part) -> bool:
    return len(part[1]) == 1


def _is_within(part: _Part, known: list[_Part]) -> bool:
    begin, end = _range(part)
    return any(part == old or (_is_dense(old) and _range(old)[0] <= begin and end <= _range(old)[1]) for old in known)


class DeferredWrites:
    """Storages that are to move, and of which a part alone has been saved yet, or that an operation may fill after it
    has saved them. The accounting lock guards them.

    Such a one is sent when the operation is over, and all of it has been saved or the program holds it no more; or
    when the forward is over.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[SavedStorage, Callable[[], None]]] = deque()

    def add(self, record: SavedStorage, send: Callable[[], None]) -> None:
        """``send`` queues the record's write."""
        self._waiting.append((record, send))
        if len(self._waiting) > _MAX_DEFERRED:
            self._send_first()

    def look(self) -> None:
        """Send some of those that need wait no longer."""
        for _ in range(min(_NUM_LOOKED_AT, len(self._waiting))):
            record, _ = self._waiting[0]
            if record.parts.is_whole or is_released(record.identity) or not can_count_holders():
                self._send_first()
            else:
                self._waiting.rotate(-1)

    def send_all(self) -> None:
        """No more is saved, or memory is short."""
        for _ in range(len(self._waiting)):
            self._send_first()

    def drop(self) -> None:
        """They stay in memory."""
        self._waiting.clear()

    def _send_first(self) -> None:
        record, send = waiting = self._waiting.popleft()
        if not record.is_filled():
            self._waiting.append(waiting)
        elif record.can_be_evicted:  # it was not freed, sent or used since
            send()
