"""What an update uses is in memory when the optimizer gets to it, and leaves behind it."""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.common.tensors import Piece
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files import mapped_storage
from lightning_ssd.parameters.files.cache_reader import CacheReader, Read
from lightning_ssd.parameters.files.mapped_storage import FiledStorage
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.storage.posix import PosixBackend
from tests.parameters.test_gradient_writes import evict
from tests.support.process_memory import dirtied_bytes, read_bytes, shown_bytes
from tests.support.weight_loops import in_a_fork

NUMEL = 1 << 20
NBYTES = 4 * NUMEL


@pytest.fixture
def files(spill_dir: Path) -> Iterator[WeightFiles]:
    backend = PosixBackend([spill_dir])
    opened = WeightFiles(backend, [spill_dir])
    yield opened
    held.clear()
    opened.close()
    backend.close()


asked: dict[CacheReader, Latch] = {}
"""Opens when a reader has done what it was asked for last."""


@pytest.fixture
def pages(files: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[UpdatePages]:
    real = CacheReader.ask

    def ask(reader: CacheReader, reads: Sequence[Read]) -> None:
        ended = asked[reader] = Latch()
        real(reader, [*reads, lambda *_: ended.open()])

    monkeypatch.setattr(CacheReader, "ask", ask)
    opened = UpdatePages(files, HostRoom())
    yield opened
    opened.close()
    asked.clear()


held: list[FiledStorage] = []
"""As an offloader does."""


def in_file(files: WeightFiles, values: torch.Tensor) -> torch.Tensor:
    held.append(files.write(values.untyped_storage(), changes=True))
    return torch.empty(0).set_(held[-1].show(), 0, values.shape, values.stride())


@pytest.fixture
def parameters(files: WeightFiles) -> list[nn.Parameter]:
    """Three, of which nothing is in memory, with gradients."""
    made = [nn.Parameter(in_file(files, torch.randn(NUMEL))) for _ in range(3)]
    for parameter in made:
        parameter.grad = in_file(files, torch.randn(NUMEL))
    evict(files)
    return made


def whole(parameter: nn.Parameter) -> list[Piece]:
    return [Piece(parameter, 0, parameter.numel())]


def update(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def settled() -> None:
    """What was asked for has come."""
    for ended in asked.values():
        ended.wait()


def test_the_next_ones_come_and_the_last_ones_leave(
    parameters: list[nn.Parameter], pages: UpdatePages, spill_dir: Path
) -> None:
    assert shown_bytes(spill_dir) == 0
    with pages.updating(whole(parameters[0]), whole(parameters[1])):
        settled()
        assert shown_bytes(spill_dir) == 2 * NBYTES, "the next ones are in the page cache alone"
        before = read_bytes()
    assert shown_bytes(spill_dir) == 0
    with pages.updating(whole(parameters[1]), []):
        assert shown_bytes(spill_dir) == 2 * NBYTES
        update(parameters[1])
    assert shown_bytes(spill_dir) == 0
    assert read_bytes() == before


def test_no_more_is_changed_than_the_piece(
    parameters: list[nn.Parameter], files: WeightFiles, pages: UpdatePages, spill_dir: Path
) -> None:
    first, second = (Piece(parameters[0], start, start + NUMEL // 4) for start in (0, NUMEL // 4))
    before = dirtied_bytes()
    with pages.updating([first], [second]):
        settled()
        assert shown_bytes(spill_dir) < 2 * NBYTES
    with pages.updating([second], []):
        pass
    # The file system changes no less than what it has read in one piece.
    assert NBYTES // 2 <= dirtied_bytes() - before <= NBYTES
    assert shown_bytes(spill_dir) == 0


@pytest.mark.parametrize("when", ["now", "ahead"])
def test_what_cannot_be_read_is_an_error_not_a_signal(
    when: str, parameters: list[nn.Parameter], files: WeightFiles, pages: UpdatePages
) -> None:
    with files._changing.arenas[0].use() as fd:
        size = os.fstat(fd).st_size
        os.ftruncate(fd, 0)
        try:
            if when == "ahead":
                with pages.updating([], whole(parameters[0])):
                    pass
            with (
                pytest.raises(StorageError, match=r"could not be read from its drive.*Go on from a checkpoint"),
                pages.updating(whole(parameters[0]), []),
            ):
                raise AssertionError("nothing may be touched")
        finally:
            os.ftruncate(fd, size)


def test_a_fork_is_left_alone(parameters: list[nn.Parameter], pages: UpdatePages) -> None:
    def enter() -> None:
        with pages.updating(whole(parameters[0]), whole(parameters[1])):
            pass
        pages.close()

    assert in_a_fork(enter) == 0


class Room(HostRoom):
    """As the test wants it."""

    def __init__(self, *, is_enough: bool) -> None:
        super().__init__()
        self._is = is_enough
        self.asked: list[int] = []

    def is_enough(self, waiting_bytes: Callable[[], int]) -> bool:
        self.asked.append(waiting_bytes())
        return self._is


@pytest.mark.parametrize("is_enough", [False, True])
def test_what_was_updated_is_written_at_once_where_memory_is_short(
    parameters: list[nn.Parameter], files: WeightFiles, monkeypatch: pytest.MonkeyPatch, is_enough: bool
) -> None:
    """And nothing else: neither its gradient nor the rest of the weight."""
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(mapped_storage, "_begin_writing", lambda fd, offset, nbytes: begun.append((offset, nbytes)))
    room = Room(is_enough=is_enough)
    pages = UpdatePages(files, room)
    piece = Piece(parameters[1], NUMEL // 4, NUMEL // 2)
    memory = mapped_storage.filed_storage(parameters[1])
    assert memory is not None
    assert memory._extent.offset > 0
    with pages.updating([piece], []):
        assert not begun
    assert begun == ([] if is_enough else [(memory._extent.offset + NBYTES // 4, NBYTES // 4)])
    assert room.asked == [files.used_bytes]
    memory.make_private()
    with pages.updating([piece], []):
        pass
    assert len(begun) == (not is_enough), "what is no file any more is not written"
    pages.close()


def test_without_threads_they_come_when_it_is_their_turn(
    parameters: list[nn.Parameter], files: WeightFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> int:
        raise RuntimeError("can't start new thread")

    expected = [(p.detach() - p.grad).clone() for p in parameters if p.grad is not None]
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        pages = UpdatePages(files, HostRoom())
    for now, following in zip(parameters, [*parameters[1:], parameters[0]], strict=True):
        with pages.updating(whole(now), whole(following)):
            update(now)
    pages.close()
    assert all(map(torch.equal, parameters, expected))
