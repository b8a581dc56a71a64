"""What the cache decides and counts: kept, written once, forwarded, read ahead, held within a budget."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import Offloader
from lightning_ssd.activations import replay, tensor_cache
from lightning_ssd.activations.prefetcher import Prefetcher
from lightning_ssd.activations.saved_pass import SavedPass
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.storage.backend import Backend
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter
from tests.support.faults import FaultyBackend, always
from tests.support.helpers import DRAINED, EAGER, KEEP, Setup, assert_released, disk_used_bytes, open_offloader
from tests.support.late import HeldCopies

SIDE = 128
NBYTES = SIDE * SIDE * 4
EDGES = 8192
"""Up to a block at each end of a storage stays in memory."""


def leaf(seed: int = 0) -> Tensor:
    return torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def chain(offloader: Offloader, x: Tensor, *, length: int = 10) -> Tensor:
    """``length`` saved storages: each sine saves its input, which nobody else holds."""
    with offloader.saved_tensors():
        return chain_of_sines(x, length=length)


@pytest.mark.parametrize("setup", [KEEP, EAGER])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_leaf_that_a_graph_has_is_not_swapped(requires_grad: bool, setup: Setup, tmp_path: Path) -> None:
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
def test_memory_that_its_owner_has_freed_is_an_error(kept_nbytes: int, tmp_path: Path) -> None:
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


def test_memory_that_its_owner_frees_and_fills_again_is_as_before(tmp_path: Path) -> None:
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
    assert x.grad is not None
    assert torch.equal(x.grad, values)


def test_one_storage_saved_by_many_operations_is_written_once(tmp_path: Path) -> None:
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            x = leaf() * 1
            loss = (x.sin() + x.cos() + x.t().exp().t() + x.view(-1).square().view(SIDE, SIDE)).sum()
        del x
        offloader.flush()
        stats = offloader.stats
        assert stats.num_saved == 2  # x, and the result of exp
        assert stats.bytes_saved == 2 * NBYTES
        assert 2 * (NBYTES - EDGES) <= stats.bytes_written <= 2 * NBYTES
        loss.backward()
        assert offloader.stats.bytes_read <= 2 * NBYTES


@pytest.mark.parametrize(("nbytes", "moved"), [(NBYTES - 4, 0), (NBYTES, 1)])
def test_the_border_of_min_tensor_bytes(nbytes: int, moved: int, tmp_path: Path) -> None:
    with open_offloader(tmp_path, Setup(min_tensor_bytes=NBYTES)) as offloader:
        x = torch.rand(nbytes // 4).requires_grad_()
        with offloader.saved_tensors():
            loss = (x * 1).sin().sum()
        stats = offloader.stats
        assert stats.num_saved == moved
        assert stats.num_kept_small == 1 - moved
        loss.backward()


def test_keeping_writes_nothing_and_counts_all(tmp_path: Path) -> None:
    with open_offloader(tmp_path, KEEP) as offloader:
        loss = chain(offloader, leaf())
        offloader.flush()
        stats = offloader.stats
        assert stats.bytes_kept == stats.bytes_saved == 10 * NBYTES
        assert stats.saved_peak_bytes == stats.resident_peak_bytes == stats.resident_bytes == 10 * NBYTES
        assert stats.bytes_written == stats.disk_bytes == 0
        loss.backward()
        assert offloader.stats.resident_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_alive_elsewhere_is_not_read(tmp_path: Path) -> None:
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            x = leaf() * 1
            loss = x.sin().sum()
        offloader.flush()
        assert offloader.stats.resident_bytes == NBYTES, "the caller holds it, so the memory has not gone"
        loss.backward()
        stats = offloader.stats
        assert stats.bytes_read == 0
        assert stats.bytes_forwarded == stats.bytes_held_elsewhere == NBYTES


class Remembering(torch.nn.Module):
    """Keeps what it has made, as a module does whose features somebody wants to see."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.sin()
        return self.last.cos()


@pytest.mark.parametrize("holds", [True, False])
def test_what_the_program_holds_is_told_once(holds: bool, tmp_path: Path) -> None:
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


