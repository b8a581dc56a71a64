"""The contents of one object, item by item, and putting that back into the very object.

Containers, the attributes of modules and classes, what functions close over, slots, and the bytes of small arrays.
"""

from __future__ import annotations

import array
import operator
import sys
import types
from collections import OrderedDict
from typing import Any

from torch import nn

from lightning_ssd.common.method_patch import MethodPatch

__all__ = ["Slots", "contents_of", "is_array", "is_same", "nbytes_of", "put", "slots_of"]

_ABSENT = object()


class Slots:
    """The ``__slots__`` of one object."""

    def __init__(self, owner: object, slots: list[types.MemberDescriptorType]) -> None:
        self.owner, self.slots = owner, slots

    def contents(self) -> list[Any]:
        """One per slot."""
        return [_slot(slot, self.owner) for slot in self.slots]

    def put(self, contents: list[Any]) -> None:
        """Past setters that the object may have of its own."""
        for slot, value in zip(self.slots, contents, strict=True):
            if value is not _ABSENT:
                slot.__set__(self.owner, value)
            elif _slot(slot, self.owner) is not _ABSENT:
                slot.__delete__(self.owner)


def _slot(slot: types.MemberDescriptorType, owner: object) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _ABSENT


def slots_of(value: object) -> Slots | None:
    """Those of classes in Python; ``None``: it has none."""
    slots = [
        slot
        for base in type(value).__mro__
        if "__slots__" in base.__dict__
        for slot in base.__dict__.values()
        if isinstance(slot, types.MemberDescriptorType)
    ]
    return Slots(value, slots) if slots else None


def is_array(value: object) -> bool:
    """Whether it holds bytes, or numbers, that may be changed in place."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, bytearray | array.array) or (numpy is not None and isinstance(value, numpy.ndarray))


def nbytes_of(value: Any) -> int | None:
    """Return the bytes of an array; ``None``: it holds objects."""
    if isinstance(value, bytearray):
        return len(value)
    if isinstance(value, array.array):
        return len(value) * value.itemsize
    return None if value.dtype.hasobject else int(value.nbytes)


def contents_of(place: Any) -> list[Any]:
    """Return the contents: of what has keys all keys, then all values; of an array its bytes."""
    if isinstance(place, dict):
        return [*place.keys(), *place.values()] if place else []
    if isinstance(place, nn.Module):
        return contents_of(place.__dict__)
    if isinstance(place, type):
        return [*vars(place), *vars(place).values()]
    if isinstance(place, types.CellType):
        try:
            return [place.cell_contents]
        except ValueError:  # nothing is in it yet
            return []
    if isinstance(place, Slots):
        return place.contents()
    if is_array(place):
        return [bytes(place) if isinstance(place, bytearray) else place.tobytes()]
    return list(place)


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether the same objects are in both; bytes need only be equal."""
    if len(one) == len(other) and all(map(operator.is_, one, other)):
        return True
    return len(one) == len(other) == 1 and type(one[0]) is type(other[0]) is bytes and one[0] == other[0]


def put(place: Any, contents: list[Any]) -> None:
    """Make it hold what :func:`contents_of` has given. May be called again where an interrupt came between."""
    middle = len(contents) // 2
    if isinstance(place, type | nn.Module):
        _put_attributes(place, dict(zip(contents[:middle], contents[middle:], strict=True)))
    elif isinstance(place, dict):
        kind = OrderedDict if isinstance(place, OrderedDict) else dict  # classes of their own may refuse
        if not is_same(list(place), contents[:middle]):
            kind.clear(place)
        for key, value in zip(contents[:middle], contents[middle:], strict=True):
            kind.__setitem__(place, key, value)
    elif isinstance(place, types.CellType):
        if contents:
            place.cell_contents = contents[0]
        else:
            del place.cell_contents
    elif isinstance(place, Slots):
        place.put(contents)
    elif is_array(place):
        _put_bytes(place, contents[0])
    else:
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(contents)


def _put_bytes(place: Any, content: bytes) -> None:
    if isinstance(place, bytearray):
        place[:] = content
    elif isinstance(place, array.array):
        place[:] = array.array(place.typecode, content)
    else:
        place[...] = sys.modules["numpy"].frombuffer(content, dtype=place.dtype).reshape(place.shape)


def _put_attributes(place: Any, wanted: dict[str, Any]) -> None:
    """One by one: a module, or a class, that loses all of them for a moment may lose them for good by Ctrl-C."""
    now = dict(vars(place))
    for name in [*(now.keys() - wanted.keys()), *wanted]:
        old, new = now.get(name, _ABSENT), wanted.get(name, _ABSENT)
        if old is new or issubclass(type(old), MethodPatch) or issubclass(type(new), MethodPatch):
            continue  # our own stand-ins come and go as they please
        if isinstance(place, nn.Module):  # past setters that a module may have of its own
            if new is _ABSENT:
                del place.__dict__[name]
            else:
                place.__dict__[name] = new
        elif new is _ABSENT:
            delattr(place, name)
        else:
            setattr(place, name, new)
