"""A gradient that goes to its file takes the place of the last one: the same bytes, and nothing is read for it."""

import _thread
import errno
import gc
import io
import os
import threading
from contextlib import closing

import pytest
import torch
from torch import nn

from lightning_ssd.common.tensors import Piece
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files import mapped_storage
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, is_mapped
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.paged_gradients import PagedGradients
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES
from lightning_ssd.storage.posix import PosixBackend
from tests.support.patience import PATIENCE_S
from tests.support.process_memory import read_bytes

SIDE = 1024


@pytest.fixture
def files(spill_dir):
    with closing(PosixBackend([spill_dir])) as backend, closing(WeightFiles(backend, [spill_dir])) as opened:
        yield opened


@pytest.fixture
def gradients(files):
    with closing(PagedGradients(files, min_nbytes=1)) as waiting:
        yield waiting


def evict(files):
    """Write what was changed, and let the page cache forget it."""
    files.sync()
    for arena in files._arenas:
        with arena.use() as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def accumulated(gradients, parameter, gradient):
    parameter.grad = gradient
    del gradient
    gradients._exchange(parameter)
    assert parameter.grad is not None
    return parameter.grad


def test_the_last_gradient_is_not_read(files, gradients):
    parameter = nn.Parameter(torch.zeros(SIDE, SIDE))
    accumulated(gradients, parameter, torch.randn(SIDE, SIDE))
    parameter.grad = None
    evict(files)
    before = read_bytes()
    expected = torch.randn(SIDE, SIDE)
    found = accumulated(gradients, parameter, expected.clone())
    assert read_bytes() == before
    assert is_mapped(found.untyped_storage())
    evict(files)
    assert torch.equal(found, expected)
    assert read_bytes() - before >= expected.nbytes, "this file system does not tell what is read"


