"""Which bytes of a storage its saved tensors show, and when a storage that has been saved in part may leave.

Note: Why parts count
    PyTorch's own operations count a version when they write into a storage. A kernel from elsewhere (Triton, an
    extension, NumPy on a CPU) does not: it may fill the second half of a buffer when the first half has been saved, or
    even written. So what is saved later is there behind a mark taken *then*, and a copy made before does not have it.
    The program holds until then what will be saved later, so that writing the storage earlier would free nothing.
"""

from __future__ import annotations

import torch

__all__ = ["WHOLE", "SavedParts"]

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
        self._parts = [_part(tensor)]
        self.is_whole = self._parts[0] == (0, ((1, nbytes),))

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


WHOLE = SavedParts(0, torch.empty(0, device="cpu"))
"""Parts of storages whose first saved tensor shows all of them: none is ever added."""
