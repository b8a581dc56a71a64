"""Memory that shows a file: what leaves comes back, whoever wrote it, and a refusal of the drive is an error."""

import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch

from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.mmap import HUGE_PAGE_BYTES, PAGE_BYTES
from tests.support.process_memory import read_bytes

NBYTES = 64 * PAGE_BYTES


@pytest.fixture
def fd(spill_dir):
    with tempfile.TemporaryFile(dir=spill_dir, buffering=0) as file:
        file.write(os.urandom(NBYTES))
        os.fsync(file.fileno())
        yield file.fileno()


def shown(fd, *, shared):
    view = FileView(NBYTES)
    view.show(0, fd, 0, NBYTES, shared=shared)
    return view, view.tensor(0, torch.uint8, (NBYTES,), (1,))


def in_file(fd):
    return os.pread(fd, NBYTES, 0)


def resident_kib(view):
    wanted = f"{view.address:x}-"
    lines = iter(Path("/proc/self/smaps").read_text(encoding="ascii").splitlines())
    assert any(line.startswith(wanted) for line in lines)
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))


def test_what_was_written_survives_leaving(fd):
    view, tensor = shown(fd, shared=True)
    tensor[5 * PAGE_BYTES + 3] = 7
    tensor.numpy()[9] = 8
    expected = bytes(tensor.numpy())
    view.bring_in(0, NBYTES)
    assert resident_kib(view) == NBYTES // 1024
    view.send_out(0, NBYTES)
    assert resident_kib(view) == 0
    assert bytes(tensor.numpy()) == expected == in_file(fd)


def test_what_cannot_be_read_is_an_error_not_a_signal(fd):
    view, _ = shown(fd, shared=True)
    os.ftruncate(fd, NBYTES // 2)
    with pytest.raises(OSError, match="Input/output") as refused:
        view.bring_in(0, NBYTES)
    assert refused.value.errno == errno.EIO


def test_an_old_kernel_maps_at_the_first_touch(fd, monkeypatch):
    monkeypatch.setattr("lightning_ssd.memory.file_mapping._POPULATE_READ", 250)  # no such advice
    view, tensor = shown(fd, shared=True)
    view.bring_in(0, NBYTES)
    assert bytes(tensor.numpy()) == in_file(fd)


def test_mapped_to_be_written_to_no_page_is_a_fault(fd):
    """Unless the system begins to write them to the file in between: each is a fault again then. So three tries."""
    faults = []
    for _ in range(3):
        view, tensor = shown(fd, shared=True)
        expected = in_file(fd)
        view.bring_in(0, NBYTES, changes=True)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        tensor[::PAGE_BYTES].bitwise_xor_(255)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
        changed = bytes(byte ^ 255 if at % PAGE_BYTES == 0 else byte for at, byte in enumerate(expected))
        assert changed == in_file(fd)
    assert min(faults) < NBYTES // PAGE_BYTES // 4, faults


@pytest.mark.parametrize("opened", [os.O_RDONLY, os.O_RDWR | os.O_DIRECT])
def test_what_was_read_is_in_the_page_cache(opened, spill_dir):
    path = spill_dir / "file"
    path.write_bytes(os.urandom(3 * NBYTES))
    again = os.open(path, opened)
    os.fsync(again)
    os.posix_fadvise(again, 0, 0, os.POSIX_FADV_DONTNEED)
    scratch, before = FileView(NBYTES), read_bytes()
    scratch.read(again, PAGE_BYTES, 2 * NBYTES)
    assert read_bytes() - before >= 2 * NBYTES
    assert resident_kib(scratch) <= NBYTES // 1024
    view, before = FileView(2 * NBYTES), read_bytes()
    view.show(0, again, PAGE_BYTES, 2 * NBYTES)
    tensor = view.tensor(0, torch.uint8, (2 * NBYTES,), (1,))
    assert bytes(tensor.numpy()) == path.read_bytes()[PAGE_BYTES : PAGE_BYTES + 2 * NBYTES]
    assert read_bytes() == before
    os.close(again)


@pytest.mark.parametrize("offset", [0, PAGE_BYTES, 5 << 20])
def test_a_large_range_begins_where_huge_pages_of_the_file_do(offset):
    view = FileView(HUGE_PAGE_BYTES, offset=offset)
    assert (view.address - offset) % HUGE_PAGE_BYTES == 0
    tensor = view.tensor(0, torch.uint8, (HUGE_PAGE_BYTES,), (1,))
    assert tensor.data_ptr() == view.address
    assert not tensor.count_nonzero()
