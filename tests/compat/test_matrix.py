"""The matrix of versions: what is chosen, what is said of the rest, and a run with the building left out."""

import sys
from pathlib import Path

import pytest

from recipes.compat import matrix as compat
from recipes.compat.matrix import Combination

FOUND = ["2.15.0", "2.14.1", "2.14.0", "2.13.0+cpu", "2.13.0", "2.10.0", "2.9.1", "2.9.0", "2.8.0"]
LIGHTNINGS = ["2.6.6", "2.6.4"]


def test_the_newest_patch_of_each_minor_version_from_the_first_on():
    chosen = compat.torches_to_try(FOUND, any_build=True)
    assert chosen == [(v, "") for v in ("2.15.0", "2.14.1", "2.13.0+cpu", "2.10.0", "2.9.1")]


@pytest.mark.parametrize(("full", "number"), [(False, 3), (True, 4)])
def test_every_lightning_with_the_newest_pytorch_that_can_be_had(full, number):
    torches = {"3.11": [("2.15.0", "no"), ("2.13.0+cpu", ""), ("2.9.1+cpu", "")], "3.12": [("2.15.0", "no")]}
    made = compat.combinations(torches, LIGHTNINGS, ["3.13"], full=full)
    assert sum(not c.reason for c in made) == number
    assert Combination("3.11", "2.13.0+cpu", "2.6.4") in made
    assert (Combination("3.11", "2.9.1+cpu", "2.6.4") in made) is full
    assert [c.python for c in made] == sorted(c.python for c in made)
    assert Combination("3.12", "2.15.0", "2.6.6", "no") in made
    assert made[-1] == Combination("3.13", "any", "any", "no Python 3.13 on this machine")


def test_this_python_is_found_and_one_that_is_not_there_is_not():
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert compat.find_python(version) is not None
    assert compat.find_python("3.99") is None


def test_the_fast_tests_are_there():
    assert all((compat.ROOT / path).is_file() for path in compat.FAST_TESTS)


@pytest.mark.parametrize(
    ("results", "code"), [(["passed", "not run"], 0), (["passed", "failed"], 1), (["not run"], "nothing was run")]
)
def test_it_fails_where_a_test_failed_or_nothing_was_learnt(results, code, monkeypatch, capsys):
    wanted = [Combination("3.11", f"2.{13 - n}.0", "2.6.6") for n in range(len(results))]
    told = iter(results)
    monkeypatch.setattr(compat, "plan", lambda args: (wanted, {"3.11": Path(sys.executable)}))
    monkeypatch.setattr(compat, "run", lambda *_: (next(told), "5 passed"))
    if isinstance(code, str):
        with pytest.raises(SystemExit, match=code):
            compat.main([])
    else:
        assert compat.main([]) == code
    shown = capsys.readouterr().out
    for combination, result in zip(wanted, results, strict=True):
        assert f"| 3.11 | {combination.torch} | 2.6.6 | {result} | 5 passed |" in shown