def test_writes_that_have_not_begun_are_cancelled(tmp_path: Path) -> None:
    """Backward follows at once and the drive is slow: most is taken back from the queue, nothing is read."""
    with open_offloader(
        tmp_path, EAGER, _wrap_backend=lambda backend: FaultyBackend(backend, delay_s=0.25)
    ) as offloader:
        loss = chain(offloader, leaf())
        loss.backward()
        stats = offloader.stats
        assert stats.writes_cancelled_bytes >= 6 * NBYTES
        assert stats.bytes_forwarded >= stats.writes_cancelled_bytes
        assert stats.bytes_forwarded + stats.bytes_read <= 10 * NBYTES
        assert_released(offloader)


@pytest.mark.parametrize(("rate", "num_kept"), [(1.0, 10), (0.0, 0)])
def test_what_is_kept_follows_the_rates_of_the_meter(
    rate: float, num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_reads_run_ahead_of_backward(tmp_path: Path) -> None:
    """While the first operation of backward waits for its tensor, the next ones are already under way."""
    arrived = threading.Semaphore(0)
    most, now, lock = 0, 0, threading.Lock()

    def count(_: int) -> None:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        arrived.acquire(timeout=0.05)
        with lock:
            now -= 1

    def wrap(backend: Backend) -> Backend:
        return FaultyBackend(backend, fail_read=count)

    with open_offloader(tmp_path, DRAINED, _wrap_backend=wrap) as offloader:
        loss = chain(offloader, leaf())
        offloader.flush()
        loss.backward()
    assert most >= 2


@pytest.mark.parametrize("length", [40, 80])
def test_reading_ahead_stays_within_its_budget(length: int, tmp_path: Path) -> None:
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


def test_reading_ahead_leaves_most_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are to come: a quarter of what is free when backward begins, however large the budget has grown."""
    most = 0
    advance = Prefetcher.advance

    def watched(self: Prefetcher, current: SavedPass) -> None:
        nonlocal most
        advance(self, current)
        most = max(most, self._accounting.ahead_bytes)

    monkeypatch.setattr(Prefetcher, "advance", watched)
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 8 * NBYTES)
    with open_offloader(tmp_path) as offloader:
        for _ in range(2):
            loss = chain(offloader, leaf(), length=40)
            offloader.flush()
            offloader._opened().budget.nbytes = 20 * NBYTES
            loss.backward()
            offloader.end_backward()
    assert NBYTES <= most <= 2 * NBYTES


@pytest.mark.parametrize("returns", [True, False])
def test_memory_that_writes_will_free_is_waited_for(
    returns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was brought up ahead goes first; then writes under way are waited for; then the error is raised."""
    may_write = threading.Event()
    may_write.set()
    copies = HeldCopies(held=False)

    def wait(index: int) -> None:
        assert may_write.wait(20)

    with open_offloader(tmp_path, _copies=copies, _wrap_backend=lambda b: FaultyBackend(b, fail_write=wait)) as opened:
        x, y = leaf(), leaf(1)
        loss = chain(opened, x)
        opened.flush()
        cache = opened._opened()
        assert cache._tiers.ssd is not None
        mover = cache._tiers.ssd.mover
        allocate = mover.allocate

        def is_full(*arguments: Any) -> Any:
            if cache.accounting.writes or not returns:
                raise torch.OutOfMemoryError("injected")
            return allocate(*arguments)

        monkeypatch.setattr(mover, "allocate", is_full)
        may_write.clear()
        other = chain(opened, y)
        threading.Timer(0.2, may_write.set).start()
        if returns:
            loss.backward()
            assert torch.equal(x.grad, plain_gradient(leaf()))
        else:
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                loss.backward()
            opened.abort()
        del loss, other


def plain_gradient(x: Tensor) -> Tensor:
    y = x * 1
    for _ in range(10):
        y = y.sin()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_retained_graphs_do_not_fill_memory(tmp_path: Path) -> None:
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


def test_replaced_and_added_parameters_are_known(tmp_path: Path) -> None:
    """The registered module is asked again for each forward."""
    with open_offloader(tmp_path) as offloader:
        model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False))
        offloader.register_module(model)
        offloader.register_module(model)
        model[0].weight.data = torch.rand(SIDE, SIDE)
        model.append(nn.Linear(SIDE, SIDE, bias=False))
        with offloader.saved_tensors():
            loss = model(leaf()).sum()
        offloader.flush()
        stats = offloader.stats
        assert stats.num_kept_parameters >= 2
        assert stats.bytes_written <= NBYTES  # the input of the second layer
        loss.backward()


