"""Tests and scripts, written for ``lightning``, over ``pytorch_lightning`` and ``lightning_fabric``.

python -m tests.support.second_package tests.support.ddp_script <arguments>
"""

import sys
from importlib import import_module
from types import ModuleType

import pytest

import lightning_ssd.pytorch_lightning  # noqa: F401  # serves what is below it
from lightning_ssd._both_packages import IMPORTS, SecondFinder

_NAME = "over_pytorch_lightning"
_SHARED = (
    *("parity.lightning_pairs", "parity.lightning_nets"),
    *("support.trainers", "support.loggers", "support.loops", "support.fsdp_script"),
)
"""What they import of ours that imports Lightning."""
_IMPORTS = {
    **IMPORTS,
    "lightning": "pytorch_lightning",
    **{f"tests.{module}": f"{_NAME}.tests.{module}" for module in _SHARED},
}


def over_pytorch_lightning(name):
    """A module of the tests, loaded a second time."""
    if _NAME not in sys.modules:
        for package in ("", ".tests", ".tests.parity", ".tests.support", ".tests.strategies"):
            made = sys.modules[_NAME + package] = ModuleType(_NAME + package)
            made.__path__ = []
        sys.meta_path.append(SecondFinder("tests", f"{_NAME}.tests", _IMPORTS))
    return import_module(f"{_NAME}.{name}")


def again_over_pytorch_lightning(name, *, by_default=(), but=()):
    """What pytest is to find of a module of tests, over the second package.

    Args:
        name: of the module.
        by_default: tests that run by default; all others are exhaustive. Without any, none is.
        but: tests that do not train with Lightning.
    """
    found = vars(over_pytorch_lightning(name))
    assert not {*by_default, *but} - set(found)
    for key, value in found.items():
        if by_default and key.startswith("test_") and key not in by_default:
            pytest.mark.exhaustive(value)
    return {key: value for key, value in found.items() if not key.startswith("__") and key not in but}


if __name__ == "__main__":  # Lightning starts it again for each process, with the same arguments
    over_pytorch_lightning(sys.argv[1]).run(sys.argv[2:])
