"""Call a function when the program imports a module, which may be never."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


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
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        # Ask the other finders, since several of this class may wait for one module.
        specs = (finder.find_spec(fullname, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return None
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._name:  # a loader of a zip file serves other modules, too
                self._then(module)

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
