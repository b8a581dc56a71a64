"""Weights and gradients of a CPU on several drives: each gets its share, all work at once, and the bits are equal."""

import errno
import gc
import os
import threading
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy, _assembly
from lightning_ssd.common.tensors import Piece
from lightning_ssd.errors import OutOfSpaceError, StorageError
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files import weight_files
from lightning_ssd.parameters.files.update_pages import UpdatePages
from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.parameters.mapped_pager import MappedPager
from lightning_ssd.parameters.pager import Weight
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.parameters.test_changing_files import evict
from tests.support.offloaders import offloaders
from tests.support.patience import PATIENCE_S
from tests.support.weight_loops import MIN_TENSOR, PROGRAMS, Loop, same

STEP = 4096
"""As a weight is shared out here, so that small ones lie on all drives."""
NBYTES = 12 * STEP + 100


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(weight_files, "_STEP_BYTES", STEP)


@pytest.fixture
def directories(spill_dir):
    made = [spill_dir / name for name in "abc"]
    for directory in made:
        directory.mkdir()
    return made


@pytest.fixture
def opens(directories):
    """Opens files in the first directories, with these rates."""
    with ExitStack() as stack:
        backend = stack.enter_context(closing(PosixBackend(directories)))

        def open_them(*rates, wrap=lambda backend: backend):
            files = WeightFiles(wrap(backend), directories[: len(rates)], rates=rates)
            return stack.enter_context(closing(files))

        yield open_them


def random_bytes(nbytes=NBYTES, start=0):
    memory = torch.randint(0, 256, (start + nbytes,), dtype=torch.uint8)
    return (
        memory[start:].clone()
        if not start
        else FileView(start + nbytes).tensor(start, torch.uint8, (nbytes,), (1,)).copy_(memory[start:])
    )


def shown(mapped):
    return torch.empty(0, dtype=torch.uint8).set_(mapped.show())


