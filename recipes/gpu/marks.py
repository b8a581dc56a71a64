"""Which test files have tests that are marked ``gpu``, found without importing or collecting them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["files_with_gpu_tests", "has_gpu_tests"]

_MARK = "gpu"


def files_with_gpu_tests(tests: Path) -> list[Path]:
    """Below a directory, in order."""
    return [path for path in sorted(tests.rglob("test_*.py")) if has_gpu_tests(path.read_text(encoding="utf-8"))]


def has_gpu_tests(source: str) -> bool:
    """Whether a source uses ``pytest.mark.gpu``, in whatever place: a decorator, ``pytestmark``, a parameter."""
    return _MARK in source and _MARK in _marks(ast.parse(source))


def _marks(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name == "mark":
                yield node.attr
