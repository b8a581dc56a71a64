"""What an optimizer's step can change besides the optimizer: class attributes, module variables and closures."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from enum import EnumMeta
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_ssd.optimizer.step.copies import same

__all__ = ["kept_surroundings", "own_code"]

_CODE = (FunctionType, type, staticmethod, classmethod, property)
_NOT_COPIED = (*_CODE, BuiltinFunctionType, MethodType, ModuleType, nn.Module)


@contextlib.contextmanager
def kept_surroundings(kind: type, memo: Mapping[int, Any]) -> Iterator[Callable[[], list[str]]]:
    """Put copies in the places of class attributes, of variables that methods name, and of their closures.

    Args:
        kind: a class of optimizers. Code of PyTorch, and of other packages than a base class is of, is not looked at.
        memo: as that of ``copy.deepcopy``.

    Yields:
        a function that names the places that have changed since.
    """
    before = _places(kind)

    def changed() -> list[str]:
        now = _places(kind)
        return [place[1] for place in now if place not in before or not same(now[place][1], before[place][1])]

    written = []
    try:
        for (_, name), (owner, value) in before.items():
            with contextlib.suppress(Exception):  # what cannot be copied, such as a lock, stays
                _write(owner, name, copy.deepcopy(value, dict(memo)))
                written.append((owner, name, value))
        yield changed
    finally:
        for place in written:
            _write(*place)


def _places(kind: type) -> dict[tuple[int, str], tuple[Any, Any]]:
    """By owner and name, the owner (a class, a closure's cell or a dictionary) and the value."""
    return {
        (id(owner), name): (owner, value)
        for code in own_code(kind)
        for owner, name, value in _values(code)
        if not isinstance(value, _NOT_COPIED)
    }


def own_code(kind: type) -> list[Any]:
    """Return a class with its bases and methods, and the functions and classes of its packages that these name."""
    found: list[Any] = [base for base in kind.__mro__ if _package(base) not in ("torch", "builtins")]
    packages = set(map(_package, found))
    for code in found:  # which grows
        for _, _, value in _values(code):
            parts = (value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset")))
            for part in parts if isinstance(value, _CODE) else ():
                is_code = isinstance(part, FunctionType | type) and not isinstance(part, EnumMeta)
                if is_code and _package(part) in packages and part not in found:
                    found.append(part)
    return found


def _package(code: Any) -> str:
    return str(code.__module__).partition(".")[0]


def _values(code: Any) -> list[tuple[Any, str, Any]]:
    if isinstance(code, type):
        return [(code, name, value) for name, value in vars(code).items() if not name.startswith(("__", "_abc"))]
    cells = zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)
    known = code.__globals__
    is_wrapper = str(known.get("__name__")).partition(".")[0] != _package(code)  # made by a decorator
    names = () if is_wrapper else set(_names(code.__code__)) & known.keys()
    return [
        *((cell, name, cell.cell_contents) for name, cell in cells if cell != CellType()),  # but not one without any
        *((vars(code), name, value) for name, value in vars(code).items()),
        (code, "__defaults__", code.__defaults__),
        *((known, name, known[name]) for name in names),
    ]


def _write(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, "cell_contents" if isinstance(owner, CellType) else name, value)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
