"""What nobody has closed is closed when the interpreter goes."""

from __future__ import annotations

import weakref

import pytest

from lightning_ssd.common import exit_guard


class Owner:
    """Open until it is closed; fails on demand, and is closed all the same or not."""

    def __init__(self, abort_error: BaseException | None = None, close_error: BaseException | None = None) -> None:
        self.abort_error, self.close_error = abort_error, close_error
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")
        if self.abort_error is not None:
            raise self.abort_error

    def close(self) -> None:
        self.calls.append("close")
        if self.close_error is not None:
            raise self.close_error


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> list[Owner]:
    """Two fail, the one in closing and the other one before it; two do not."""
    made = [Owner(), Owner(close_error=RuntimeError("first")), Owner(abort_error=KeyboardInterrupt("second")), Owner()]
    monkeypatch.setattr(exit_guard, "_OPEN", dict(enumerate(map(weakref.ref, made))))
    return made


def test_one_that_fails_leaves_no_other_open(owners: list[Owner]) -> None:
    with pytest.raises(KeyboardInterrupt, match="second") as caught:
        exit_guard._close_all()
    assert [owner.calls for owner in owners] == [["abort", "close"]] * 4
    assert str(caught.value.__context__) == "first"


def test_where_none_fails_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Owner(), Owner()]
    monkeypatch.setattr(exit_guard, "_OPEN", dict(enumerate(map(weakref.ref, made))))
    exit_guard._close_all()
    assert [owner.calls for owner in made] == [["abort", "close"]] * 2
