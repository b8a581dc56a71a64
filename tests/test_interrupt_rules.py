"""Python code that runs when something dies swallows Ctrl-C, and Python code under a lock may leave the lock taken."""

import ast
from pathlib import Path

import pytest

import lightning_ssd

PACKAGE = Path(lightning_ssd.__file__).parent
PYTHON_AT_DEATH = {"finalize", "WeakMethod", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
"""Each gives a weak reference a callback that is a function of Python."""
C_CALLBACKS = {
    "accounting.note",
    "self._returned.append",
    "self._dead.append",
    "_note_dead",
    "_start",
}
"""Bound methods of deques, and an ``operator.methodcaller``."""
WORKERS_ONLY = {"tiers/read_priority.py": {"Condition"}}
"""Used by workers and by closing, where no interrupt comes (:mod:`lightning_ssd.common.interrupts`)."""


def python_at_death(source):
    """Code of Python that runs when an object dies."""
    found = []
    tree = ast.parse(source)
    weak_classes = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any("weakref.ref" in ast.unparse(base) or ast.unparse(base) == "Watched" for base in node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(f"{node.lineno}: __del__")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.rpartition(".")[2] in PYTHON_AT_DEATH:
            found.append(f"{node.lineno}: {name}")
        if (name == "weakref.ref" or name in weak_classes) and len(node.args) > 1:
            callback = ast.unparse(node.args[1])
            if callback not in C_CALLBACKS:
                found.append(f"{node.lineno}: callback {callback}")
    return found


def python_under_locks(source):
    """Classes of ``threading`` that take a lock in Python code."""
    names = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    # Events of PyTorch have the same name, and wait in C.
    own = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] in ("", "threading", "queue")}
    return own & {"Condition", "Event", "Semaphore", "Barrier", "Queue"}


def test_no_python_runs_when_something_dies():
    found = {path: python_at_death(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(PACKAGE)): what for path, what in found.items() if what} == {}


def test_locks_of_python_are_for_workers():
    found = {path: python_under_locks(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {str(path.relative_to(PACKAGE)): what for path, what in found.items() if what} == WORKERS_ONLY


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n    def __del__(self): pass", ["2: __del__"]),
        ("import weakref\nweakref.finalize(a, f)", ["2: weakref.finalize"]),
        ("import weakref\nclass B(weakref.ref['A']): pass\nB(a, lambda r: 1)", ["3: callback lambda r: 1"]),
        ("import weakref\nweakref.ref(a)\nweakref.ref(a, self._dead.append)", []),
    ],
)
def test_the_rule_can_fail(source, found):
    assert python_at_death(source) == found
    assert python_under_locks("import threading\nthreading.Condition(), queue.Queue()") == {"Condition", "Queue"}
