"""Combinations of settings: those that cover each pair or value are default tests, all others are exhaustive."""

from itertools import combinations, product

import pytest


def pairwise(names, *axes, indirect=()):
    """Return what parametrizes a test with every combination of values.

    Args:
        names: of the arguments, separated by commas.
        axes: the values of each argument.
        indirect: the arguments that are parameters of fixtures.
    """
    return pytest.mark.parametrize(names, list(_marked([list(axis) for axis in axes])), indirect=list(indirect))


def each_once(names, *axes, indirect=()):
    """Return what does the same, where each value is to be in one default test at least, whatever it meets there."""
    lists = [list(axis) for axis in axes]
    chosen = {tuple(turn % len(axis) for axis in lists) for turn in range(max(map(len, lists)))}
    return pytest.mark.parametrize(names, list(_params(lists, chosen)), indirect=list(indirect))


def some_of_each(names, values, *axes, num=2):
    """Return what does the same, where each value of the first argument is in some default tests.

    Args:
        names: of the arguments, separated by commas.
        values: of the first argument.
        axes: the values of each other argument: those of the first one are other ones in each of these tests.
        num: how many tests.
    """
    lists = [list(values), *(list(axis) for axis in axes)]
    size, others = len(lists[1]), list(product(*(range(len(axis)) for axis in lists[2:])))
    chosen = {
        (number, (number + turn * (size // num)) % size, *others[(number // size + turn) % len(others)])
        for number in range(len(lists[0]))
        for turn in range(num)
    }
    return pytest.mark.parametrize(names, list(_params(lists, chosen)))


def _marked(axes):
    cases = list(product(*(range(len(axis)) for axis in axes)))
    wanted = {pair for case in cases for pair in _pairs(case)}
    chosen = set()
    while wanted:  # the case that covers most of what no other has covered
        best = max(cases, key=lambda case: len(wanted & _pairs(case)))
        chosen.add(best)
        wanted -= _pairs(best)
    yield from _params(axes, chosen)


def _params(axes, chosen):
    for case in product(*(range(len(axis)) for axis in axes)):
        marks = () if case in chosen else pytest.mark.exhaustive
        yield pytest.param(*(axis[index] for axis, index in zip(axes, case, strict=True)), marks=marks)


def _pairs(case):
    return set(combinations(enumerate(case), 2))
