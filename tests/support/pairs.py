"""Combinations of settings: those that cover each pair or value are default tests, all others are exhaustive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(names: str, *axes: Iterable[Any], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return what parametrizes a test with every combination of values.

    Args:
        names: of the arguments, separated by commas.
        axes: the values of each argument.
        indirect: the arguments that are parameters of fixtures.
    """
    return pytest.mark.parametrize(names, list(_marked([list(axis) for axis in axes])), indirect=list(indirect))


def each_once(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Return what does the same, where each value is to be in one default test at least, whatever it meets there.

    Args:
        names: of the arguments, separated by commas.
        axes: the values of each argument.
    """
    lists = [list(axis) for axis in axes]
    chosen = {tuple(turn % len(axis) for axis in lists) for turn in range(max(map(len, lists)))}
    return pytest.mark.parametrize(names, list(_params(lists, chosen)))


def _marked(axes: list[list[Any]]) -> Iterator[Any]:
    cases = list(product(*(range(len(axis)) for axis in axes)))
    wanted = {pair for case in cases for pair in _pairs(case)}
    chosen = set()
    while wanted:  # the case that covers most of what no other has covered
        best = max(cases, key=lambda case: len(wanted & _pairs(case)))
        chosen.add(best)
        wanted -= _pairs(best)
    yield from _params(axes, chosen)


def _params(axes: list[list[Any]], chosen: set[tuple[int, ...]]) -> Iterator[Any]:
    for case in product(*(range(len(axis)) for axis in axes)):
        marks = () if case in chosen else pytest.mark.exhaustive
        yield pytest.param(*(axis[index] for axis, index in zip(axes, case, strict=True)), marks=marks)


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(case), 2))
