"""What an update uses is in memory when the optimizer gets to it, and leaves behind it."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ssd.common.tensors import Piece
from lightning_ssd.common.uninterrupted import Task
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.parameters.paged_parameters import PagedParameters
from lightning_ssd.parameters.update_pages import UpdatePages
from lightning_ssd.parameters.weight_files import FiledStorage, WeightFiles
from lightning_ssd.storage.posix import PosixBackend
from tests.parameters.test_gradient_writes import evict
from tests.parameters.test_paged_weights import in_a_fork
from tests.support.process_memory import dirtied_bytes, read_bytes, shown_bytes

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


@pytest.fixture
def pages() -> Iterator[UpdatePages]:
    opened = UpdatePages()
    yield opened
    opened.close()


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


def settled(pages: UpdatePages) -> None:
    """What was asked for has come."""
    assert pages._coming is not None
    for task in pages._coming[1]:
        task.result()


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
        settled(pages)
        assert shown_bytes(spill_dir) == 3 * NBYTES, "the next weight is in the page cache alone"
        before = read_bytes()
    assert shown_bytes(spill_dir) == NBYTES
    with pages.updating(whole(parameters[1]), []):
        assert shown_bytes(spill_dir) == 2 * NBYTES
        update(parameters[1])
    assert shown_bytes(spill_dir) == 0
    assert read_bytes() == before


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
        settled(pages)
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
    assert pages._coming is None


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


def test_closing_waits_for_the_reader(parameters: list[nn.Parameter], pages: UpdatePages) -> None:
    with pages.updating([], whole(parameters[0])):
        coming = pages._coming
    pages.close()
    assert coming is not None
    assert [task.is_done for task in coming[1]] == [True, True]
    pages.close()


@pytest.mark.parametrize("from_a_thread", [False, True])
def test_without_threads_they_come_when_it_is_their_turn(
    from_a_thread: bool, parameters: list[nn.Parameter], pages: UpdatePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(task: object) -> None:
        raise RuntimeError("can't start new thread")

    if from_a_thread:  # where the thread of Python is started
        monkeypatch.setattr(threading.Thread, "start", refuse)
    else:
        monkeypatch.setattr(Task, "start", refuse)
    expected = [(p.detach() - p.grad).clone() for p in parameters if p.grad is not None]
    for now, following in zip(parameters, [*parameters[1:], parameters[0]], strict=True):
        with pages.updating(whole(now), whole(following)):
            update(now)
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
