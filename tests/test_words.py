"""Words that hide who acts, and first lines of docstrings that hide what is done: package and docs have none."""

import ast
import re
from pathlib import Path

import lightning_ssd

PACKAGE = Path(lightning_ssd.__file__).parent
DOCS = PACKAGE.parent / "docs"
NAMELESS = re.compile(r"\b(nobody|somebody|whoever|anybody)\b", re.IGNORECASE)
SUFFIX = re.compile(r"allowed(?: there)?: ", re.IGNORECASE)
"""Errors name the line to write instead."""
OPENINGS = ("Of ", "What ", "The same")


def found_in(source):
    """Yield each occurrence in the text of a module."""
    yield from NAMELESS.findall(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from SUFFIX.findall(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring, also of an attribute
            text = str(node.value.value)
            yield from [text.partition("\n")[0]] * text.startswith(OPENINGS)


def test_no_such_word_is_in_the_package():
    found = {
        str(path.relative_to(PACKAGE)): list(found_in(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert found, "no module was read"
    assert {name: words for name, words in found.items() if words} == {}


def test_no_such_word_is_in_the_docs():
    found = {
        str(path.relative_to(DOCS)): NAMELESS.findall(path.read_text(encoding="utf-8"))
        for path in sorted(DOCS.rglob("*.md"))
    }
    assert found, "no page was read"
    assert {name: words for name, words in found.items() if words} == {}


def test_the_test_can_fail():
    source = 'def f():\n    """Of the other."""\n    # nobody asks\n    raise ValueError(f"x={1}; allowed: 2")\n'
    assert sorted(found_in(source)) == ["Of the other.", "allowed: ", "nobody"]
    assert not list(found_in('def f():\n    """Return what is set."""\n    raise ValueError("x=1; write x=2")\n'))
