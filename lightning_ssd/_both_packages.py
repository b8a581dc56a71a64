"""Lets classes of ours serve both packages of Lightning: ``lightning``, and ``pytorch_lightning`` with its Fabric.

Note: Why a package of ours is loaded twice
    The two packages have the same source and different classes, and each accepts its own. Our strategies derive from
    Lightning's. So the modules of :mod:`lightning_ssd.strategies`, written for ``lightning``, are loaded a second time
    under ``lightning_ssd.pytorch_lightning``, with ``pytorch_lightning`` and ``lightning_fabric`` in their imports. It
    happens when a Trainer or a Fabric of these takes a strategy of ours, and not before. A callback needs no second
    class: it derives from the ``Callback`` of each package that the program has imported.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import CodeType, ModuleType
from typing import Any, TypeVar

from lightning_ssd.common.after_import import after_import

__all__ = ["IMPORTS", "SecondFinder", "become_counterpart", "callback_of_both_packages", "is_of_lightning"]

_T = TypeVar("_T")

_FIRST, _SECOND = "lightning_ssd.strategies", "lightning_ssd.pytorch_lightning.strategies"
IMPORTS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _FIRST: _SECOND}
"""A module that is loaded a second time imports the second of each pair in place of the first."""


def is_of_lightning(cls: type) -> bool:
    """Tell whether a class of either package, or one that derives from it, is of ``lightning``."""
    return any(base.__module__.partition(".")[0] == "lightning" for base in cls.__mro__)


def become_counterpart(strategy: Any) -> bool:
    """Give a strategy of ours the class of the same name for the other package.

    What users have given it stays. Parts that Lightning's constructors have made become those of the other package.

    Returns:
        Whether it has one: a class that a user derives from ours has not.
    """
    other = _counterpart(type(strategy))
    if other is None:
        return False
    strategy.__class__ = other
    attributes = vars(strategy)
    for name, theirs in vars(other()).items():
        mine = attributes.get(name)
        if type(mine) is not type(theirs) and type(mine).__qualname__ == type(theirs).__qualname__:
            attributes[name] = theirs
    return True


def _counterpart(cls: type) -> Any:
    for mine, others in ((_FIRST, _SECOND), (_SECOND, _FIRST)):
        if cls.__module__.startswith(f"{mine}."):
            return getattr(import_module(others + cls.__module__.removeprefix(mine)), cls.__name__)
    return None


def callback_of_both_packages(cls: type[_T]) -> type[_T]:
    """Let a callback of ``lightning`` be one of ``pytorch_lightning``, too, as soon as there is that package."""

    def join(module: ModuleType) -> None:
        if module.Callback not in cls.__mro__:
            cls.__bases__ = (*cls.__bases__, module.Callback)

    after_import("pytorch_lightning.callbacks.callback", join)
    return cls


class SecondFinder(MetaPathFinder):
    """Loads modules once more, under another name and with other imports.

    Args:
        first: a package, or one module.
        second: the other name of it, and of what is in it.
        imports: what its modules import in the place of what, by prefix; the first that fits is taken.
    """

    def __init__(self, first: str = _FIRST, second: str = _SECOND, imports: Mapping[str, str] = IMPORTS) -> None:
        self._first, self._second, self._imports = first, second, imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{self._second}."):
            return None
        first = find_spec(self._first + fullname.removeprefix(self._second))
        if first is None or first.origin is None:
            return None
        loader = _SecondLoader(fullname, first.origin, self._imports)
        spec = spec_from_file_location(fullname, first.origin, loader=loader)
        if spec is not None and first.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # what is below a package is found here, too
        return spec


class _SecondLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, imports: Mapping[str, str]) -> None:
        super().__init__(fullname, path)
        self._imports = imports

    def path_stats(self, path: str) -> Any:
        raise OSError("the bytecode beside the file is that of the first package")

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    alias.name = self._renamed(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                node.module = self._renamed(node.module)
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimization)

    def _renamed(self, name: str) -> str:
        for first, second in self._imports.items():
            if f"{name}.".startswith(f"{first}."):
                return second + name.removeprefix(first)
        return name
