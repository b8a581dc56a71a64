"""What an update uses is in memory when the optimizer gets to it, and leaves behind it."""

from __future__ import annotations

import _thread
import itertools
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd.common.tensors import Piece
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.parameters.files import mapped_storage, write_back
from lightning_ssd.parameters.files.cache_reader import CacheReader, Read
from lightning_ssd.parameters.files.mapped_storage import FiledStorage
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.paged_parameters import PagedParameters
from lightning_ssd.storage.posix import PosixBackend
from tests.parameters.test_gradient_writes import evict
from tests.parameters.test_paged_weights import in_a_fork
from tests.support.process_memory import dirtied_bytes, read_bytes, shown_bytes

_WAIT = 1 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE and _AFTER: for what is being written, and begins nothing
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


def faults() -> int:
    """Of this thread."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_minflt + used.ru_majflt


def update(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def settled() -> None:
    """What was asked for has come."""
    for ended in asked.values():
        ended.wait()


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_the_optimizer_has_no_faults(parameters: list[nn.Parameter], pages: UpdatePages) -> None:
    for now, following in zip(parameters, [*parameters[1:], None], strict=True):
        with pages.updating(whole(now), [] if following is None else whole(following)):
            before = faults()
            update(now)
            assert faults() - before < NBYTES // PAGE_BYTES // 8


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


def test_nothing_is_mapped_to_be_written_to_while_anything_is_read(
    parameters: list[nn.Parameter], pages: UpdatePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system might write it before it has changed, and once more after that."""
    seen: list[tuple[str, int]] = []
    real = FileView.bring_in

    def bring_in(view: FileView, start: int, nbytes: int, *, changes: bool = False) -> None:
        before = read_bytes()
        real(view, start, nbytes, changes=changes)
        seen.append(("mapped" if changes else "shown", read_bytes() - before))

    monkeypatch.setattr(FileView, "bring_in", bring_in)
    with pages.updating([*whole(parameters[0]), *whole(parameters[1])], []):
        pass
    first = seen.index(("mapped", 0))
    assert sum(nbytes for _, nbytes in seen[:first]) >= 4 * NBYTES
    assert not sum(nbytes for _, nbytes in seen[first:])


def test_what_was_foreseen_need_not_come(parameters: list[nn.Parameter], pages: UpdatePages, spill_dir: Path) -> None:
    expected = [(p.detach() - p.grad).clone() for p in parameters if p.grad is not None]
    for now, following in ((0, 1), (2, 0), (1, 1)):
        with pages.updating(whole(parameters[now]), whole(parameters[following])):
            update(parameters[now])
    assert all(map(torch.equal, parameters, expected))


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


def test_a_gradient_in_another_order_comes_as_a_whole(files: WeightFiles, pages: UpdatePages, spill_dir: Path) -> None:
    parameter = nn.Parameter(torch.zeros(1024, 1024))
    parameter.grad = in_file(files, torch.randn(1024, 1024)).t()
    evict(files)
    with pages.updating([Piece(parameter, 0, 1024)], []):
        assert shown_bytes(spill_dir) == NBYTES
    assert shown_bytes(spill_dir) == 0


def test_ordinary_memory_and_missing_gradients_are_left_alone(pages: UpdatePages) -> None:
    parameter, sparse = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, 2))
    sparse.grad = torch.ones(8, 2).to_sparse()
    meta = nn.Parameter(torch.empty(8, device="meta"))
    for one in (parameter, sparse, meta):
        with pages.updating(whole(one), whole(one)):
            pass


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


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Of parts of weights, ahead of their update: when each has begun and ended."""
    seen: list[tuple[float, float]] = []
    real_show = FileView.show

    def show(view: FileView, *args: Any, **options: Any) -> None:
        begun_s = time.perf_counter()
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
            seen.append((begun_s, time.perf_counter()))
        real_show(view, *args, **options)

    monkeypatch.setattr(FileView, "show", show)
    return seen


def test_what_is_read_in_vain_ends_before_anything_else_is_read(
    parameters: list[nn.Parameter], pages: UpdatePages, slow_reads: list[tuple[float, float]]
) -> None:
    for parameter in parameters:
        parameter.grad = None
    with pages.updating([], [*whole(parameters[0]), *whole(parameters[1])]):
        time.sleep(0.1)
    with pages.updating(whole(parameters[2]), whole(parameters[1])):
        pass
    pages.close()
    num_read = len(slow_reads)
    time.sleep(0.7)
    assert len(slow_reads) == num_read <= 2, "of three: the second one was not wanted any more"
    for (_, ended_s), (begun_s, _) in itertools.pairwise(slow_reads):
        assert ended_s <= begun_s, "two threads read weights at a time"


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
    monkeypatch.setattr(mapped_storage, "begin_writing", lambda fd, offset, nbytes: begun.append((offset, nbytes)))
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


@pytest.mark.skipif(write_back._sync_file_range is None, reason="the system cannot be asked to begin to write")
def test_begun_writing_goes_to_the_file(parameters: list[nn.Parameter], files: WeightFiles) -> None:
    """What is written to the drive is clean, and counts again when it changes."""
    memory = mapped_storage.filed_storage(parameters[1])
    assert memory is not None
    with torch.no_grad():
        parameters[1].zero_()
    memory.send_out()
    memory.begin_writing_part(0, NBYTES)
    with memory._arena.use() as fd:
        assert write_back._sync_file_range(fd, 0, 0, _WAIT) == 0  # type: ignore[misc]
    before = dirtied_bytes()
    with torch.no_grad():
        parameters[1].fill_(1.0)
    assert dirtied_bytes() - before >= NBYTES
    assert bool((parameters[1] == 1.0).all())


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


def test_pages_leave_before_the_pager_asks_for_those_of_the_next_forward() -> None:
    """It asks for weights that may just have been updated: their pages would leave again."""
    left = []

    @contextmanager
    def told(name: str) -> Iterator[None]:
        yield
        left.append(name)

    pages, pager = (
        SimpleNamespace(updating=lambda now, following, name=name: told(name)) for name in ("pages", "pager")
    )
    parameters = PagedParameters(weights=SimpleNamespace(pager=pager), pages=pages)  # type: ignore[arg-type]
    with parameters.updating([], []):
        pass
    assert left == ["pages", "pager"]
