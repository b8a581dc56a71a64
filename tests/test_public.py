"""The public face: what may be used is what ``__all__`` lists."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import lightning_ssd

PROMISED = {"HardwareProfile", "OffloadMonitor", "OffloadPolicy", "Offloader", "SSDOffloadStrategy"} | {
    "SSDOffloadFSDPStrategy",
    "SSDOffloadFabricStrategy",
}
MODULES = sorted(
    found.name for found in pkgutil.walk_packages(lightning_ssd.__path__, prefix="lightning_ssd.") if not found.ispkg
)


def test_all_is_sorted_and_complete() -> None:
    names = {
        name for name, value in vars(lightning_ssd).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert lightning_ssd.__all__ == sorted(lightning_ssd.__all__)
    assert {name for name in lightning_ssd.__all__ if not name.startswith("_")} == names


def test_the_promised_names_are_there() -> None:
    assert set(lightning_ssd.__all__) >= PROMISED


def test_all_names_exist_and_are_documented() -> None:
    for name in lightning_ssd.__all__:
        value = getattr(lightning_ssd, name)
        assert inspect.getdoc(value) or not callable(value), f"{name} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_lists_what_it_offers(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is for"
    missing = [word for word in module.__all__ if not hasattr(module, word)]
    assert not missing, f"{name}.__all__ lists names that do not exist: {missing}"


def test_the_package_is_typed() -> None:
    assert Path(lightning_ssd.__file__).with_name("py.typed").is_file()
