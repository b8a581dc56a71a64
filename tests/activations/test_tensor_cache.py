"""What the cache decides and counts: kept, written once, forwarded, read ahead, held within a budget."""

import errno
import gc
import threading
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ssd.activations import hooks as slow_hooks
from lightning_ssd.activations import replay
from lightning_ssd.activations.kept_storage import KeptStorage, Share
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from tests.support.faults import FaultyBackend, always
from tests.support.helpers import DRAINED, EAGER, KEEP, Setup, assert_released, open_offloader
from tests.support.late import HeldCopies
from tests.support.python_calls import python_calls
from tests.support.sines import gradient_of_sines, sines

SIDE = 128
NBYTES = SIDE * SIDE * 4
EDGES = 8192
"""Up to a block at each end of a storage stays in memory."""


def leaf(seed=0):
    return torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def chain(offloader, x, *, length=10):
    with offloader.saved_tensors():
        return sines(x, length).sum()


@pytest.mark.parametrize("setup", [KEEP, EAGER])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_that_a_graph_has_is_not_swapped(requires_grad, setup, tmp_path):
    """Plain PyTorch sees that the graph has it; backward would compute with what it became."""
    inputs = torch.ones(SIDE, requires_grad=True)
    scale = nn.Parameter(torch.full((SIDE,), 3.0), requires_grad=requires_grad)
    with open_offloader(tmp_path, setup) as offloader:
        with offloader.saved_tensors():
            loss = (inputs * scale).sum()
        with pytest.raises(RuntimeError, match="Cannot swap"):
            torch.utils.swap_tensors(scale, nn.Parameter(torch.zeros(SIDE), requires_grad=requires_grad))
        (gradient,) = torch.autograd.grad(loss, inputs)
        assert torch.equal(gradient, torch.full((SIDE,), 3.0))
        del loss
        offloader.end_backward()
        torch.utils.swap_tensors(scale, nn.Parameter(torch.zeros(SIDE), requires_grad=requires_grad))


