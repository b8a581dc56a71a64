"""Refuses what no strategy object of ours can serve: a second Trainer, and Trainers of ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

from lightning_ssd.errors import ConfigError

__all__ = ["after_import", "one_trainer"]

_T = TypeVar("_T")

_OTHERS = ("pytorch_lightning", "lightning_fabric")


def one_trainer(takes_it: str, import_line: str) -> Callable[[type[_T]], type[_T]]:
    """Let the first Trainer that takes a strategy keep it, if it is one of ``lightning``.

    Lightning's connectors (``_check_config_and_set_final_flags``) read ``_accelerator`` before they take a strategy,
    and set ``accelerator`` when they have taken it. What else Lightning does goes through ``accelerator``. A decorator,
    since one more base would give objects another layout than Lightning's classes have (``become_one_device``).

    Args:
        takes_it: what takes a strategy of this class, "Trainer" or "Fabric".
        import_line: of that.
    """

    def given(self: Any) -> Any:
        if self._set_accelerator is not None:
            name = type(self).__name__
            raise ConfigError(
                f"this {name} belongs to a {takes_it} already, and one object serves one {takes_it}. Write "
                f"{takes_it}(strategy={name}(...)) with a new object for each, or the name {self.strategy_name!r}"
            )
        return self._given_accelerator

    def give(self: Any, accelerator: Any) -> None:
        self._given_accelerator = accelerator

    def used(self: Any) -> Any:
        return self._given_accelerator if self._set_accelerator is None else self._set_accelerator

    def use(self: Any, accelerator: Any) -> None:
        packages = {cls.__module__.partition(".")[0] for cls in type(accelerator).__mro__}
        for other in _OTHERS:
            if other in packages:
                raise ConfigError(
                    f"this {takes_it} comes from {other}, whose classes are not those of lightning, which "
                    f"{type(self).__name__} is made for. Write `{import_line}` in place of imports from {other}, "
                    "everywhere"
                )
        self._set_accelerator = accelerator

    def decorate(cls: type[_T]) -> type[_T]:
        more = {"_given_accelerator": None, "_set_accelerator": None}
        for name, value in {**more, "_accelerator": property(given, give), "accelerator": property(used, use)}.items():
            setattr(cls, name, value)
        return cls

    return decorate


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with a module: now if the program has imported it, else when it does."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._name:  # a loader of a zip file serves other modules, too
                self._then(module)

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
