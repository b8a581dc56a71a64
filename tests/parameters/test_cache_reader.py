"""A reader does what it was asked for last, whatever becomes of that."""

from __future__ import annotations

import _thread
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_ssd.common.waiting import Latch
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.parameters.files.cache_reader import CacheReader
from tests.parameters.test_paged_weights import in_a_fork


@pytest.fixture
def reader() -> Iterator[CacheReader]:
    opened = CacheReader()
    yield opened
    opened.close()


class Reads:
    """Parts of a file that are no more than what is noted of them."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.may_go_on, self.ended = Latch(), Latch(), Latch()

    def slow(self, view: FileView, is_wanted: Callable[[], bool]) -> None:
        self.begun.open()
        self.may_go_on.wait()
        self.done.append(f"slow, {'wanted' if is_wanted() else 'unwanted'}")

    def refused(self, view: FileView, is_wanted: Callable[[], bool]) -> None:
        self.done.append("refused")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def last(self, view: FileView, is_wanted: Callable[[], bool]) -> None:
        self.done.append(f"last, {'wanted' if is_wanted() else 'unwanted'}")
        self.ended.open()


def test_what_is_asked_for_next_takes_the_place_of_the_last(reader: CacheReader) -> None:
    reads = Reads()
    reader.ask([reads.slow])
    reads.begun.wait()
    for _ in range(3):
        reader.ask([reads.refused])
    reader.ask([reads.last])
    reads.may_go_on.open()
    reads.ended.wait()
    assert reads.done[0] == "slow, unwanted"
    assert reads.done[-1] == "last, wanted"


def test_a_refusal_is_left_to_who_uses_it(reader: CacheReader) -> None:
    reads = Reads()
    reader.ask([reads.refused, reads.last])
    reads.ended.wait()
    assert reads.done == ["refused", "last, wanted"]


def test_a_view_leaves_the_rest_when_it_is_not_wanted() -> None:
    view, answers = FileView(READ_BYTES), iter([True, False])
    fd = os.memfd_create("part")
    try:
        os.truncate(fd, 3 * READ_BYTES)
        view.read(fd, 0, 3 * READ_BYTES, lambda: next(answers))
        with pytest.raises(StopIteration):
            next(answers)
    finally:
        os.close(fd)


def test_closing_leaves_what_is_not_read(reader: CacheReader) -> None:
    reads = Reads()
    reads.may_go_on.open()
    reader.ask([reads.slow])
    reader.close()
    num_done = len(reads.done)
    reader.ask([reads.last])
    reader.close()
    assert len(reads.done) == num_done


def test_without_threads_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    reader, reads = CacheReader(), Reads()
    reader.ask([reads.last])
    reader.close()
    assert not reads.done


def test_a_fork_has_no_reader_to_wait_for(reader: CacheReader) -> None:
    assert in_a_fork(reader.close) == 0