@pytest.mark.parametrize("kept_nbytes", [0, NBYTES // 2])
def test_memory_that_its_owner_has_freed_is_an_error(kept_nbytes, tmp_path):
    """Plain PyTorch reads what is no longer there; zeros would be a wrong gradient."""
    x = leaf()
    with open_offloader(tmp_path, KEEP) as offloader:
        with offloader.saved_tensors():
            y = x.exp()
            loss = (y * 2).sum()
        y.untyped_storage().resize_(kept_nbytes)
        with pytest.raises(RuntimeError, match=rf"had {NBYTES:,} bytes of memory and has {kept_nbytes:,} now.*resized"):
            loss.backward()
        assert x.grad is None
        del loss
        offloader.end_backward()


def test_memory_that_its_owner_frees_and_fills_again_is_as_before(tmp_path):
    x = leaf()
    with open_offloader(tmp_path, KEEP) as offloader:
        with offloader.saved_tensors():
            y = x.exp()
            loss = y.sum()
        values = y.detach().clone()
        y.untyped_storage().resize_(0)
        y.untyped_storage().resize_(NBYTES)
        y.data.copy_(values)
        loss.backward()
        offloader.end_backward()
    assert torch.equal(x.grad, values)


@pytest.mark.parametrize(("nbytes", "moved"), [(NBYTES - 4, 0), (NBYTES, 1)])
def test_the_border_of_min_tensor_bytes(nbytes, moved, tmp_path):
    with open_offloader(tmp_path, Setup(min_tensor_bytes=NBYTES)) as offloader:
        x = torch.rand(nbytes // 4).requires_grad_()
        with offloader.saved_tensors():
            loss = (x * 1).sin().sum()
        stats = offloader.stats
        assert stats.num_saved == moved
        assert stats.num_kept_small == 1 - moved
        loss.backward()


class Remembering(torch.nn.Module):
    """Keeps what it has made, as a module does whose features somebody wants to see."""

    last: torch.Tensor | None = None

    def forward(self, x):
        self.last = x.sin()
        return self.last.cos()


@pytest.mark.parametrize("holds", [True, False])
def test_what_the_program_holds_is_told_once(holds, tmp_path):
    """However often backward asks for it, and not what was read back in between."""
    blocks = torch.nn.Sequential(Remembering(), Remembering(), Remembering())
    with open_offloader(tmp_path) as offloader:
        x = leaf()
        with offloader.saved_tensors():
            loss = blocks(x * 1).sum()
        if not holds:
            for block in blocks:
                block.last = None
        offloader.flush()
        for is_last in (False, True):
            loss.backward(retain_graph=not is_last)
        stats = offloader.stats
        assert stats.bytes_saved == 6 * NBYTES
        assert stats.bytes_written > 5 * NBYTES
        assert stats.bytes_held_elsewhere == (3 * NBYTES if holds else 0)
        assert stats.bytes_read > 0


def test_writes_that_have_not_begun_are_cancelled(tmp_path):
    """Backward follows at once and the drive is slow: most is taken back from the queue, nothing is read."""
    with open_offloader(tmp_path, EAGER, _wrap_backend=partial(FaultyBackend, delay_s=0.25)) as offloader:
        offloader._cache._tiers.ssd._chunk_bytes = NBYTES  # what begins together
        loss = chain(offloader, leaf())
        loss.backward()
        stats = offloader.stats
        assert stats.writes_cancelled_bytes >= 6 * NBYTES
        assert stats.bytes_forwarded >= stats.writes_cancelled_bytes
        assert stats.bytes_forwarded + stats.bytes_read <= 10 * NBYTES
        assert_released(offloader)


@pytest.mark.parametrize(("rate", "num_kept"), [(1.0, 10), (0.0, 0)])
def test_what_is_kept_follows_the_rates_of_the_meter(rate, num_kept, tmp_path, monkeypatch):
    """A drive that moves one byte per second brings nothing back in time; while no rate is known, everything moves."""
    known = Machine(ssd=TierRates(write_bytes_per_s=rate, read_bytes_per_s=rate))
    monkeypatch.setattr(BandwidthMeter, "machine", lambda self: known)
    with open_offloader(tmp_path, EAGER) as offloader:
        x = leaf()
        for expected in (0, num_kept):
            before = offloader.stats.bytes_kept
            loss = chain(offloader, x)
            offloader.flush()
            assert offloader.stats.bytes_kept - before == expected * NBYTES
            loss.backward()
            offloader.end_backward()


def test_reads_run_ahead_of_backward(tmp_path):
    """While the first operation of backward waits for its tensor, the next ones are already under way."""
    arrived = threading.Semaphore(0)
    most, now, lock = 0, 0, threading.Lock()

    def count(_):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        arrived.acquire(timeout=0.05)
        with lock:
            now -= 1

    with open_offloader(tmp_path, DRAINED, _wrap_backend=partial(FaultyBackend, fail_read=count)) as offloader:
        loss = chain(offloader, leaf())
        offloader.flush()
        loss.backward()
    assert most >= 2


@pytest.mark.parametrize("length", [40, 80])
def test_reading_ahead_stays_within_its_budget(length, tmp_path):
    with open_offloader(tmp_path) as offloader:
        x = leaf()
        for _ in range(4):
            kept_before = offloader.stats.bytes_kept
            loss = chain(offloader, x, length=length)
            offloader.flush()
            offloader.reset_peaks()
            loss.backward()
            offloader.end_backward()
            stats = offloader.stats
            # An eighth ahead, what the running operation uses, and the few that have been consumed.
            assert stats.resident_peak_bytes <= (length // 8 + 12) * NBYTES + stats.bytes_kept - kept_before


@pytest.mark.parametrize("returns", [True, False])
def test_memory_that_writes_will_free_is_waited_for(returns, tmp_path, monkeypatch):
    """What was brought up ahead goes first; then writes under way are waited for; then the error is raised."""
    may_write = threading.Event()
    may_write.set()
    copies = HeldCopies(held=False)

    def wait(index):
        assert may_write.wait(20)

    with open_offloader(tmp_path, _copies=copies, _wrap_backend=partial(FaultyBackend, fail_write=wait)) as opened:
        x, y = leaf(), leaf(1)
        loss = chain(opened, x)
        opened.flush()
        cache = opened._opened()
        mover = cache._tiers.ssd.mover
        allocate = mover.allocate

        def is_full(*arguments):
            if cache.accounting.writes or not returns:
                raise torch.OutOfMemoryError("injected")
            return allocate(*arguments)

        monkeypatch.setattr(mover, "allocate", is_full)
        may_write.clear()
        other = chain(opened, y)
        threading.Timer(0.2, may_write.set).start()
        if returns:
            loss.backward()
            assert torch.equal(x.grad, gradient_of_sines(x, 10))
        else:
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                loss.backward()
            opened.abort()
        del loss, other


def test_retained_graphs_do_not_fill_memory(tmp_path):
    """What one backward has read is dropped again, though the graph still needs it: it is on disk."""
    with open_offloader(tmp_path) as offloader:
        loss = chain(offloader, leaf(), length=60)
        offloader.flush()
        for _ in range(3):
            loss.backward(retain_graph=True)
            offloader.end_backward()
            assert offloader.stats.resident_bytes <= 20 * NBYTES
        del loss
        assert_released(offloader)


def test_counters_of_a_quiet_run_add_up(tmp_path):
    with open_offloader(tmp_path) as offloader:
        x = leaf()
        for number in range(5):
            loss = chain(offloader, x)
            offloader.flush()
            loss.backward()
            offloader.end_backward()
            stats = offloader.stats
            assert stats.num_saved == 10 * (number + 1)
            assert stats.bytes_saved == stats.num_saved * NBYTES
            assert stats.saved_peak_bytes == 10 * NBYTES
            assert stats.bytes_written <= stats.bytes_saved - stats.bytes_kept
            assert stats.bytes_read <= stats.bytes_written
            assert stats.failures == stats.fallbacks == 0
        assert (
            stats.bytes_read + stats.bytes_forwarded + stats.bytes_kept >= stats.bytes_saved - stats.num_saved * EDGES
        )
        assert stats.write_busy_s > 0
        assert stats.read_busy_s > 0


def test_device_tensors_of_another_device_are_kept(tmp_path):
    """The offloader serves one device; here the other one is meta, which has no memory at all."""
    with open_offloader(tmp_path) as offloader:
        x = torch.rand(SIDE, SIDE, device="meta").requires_grad_()
        with offloader.saved_tensors():
            loss = (x * 1).sin().sum()
        loss.backward()
        assert offloader.stats.num_kept_foreign == 1
        assert offloader.stats.num_saved == 0


def test_a_drive_that_has_no_memory_for_a_read_is_an_error_and_no_endless_try(tmp_path):
    def no_memory():
        return StorageError(errno.ENOMEM, "injected: the kernel has no memory for this read")

    wrap = partial(FaultyBackend, fail_read=always(no_memory))
    with open_offloader(tmp_path, EAGER, _wrap_backend=wrap) as offloader:
        loss = chain(offloader, leaf())
        offloader.flush()
        with pytest.raises(StorageError, match="no memory for this read"):
            loss.backward()
        assert offloader.stats.failures > 0
        offloader.abort()


def test_a_worker_without_memory_leaves_it_to_who_waits(tmp_path, monkeypatch):
    """What is brought up ahead is mapped by workers; without room for it each storage comes when it is asked for."""
    take, num_refused = ReloadPool.take, 0

    def refuse(pool, *arguments):
        nonlocal num_refused
        if threading.current_thread().name.startswith("lightning_ssd"):
            num_refused += 1
            raise MemoryError("injected")
        return take(pool, *arguments)

    monkeypatch.setattr(ReloadPool, "take", refuse)
    x = leaf()
    with open_offloader(tmp_path, EAGER) as offloader:
        loss = chain(offloader, x)
        offloader.flush()
        loss.backward()
        assert num_refused > 0
        assert offloader.stats.failures == 0
        assert offloader.stats.bytes_read > 0
    assert torch.equal(x.grad, gradient_of_sines(x, 10))


@pytest.mark.parametrize(("rows", "moves"), [(SIDE // 8, False), (SIDE // 2, True)])
def test_a_slice_of_the_data_does_not_take_all_of_it_to_the_drive(tmp_path, rows, moves, monkeypatch):
    """A batch that is a view of a data set in memory: saving it by its storage would write the data set each step."""
    for module in (slow_hooks, replay):
        monkeypatch.setattr(module, "MIN_DATA_BYTES", NBYTES)
    data, weight = torch.rand(SIDE, SIDE), leaf(1)
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            loss = (data[:rows] * weight[:rows]).sum()
        offloader.flush()
        assert (offloader.stats.bytes_saved == NBYTES) is moves
        loss.backward()
    assert torch.equal(weight.grad[:rows], data[:rows])
    assert not weight.grad[rows:].any()


@pytest.fixture
def offloader(tmp_path):
    with open_offloader(tmp_path, KEEP) as opened:
        yield opened


def packed(offloader, monkeypatch):
    given = []
    hooks = offloader._cache.hooks
    hooks_of = hooks.of

    def noting(current):
        pack, unpack = hooks_of(current)

        def note(tensor):
            given.append(pack(tensor))
            return given[-1]

        return note, unpack

    monkeypatch.setattr(hooks, "of", noting)
    return given


def test_a_storage_counts_once_until_its_graph_dies(offloader, monkeypatch):
    given = packed(offloader, monkeypatch)
    with offloader.saved_tensors():
        y = leaf() * 1
        loss = (y.sin() + y.cos() + y.view(-1).exp().view(SIDE, SIDE)).sum()
    assert {type(one) for one in given} == {tuple}
    shared = [one[-1].record for one in given if isinstance(one[-1], Share) and one[0].shape == (SIDE, SIDE)]
    assert len({id(record) for record in shared[:2]}) == 1, "two nodes save y"
    before = offloader.stats
    assert before.num_saved == 2, "y and the exponential"
    assert before.resident_peak_bytes == before.saved_peak_bytes == before.bytes_kept == 2 * NBYTES
    given.clear()
    shared.clear()
    loss.backward()
    offloader.end_backward()
    del loss, y
    gc.collect()
    offloader.reset_peaks()
    assert offloader.stats.resident_peak_bytes == 0


def test_a_tensor_that_got_smaller_memory_of_its_own_is_no_error(offloader):
    """Autograd holds a leaf itself; of the storage that it showed a part of when it was saved, nobody asks."""
    data, weight = torch.ones(2 * SIDE, SIDE), leaf()
    with offloader.saved_tensors():
        batch = data[:SIDE]
        loss = (batch * weight).sum()
        batch.data = batch.clone()
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(SIDE, SIDE))


def test_it_costs_few_python_calls_and_no_probe(offloader, monkeypatch):
    """A full record took 79 Python calls and 4 locks, most of them for a rebuild that never comes."""
    given = packed(offloader, monkeypatch)
    length = 20
    with offloader.saved_tensors():
        y = (leaf() * 1).sin()
        given.clear()
        with python_calls() as packing:
            for _ in range(length):
                y = y.sin()
    assert all(isinstance(one[-1].record, KeptStorage) for one in given)
    with python_calls() as calls:
        y.backward(torch.ones_like(y))
    assert len(packing) <= 29 * length, packing
    assert len(calls) <= 18 * (length + 2), calls
    assert not any("VersionProbe" in name or "TensorSpec" in name for name in calls)
