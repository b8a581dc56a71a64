"""What is read ahead into the page cache is what is wanted now, and not what was wanted before."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.parameters.mapped_pager import MappedPager
from lightning_ssd.parameters.pager import Unit, Weight
from lightning_ssd.parameters.weight_files import MappedStorage, WeightFiles
from lightning_ssd.storage.posix import PosixBackend

NUM_PARTS = 3
"""Of each weight, in which it is read."""
PATIENCE_S = 20.0


class Parts:
    """The parts that a reader shows, as numbers of their weights; it waits at the first one until it is let on."""

    def __init__(self, memories: list[MappedStorage], patch: pytest.MonkeyPatch) -> None:
        self.shown: list[int] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self._offsets = [memory._extent.offset for memory in memories]  # type: ignore[attr-defined]
        self._real = FileView.show
        patch.setattr(FileView, "show", lambda view, *args, **options: self._show(view, *args, **options))

    def _show(self, view: FileView, start: int, fd: int, offset: int, nbytes: int, *, shared: bool = False) -> None:
        self.shown += [
            number for number, first in enumerate(self._offsets) if first <= offset < first + NUM_PARTS * READ_BYTES
        ]
        self.has_begun.set()
        assert self.may_go_on.wait(PATIENCE_S)
        self._real(view, start, fd, offset, nbytes, shared=shared)

    def wait_for(self, number: int) -> None:
        """Until all of a weight have been shown."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.shown.count(number) < NUM_PARTS:
            assert time.monotonic() < deadline_s, self.shown
            time.sleep(0.001)


@pytest.fixture
def pager(spill_dir: Path) -> Iterator[MappedPager]:
    """Five units of one frozen weight each."""
    backend = PosixBackend([spill_dir])
    files, opened = WeightFiles(backend, [spill_dir]), MappedPager()
    storages = []
    for number in range(5):
        memory = files.write(torch.zeros(NUM_PARTS * READ_BYTES, dtype=torch.uint8).untyped_storage(), changes=False)
        storages.append(memory.show())
        opened.add((f"unit {number}", None), Weight([f"weight {number}"], memory, is_frozen=True))
    yield opened
    opened.close()
    files.close()
    backend.close()


@pytest.fixture
def parts(pager: MappedPager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    made = Parts([weight.memory for weight in pager.weights], monkeypatch)
    yield made
    made.may_go_on.set()


def use(pager: MappedPager, unit: Unit[MappedStorage]) -> None:
    with torch.no_grad():
        pager.enter(unit)
        pager.leave(unit)


def test_of_what_was_asked_for_only_the_last_is_read_on(pager: MappedPager, parts: Parts) -> None:
    pager._request_further(pager.units[0])
    assert parts.has_begun.wait(PATIENCE_S)
    for unit in pager.units[1:4]:
        pager._request_further(unit)
    parts.may_go_on.set()
    parts.wait_for(3)
    assert parts.shown == [0] + NUM_PARTS * [3]


def test_what_is_not_expected_any_more_is_not_read_on(pager: MappedPager, parts: Parts) -> None:
    for unit in (*pager.units[:3], pager.units[0]):
        use(pager, unit)  # after 0 and 1 comes 2
    assert parts.has_begun.wait(PATIENCE_S)
    use(pager, pager.units[3])  # what comes after it is not known
    parts.may_go_on.set()
    pager._request_further(pager.units[4])
    parts.wait_for(4)
    assert parts.shown == [2] + NUM_PARTS * [4]


def test_what_is_here_or_on_its_way_is_not_read_again(pager: MappedPager, parts: Parts) -> None:
    parts.may_go_on.set()
    pager.enter(pager.units[0])
    pager._request_further(pager.units[0])
    pager._request_further(pager.units[1])
    parts.wait_for(1)
    assert parts.shown == NUM_PARTS * [1]
    pager.leave(pager.units[0])


def test_closing_waits_for_no_more_than_a_part(pager: MappedPager, parts: Parts) -> None:
    pager._request_further(pager.units[0])
    assert parts.has_begun.wait(PATIENCE_S)
    closing = threading.Thread(target=pager.close)
    closing.start()
    time.sleep(0.3)  # it has asked for no more by now
    parts.may_go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert parts.shown == [0]