LAYOUTS = {
    "contiguous": lambda: torch.randn(30, 50),
    "less than a page": lambda: torch.randn(3),
    "a page and a bit": lambda: torch.randn(1027),
    "transposed": lambda: torch.randn(30, 50).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(30, 50).bfloat16(),
    "complex": lambda: torch.randn(30, 50, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(30, 50, dtype=torch.complex64).conj(),
    "conjugated, transposed": lambda: torch.randn(30, 50, dtype=torch.complex64).mH,
    "negated": lambda: torch._neg_view(torch.randn(30, 50)),
    "a part, as of a shard": lambda: torch.randn(90, 50)[30:60],
    "several chunks": lambda: torch.randn(2 * DEFAULT_CHUNK_BYTES // 4 + 1027),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_of_every_layout(layout, files, gradients):
    parameter = nn.Parameter(torch.zeros_like(LAYOUTS[layout]()))
    for _ in range(2):  # the second one goes where the first one was, which the page cache does not have
        gradient = LAYOUTS[layout]()
        expected = gradient.clone()
        strides, flags = gradient.stride(), (gradient.is_conj(), gradient.is_neg())
        found = accumulated(gradients, parameter, gradient)
        assert is_mapped(found.untyped_storage())
        evict(files)
        assert torch.equal(found, expected)
        assert (found.stride(), (found.is_conj(), found.is_neg())) == (strides, flags)
        parameter.grad = None
        evict(files)


def test_without_proc_a_gradient_stays_in_memory(gradients, monkeypatch):
    def refuse(path, mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(io, "FileIO", refuse)
    expected = torch.randn(SIDE, SIDE)
    with pytest.warns(
        UserWarning, match="could not be written .* by /proc/self/fd/.*: No such file.*it stays in memory"
    ):
        found = accumulated(gradients, nn.Parameter(torch.zeros(SIDE, SIDE)), expected.clone())
    assert torch.equal(found, expected)
    assert not is_mapped(found.untyped_storage())


class Refusing:
    """The system's ``pwrite``, which gives up in the middle of the second piece.

    Args:
        ending: what it raises.
    """

    def __init__(self, ending):
        self._ending, self._real, self._num = ending, os.pwrite, 0

    def __call__(self, fd, data, offset):
        self._num += 1
        if self._num > 1:
            raise self._ending
        return self._real(fd, data[: len(data) // 2], offset)


@pytest.mark.parametrize("ending", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_a_write_that_ends_in_the_middle_leaves_the_gradient_in_memory(ending, files, gradients, monkeypatch):
    parameter, expected = nn.Parameter(torch.zeros(SIDE, SIDE)), torch.randn(SIDE, SIDE)
    accumulated(gradients, parameter, torch.zeros(SIDE, SIDE))
    parameter.grad = None
    used = [arena.used_bytes for arena in files._arenas]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Refusing(ending))
        with (
            pytest.raises(KeyboardInterrupt)
            if isinstance(ending, KeyboardInterrupt)
            else pytest.warns(UserWarning, match="could not be written .*it stays in memory")
        ):
            accumulated(gradients, parameter, expected.clone())
    assert torch.equal(parameter.grad, expected)
    assert not is_mapped(parameter.grad.untyped_storage())
    parameter.grad = ending.__traceback__ = None
    gc.collect()  # the error of this test holds the frames that it came through
    found = accumulated(gradients, parameter, expected.clone())
    assert is_mapped(found.untyped_storage())
    assert torch.equal(found, expected)
    assert [arena.used_bytes for arena in files._arenas] == used, "the place is used again"


# -- what it costs where none waits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sends_out", [MappedStorage.send_out, lambda mapped: mapped.send_out((0, mapped.nbytes))])
def test_what_is_written_after_closing_is_not_sent_out_by_another_thread(sends_out, files, monkeypatch):
    """One thread ends a backward, and another one closes meanwhile."""
    mapped = files.write(torch.zeros(SIDE).untyped_storage(), changes=True)
    shown = torch.empty(0).set_(mapped.show())
    is_leaving, may_leave, is_written = threading.Event(), threading.Event(), threading.Event()
    send_out = FileView.send_out

    def leave(view, start, nbytes):
        is_leaving.set()
        assert may_leave.wait(PATIENCE_S)
        send_out(view, start, nbytes)

    def close():
        mapped.make_private()
        shown.add_(1)
        is_written.set()

    monkeypatch.setattr(FileView, "send_out", leave)
    threads = [threading.Thread(target=sends_out, args=(mapped,)), threading.Thread(target=close)]
    threads[0].start()
    assert is_leaving.wait(PATIENCE_S)
    threads[1].start()
    is_written.wait(0.1)  # or not until the other thread is ready
    may_leave.set()
    for thread in threads:
        thread.join()
    assert shown.eq(1).all()


NUMEL = 1 << 20
NBYTES = 4 * NUMEL


@pytest.fixture
def pages(files):
    with closing(UpdatePages(files, HostRoom())) as opened:
        yield opened


held = []
"""As an offloader does."""


def in_file(files, values):
    held.append(files.write(values.untyped_storage(), changes=True))
    return torch.empty(0).set_(held[-1].show(), 0, values.shape, values.stride())


@pytest.fixture
def parameters(files):
    made = [nn.Parameter(in_file(files, torch.randn(NUMEL))) for _ in range(3)]
    for parameter in made:
        parameter.grad = in_file(files, torch.randn(NUMEL))
    evict(files)
    yield made
    held.clear()


def whole(parameter):
    return [Piece(parameter, 0, parameter.numel())]


@pytest.mark.parametrize("when", ["now", "ahead"])
def test_what_cannot_be_read_is_an_error_not_a_signal(when, parameters, files, pages):
    with files._changing[0].use() as fd:
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


class Room(HostRoom):
    def __init__(self, *, is_enough):
        super().__init__()
        self._is = is_enough
        self.asked = []

    def is_enough(self, waiting_bytes):
        self.asked.append(waiting_bytes())
        return self._is


@pytest.mark.parametrize("is_enough", [False, True])
def test_what_was_updated_is_written_at_once_where_memory_is_short(parameters, files, monkeypatch, is_enough):
    """And nothing else: neither its gradient nor the rest of the weight."""
    begun = []
    monkeypatch.setattr(mapped_storage, "_begin_writing", lambda fd, offset, nbytes: begun.append((offset, nbytes)))
    room = Room(is_enough=is_enough)
    pages = UpdatePages(files, room)
    piece = Piece(parameters[1], NUMEL // 4, NUMEL // 2)
    memory = mapped_storage.mapped_storage_of(parameters[1])
    assert memory.stripes[0].extent.offset > 0
    with pages.updating([piece], []):
        assert not begun
    assert begun == ([] if is_enough else [(memory.stripes[0].extent.offset + NBYTES // 4, NBYTES // 4)])
    assert room.asked == [files.used_bytes]
    memory.make_private()
    with pages.updating([piece], []):
        pass
    assert len(begun) == (not is_enough), "what is no file any more is not written"
    pages.close()


def overlapping(offset):
    return torch.randn(16).as_strided((4, 4), (0, 1), offset)


def test_a_gradient_that_covers_itself_fails_as_copying_it_does(gradients):
    parameter = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match="single memory location"):
        accumulated(gradients, parameter, overlapping(4))


def update(parameter):
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad)


def test_without_threads_they_come_when_it_is_their_turn(parameters, files, monkeypatch):
    def refuse(*args):
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