@pytest.mark.parametrize("start", [0, 8], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("changes", [False, True])
def test_bits_and_shares(opens, changes, start):
    files = opens(3.0, 1.0, 0.0)
    expected = [random_bytes(start=start) for _ in range(8)]
    found = [files.write(one.untyped_storage(), changes=changes) for one in expected]
    assert {stripe.drive for stripe in found[0].stripes} == {0, 1}, "one weight lies on all drives that take any"
    memory = [shown(one) for one in found]
    for mapped in found:
        mapped.send_out()
    evict(files)
    assert all(map(torch.equal, memory, expected))
    used = [arena.used_bytes for arena in (files._changing if changes else files._still)]
    assert abs(used[0] - 3 * used[1]) <= 4 * STEP
    assert used[2] == 0
    del memory
    for mapped in found:
        mapped.forget()
    assert files.used_bytes == 0


def test_weights_begin_with_the_directories_that_are_preferred(directories):
    with (
        closing(PosixBackend(directories)) as backend,
        closing(WeightFiles(backend, directories, order=[2, 0, 1])) as files,
    ):
        found = [files.map_new(STEP) for _ in range(4)]
        assert [stripe.drive for mapped in found for stripe in mapped.stripes] == [2, 0, 1, 2]


def test_what_is_written_to_memory_is_there_again(opens):
    files = opens(1.0, 1.0, 1.0)
    mapped = files.map_new(NBYTES, 8)
    memory = shown(mapped)
    expected = random_bytes(start=8)
    mapped.fill(weight_files.Region.of(expected.untyped_storage()))
    memory[5 * STEP :].add_(1)
    expected[5 * STEP :].add_(1)
    mapped.begin_writing((0, NBYTES))
    mapped.send_out((4 * STEP, 4 * STEP))
    mapped.send_out()
    evict(files)
    mapped.bring_in()
    assert torch.equal(memory, expected)
    mapped.make_private()
    mapped.send_out()
    memory.add_(1)
    mapped.send_out()
    mapped.bring_in(to_stay=True)
    assert torch.equal(memory, expected + 1), "nothing of what is private may leave"


def test_where_only_a_part_can_be_private_nothing_of_it_leaves(opens, monkeypatch):
    mapped = opens(1.0, 1.0).write(random_bytes().untyped_storage(), changes=True)
    memory, show, num = shown(mapped), FileView.show, 0

    def refuse(*args, **named):
        nonlocal num
        num += 1
        if num == 2:
            raise MemoryError
        show(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(FileView, "show", refuse)
        mapped.make_private()
    memory.fill_(7)
    mapped.send_out()
    mapped.bring_in(to_stay=True)
    assert memory.eq(7).all()


@pytest.fixture
def full(monkeypatch):
    """Names of directories whose files cannot grow."""
    names, preallocate = set(), Arena._preallocate
    monkeypatch.setattr(
        Arena, "_preallocate", lambda self, nbytes: self.directory.name not in names and preallocate(self, nbytes)
    )
    return names


@pytest.mark.parametrize("from_the_start", [False, True])
def test_what_one_directory_has_no_room_for_another_one_gets(opens, full, from_the_start):
    if from_the_start:
        full.add("a")
    files = opens(1.0, 1.0, 1.0)
    full.add("a")
    expected = [random_bytes() for _ in range(4)]
    files.check_room([one.nbytes for one in expected], changes=False)
    found = [files.write(one.untyped_storage(), changes=False) for one in expected]
    assert all(map(torch.equal, map(shown, found), expected))
    before = files.used_bytes
    full |= {"b", "c"}
    with pytest.raises(OutOfSpaceError, match=r"weights need [\d,]+ bytes; [\d,]+ of them have no place: .*is full"):
        files.check_room([1 << 30], changes=False)
    with pytest.raises(OutOfSpaceError):
        files.write(torch.empty(1 << 30, dtype=torch.uint8).untyped_storage(), changes=False)
    assert files.used_bytes == before, "what was given for a part of it is given back"


def test_a_write_that_fails_on_one_drive_waits_for_the_others_and_gives_all_back(opens):
    has_failed, is_over = threading.Event(), threading.Event()

    class Fails(WrappedBackend):
        def write(self, arena, region, offset):
            if arena.directory.name == "a":
                has_failed.set()
                raise StorageError(errno.EIO, "refused")
            assert has_failed.wait(PATIENCE_S)
            is_over.set()

    files = opens(1.0, 1.0, wrap=Fails)
    with pytest.raises(StorageError, match="refused"):
        files.write(random_bytes().untyped_storage(), changes=False)
    assert is_over.is_set()
    assert files.used_bytes == 0


class Together:
    """Has reads wait until as many drives are read from at once."""

    def __init__(self, patch, num):
        self._drives, self._all, self._num = set(), threading.Event(), num
        self._read = FileView.read
        patch.setattr(FileView, "read", lambda *args: self._read_one(*args))

    def _read_one(self, view, fd, *rest):
        self._drives.add(os.fstat(fd).st_ino)
        if len(self._drives) == self._num:
            self._all.set()
        if threading.current_thread() is not threading.main_thread():
            self._all.wait(PATIENCE_S)
        self._read(view, fd, *rest)

    def has_happened(self):
        return self._all.wait(PATIENCE_S)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("is_known", [False, True], ids=["first use", "next use"])
def test_a_unit_is_read_from_all_drives_at_once(opens, monkeypatch, is_frozen, is_known):
    files = opens(1.0, 1.0, 1.0)
    with torch.no_grad():
        pager = MappedPager(num_drives=3)
        mapped = [files.write(random_bytes().untyped_storage(), changes=not is_frozen) for _ in range(2)]
        memory = [shown(one) for one in mapped]
        for number, one in enumerate(mapped):
            pager.add((f"unit {number}", None), Weight([f"weight {number}"], one, is_frozen=is_frozen))
        order = (0, 1, 0) if is_known else (0,)
        for number in order[:-1]:
            pager.enter(pager.units[number])
            pager.leave(pager.units[number])
        together = Together(monkeypatch, 3)
        pager.enter(pager.units[order[-1]])
        with closing(pager):
            assert together.has_happened()
    assert len(memory) == 2


def test_what_is_updated_next_is_read_from_all_drives_at_once(opens, monkeypatch):
    files = opens(1.0, 1.0, 1.0)
    mapped = files.write(torch.randn(NBYTES // 4).untyped_storage(), changes=True)
    parameter = nn.Parameter(torch.empty(0).set_(mapped.show()))
    together = Together(monkeypatch, 3)
    coming = [Piece(parameter, 0, parameter.numel())]
    with closing(UpdatePages(files, HostRoom())) as pages, pages.updating([], coming):
        assert together.has_happened()


EVERYTHING = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}


def policy(**options):
    return OffloadPolicy(**{"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | EVERYTHING | options)


@pytest.mark.parametrize("program", PROGRAMS)
def test_training_has_the_bits_of_plain_training(program, directories, monkeypatch):
    monkeypatch.setattr(_assembly, "_probed_shares", lambda *_: ())  # measured on a busy machine, one may get nothing
    expected = Loop(**PROGRAMS[program]).run().result()
    with offloaders(directories[:2], policy) as opened:
        offloader = opened()
        loop = Loop(offloader, **PROGRAMS[program]).run()
        assert same(loop.result(), expected)
        files = offloader._parts.parameters.files
        assert all(arena.used_bytes for arena in files._changing)


class SlowB(WrappedBackend):
    """One directory takes three times as long."""

    def write(self, arena, region, offset):
        threading.Event().wait(0.09 if arena.directory.name == "b" else 0.03)
        super().write(arena, region, offset)


def test_shares_follow_what_was_measured(directories):
    with offloaders(directories[:2], policy) as opened:
        offloader = opened(_wrap_backend=SlowB)
        fast, slow = offloader._parts.parameters.files._shares
        assert 1.5 < fast / slow < 10, "it may have had one chunk at a time, the other one two"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), RuntimeError("PyTorch has no memory"), MemoryError()])
def test_parts_are_equal_where_rates_cannot_be_measured(error, directories, monkeypatch):
    def fail(*args, **settings):
        raise error

    monkeypatch.setattr(_assembly, "measure_rates", fail)
    with offloaders(directories[:2], policy) as opened:
        first, second = opened()._parts.parameters.files._shares
        assert first == second


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(4.0, 1.0), (2.0, 3.0)], [2.0, 1.0]),
        ([(4.0, 1.0), OSError(errno.EIO, "disturbed")], [0.0, 0.0]),
        ([(4.0, 1.0), ZeroDivisionError()], [0.0, 0.0]),
    ],
)
def test_processes_probe_together_and_share_out_alike(measured, expected, directories, monkeypatch):
    """Each alone would find its own rates, and one that was disturbed would keep its stripes for the whole run."""
    meeting, together = threading.Barrier(2), threading.Barrier(2)
    given, found, own = {}, {}, threading.local()

    def measure(*args, **settings):
        together.wait(PATIENCE_S)  # breaks if one of them probes by itself
        rates = measured[own.rank]
        if isinstance(rates, Exception):
            raise rates
        return Rates(1.0, 1.0, rates)

    def agree(values):
        given[own.rank] = list(values)
        meeting.wait(PATIENCE_S)
        smallest = [min(numbers) for numbers in zip(*given.values(), strict=True)]
        meeting.wait(PATIENCE_S)
        return smallest

    def probe(rank):
        own.rank = rank
        with suppress(ZeroDivisionError):  # a defect of ours: that rank ends with it, and the other does not wait
            found[rank] = _assembly._probed_shares(None, SimpleNamespace(paths=directories[:2], agree=agree))

    monkeypatch.setattr(_assembly, "measure_rates", measure)
    threads = [threading.Thread(target=probe, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found[0] == expected
    assert found.get(1, expected) == expected


def test_weights_wait_though_one_directory_is_full_and_nothing_collects_garbage(directories, full):
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).requires_grad_(False)
    gc.disable()
    try:
        with offloaders(directories[:2], policy) as opened:
            offloader = opened()
            full.add("a")  # it has a share by then
            offloader.register_module(model)
            assert offloader.stats.weights_bytes >= 2 * 4 * 512 * 512
    finally:
        gc.enable()


def test_what_is_reserved_is_used_to_the_last_block(opens, full, monkeypatch):
    monkeypatch.setattr(weight_files, "_STEP_BYTES", 2 << 20)
    files, expected = opens(1.0, 1.0), [random_bytes(3 << 20) for _ in range(3)]
    files.check_room([one.nbytes for one in expected], changes=False)
    full.update("ab")
    found = [files.write(one.untyped_storage(), changes=False) for one in expected]
    assert all(map(torch.equal, map(shown, found), expected))


def test_what_is_still_written_when_an_interrupt_comes_keeps_its_place(opens, monkeypatch):
    goes_on = threading.Event()

    class Hangs(WrappedBackend):
        def write(self, arena, region, offset):
            if arena.directory.name == "b":
                assert goes_on.wait(PATIENCE_S)
            super().write(arena, region, offset)

    def interrupted(task, doing=None):
        raise KeyboardInterrupt

    files = opens(1.0, 1.0, wrap=Hangs)
    with monkeypatch.context() as patch:
        patch.setattr(weight_files.Task, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.write(random_bytes().untyped_storage(), changes=False)
    assert files.used_bytes > 0, "another weight there would get the bytes of this one"
    goes_on.set()