def test_counters_of_a_quiet_run_add_up(tmp_path: Path) -> None:
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


def test_disk_space_is_used_again(tmp_path: Path) -> None:
    with open_offloader(tmp_path) as offloader:
        x = leaf()
        sizes = set()
        for _ in range(10):
            loss = chain(offloader, x)
            offloader.flush()
            assert 0 < disk_used_bytes(offloader) <= 10 * NBYTES
            sizes.add(offloader.stats.disk_bytes)
            loss.backward()
            offloader.end_backward()
        assert len(sizes) == 1


def test_device_tensors_of_another_device_are_kept(tmp_path: Path) -> None:
    """The offloader serves one device; here the other one is meta, which has no memory at all."""
    with open_offloader(tmp_path) as offloader:
        x = torch.rand(SIDE, SIDE, device="meta").requires_grad_()
        with offloader.saved_tensors():
            loss = (x * 1).sin().sum()
        loss.backward()
        assert offloader.stats.num_kept_foreign == 1
        assert offloader.stats.num_saved == 0


def test_a_drive_that_has_no_memory_for_a_read_is_an_error_and_no_endless_try(tmp_path: Path) -> None:
    def no_memory() -> StorageError:
        return StorageError(errno.ENOMEM, "injected: the kernel has no memory for this read")

    def wrap(backend: Backend) -> Backend:
        return FaultyBackend(backend, fail_read=always(no_memory))

    with open_offloader(tmp_path, EAGER, _wrap_backend=wrap) as offloader:
        loss = chain(offloader, leaf())
        offloader.flush()
        with pytest.raises(StorageError, match="no memory for this read"):
            loss.backward()
        assert offloader.stats.failures > 0
        offloader.abort()


def test_a_worker_without_memory_leaves_it_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is brought up ahead is mapped by workers; without room for it each storage comes when it is asked for."""
    take, num_refused = ReloadPool.take, 0

    def refuse(pool: ReloadPool, *arguments: int) -> torch.UntypedStorage:
        nonlocal num_refused
        if threading.current_thread().name.startswith("lightning_ssd"):
            num_refused += 1
            raise MemoryError("injected")
        return take(pool, *arguments)

    monkeypatch.setattr(ReloadPool, "take", refuse)
    plain, x = leaf(), leaf()
    chain_of_sines(plain).backward()
    with open_offloader(tmp_path, EAGER) as offloader:
        loss = chain(offloader, x)
        offloader.flush()
        loss.backward()
        assert num_refused > 0
        assert offloader.stats.failures == 0
        assert offloader.stats.bytes_read > 0
    assert plain.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, plain.grad)


def chain_of_sines(x: Tensor, *, length: int = 10) -> Tensor:
    y = x * 1
    for _ in range(length):
        y = y.sin()
    return y.sum()


@pytest.mark.parametrize(("rows", "moves"), [(SIDE // 8, False), (SIDE // 2, True)])
def test_a_slice_of_the_data_does_not_take_all_of_it_to_the_drive(
    tmp_path: Path, rows: int, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is a view of a data set in memory: saving it by its storage would write the data set each step."""
    for module in (tensor_cache, replay):
        monkeypatch.setattr(module, "MIN_DATA_BYTES", NBYTES)
    data, weight = torch.rand(SIDE, SIDE), leaf(1)
    with open_offloader(tmp_path) as offloader:
        with offloader.saved_tensors():
            loss = (data[:rows] * weight[:rows]).sum()
        offloader.flush()
        assert (offloader.stats.bytes_saved == NBYTES) is moves
        loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad[:rows], data[:rows])
    assert not weight.grad[rows:].any()
