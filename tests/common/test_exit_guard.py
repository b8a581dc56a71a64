"""What nobody has closed is closed when the interpreter goes."""

import weakref

import pytest

from lightning_ssd.common import exit_guard


class Owner:
    def __init__(self, **errors):
        self.calls = []
        self._errors = errors

    def abort(self):
        self._call("abort")

    def close(self):
        self._call("close")

    def _call(self, name):
        self.calls.append(name)
        if name in self._errors:
            raise self._errors[name]


def test_one_that_fails_leaves_no_other_open(monkeypatch):
    owners = [Owner(), Owner(close=RuntimeError("first")), Owner(abort=KeyboardInterrupt("second")), Owner()]
    for failing in (False, True):
        left = owners if failing else owners[::3]
        monkeypatch.setattr(exit_guard, "_OPEN", dict(enumerate(map(weakref.ref, left))))
        if not failing:
            exit_guard._close_all()
            continue
        with pytest.raises(KeyboardInterrupt, match="second") as caught:
            exit_guard._close_all()
        assert str(caught.value.__context__) == "first"
    assert [owner.calls for owner in owners] == [["abort", "close"] * n for n in (2, 1, 1, 2)]
