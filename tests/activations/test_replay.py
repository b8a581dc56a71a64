"""A pass of which it is known what stays: as exact as any other, wherever it turns out to be another pass."""

import threading
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ssd.activations.hooks import SavedTensorHooks, SavedWeight
from lightning_ssd.activations.kept_storage import KeptStorage, Share
from lightning_ssd.scheduling.plan_cursor import NOTHING_KNOWN, PassProgram
from lightning_ssd.tiers.ssd import SsdTier
from tests.support.helpers import EAGER, KEEP, PLANNED, open_offloader, raw_bytes
from tests.support.opened import offloader_in
from tests.support.python_calls import calls_by_thread, python_calls
from tests.support.sines import sines
from tests.support.threads import at_once
from tests.support.weight_loops import passed

SIDE = 64
NBYTES = SIDE * SIDE * 4


class Doubled(torch.autograd.Function):
    """Returns what it has saved as the gradient of a leaf."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        return saved, None


OPERATIONS = {
    "sine": torch.sin,
    "exponential": lambda y: (0.1 * y).exp(),
    "view": lambda y: y.view(-1).cos().view(SIDE, SIDE),
    "transposed": lambda y: (y.t() * y).t(),
    "parts": lambda y: torch.cat([part.tanh() for part in y.chunk(2)]),
    "larger": lambda y: torch.cat([y, y.sin()]).square()[:SIDE],
    "norm": lambda y: torch.nn.functional.layer_norm(y, (SIDE,)),
    "dropout": lambda y: torch.nn.functional.dropout(y, 0.5),
    "edited": lambda y: y.sin().add_(1),
    "twice": lambda y: y.sin() * y.cos(),
    "own function": lambda y: y + Doubled.apply(y, y.detach() * 3),
    "checkpointed": lambda y: torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False),
}
"""Each saves other storages than the others, or saves them in another way."""


def train(names, context):
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
    with context:
        y = x * 1
        for name in names:
            y = OPERATIONS[name](y)
        loss = y.square().mean()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    first.square().sum().backward()
    assert x.grad is not None
    return first.detach(), x.grad


def same_bits(one, other):
    return torch.equal(raw_bytes(one), raw_bytes(other))  # also where they are no numbers


@pytest.fixture(scope="module")
def offloader(tmp_path_factory):
    with open_offloader(tmp_path_factory.mktemp("replay"), EAGER) as opened:
        yield opened


def sizes_of(offloader):
    latest = offloader._cache._passes.book.latest
    return latest.sizes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_program_gives_the_same_bits_and_counts(offloader, data):
    """Also the program of another pass: what stays is a guess, and only the bytes that move depend on it."""
    names = data.draw(st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=6))
    expected = train(names, nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorHooks, "_known_of", lambda self, current: NOTHING_KNOWN)
        before = offloader.stats
        found = train(names, offloader.saved_tensors())
        offloader.end_backward()
        slow = offloader.stats
        assert all(map(same_bits, expected, found))
        sizes = list(sizes_of(offloader))
        at = data.draw(st.integers(0, len(sizes)))
        change = data.draw(st.sampled_from(["none", "another size", "one more", "one less"]))
        if change == "another size" and at < len(sizes):
            sizes[at] *= 2
        elif change == "one more":
            sizes.insert(at, NBYTES)
        elif change == "one less" and at < len(sizes):
            del sizes[at]
        stays = data.draw(st.binary(min_size=len(sizes), max_size=len(sizes)).map(lambda b: bytes(x & 1 for x in b)))
        program = PassProgram(tuple(sizes), stays)
        patch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
        found = train(names, offloader.saved_tensors())
        offloader.end_backward()
    assert all(map(same_bits, expected, found))
    fast = offloader.stats
    for name in ("bytes_saved", "num_saved", "num_kept_foreign", "num_kept_parameters", "num_kept_small"):
        assert getattr(fast, name) - getattr(slow, name) == getattr(slow, name) - getattr(before, name), name
    assert fast.failures == 0
    offloader.reset_peaks()
    assert offloader.stats.resident_peak_bytes == 0


def test_what_was_to_stay_stays_and_the_rest_moves(tmp_path, monkeypatch):
    program = PassProgram((NBYTES,) * 6, bytes([1, 0, 1, 1, 0, 0]))
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
    with open_offloader(tmp_path, EAGER) as offloader:
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            y = sines(x, 6)
        offloader.flush()
        stats = offloader.stats
        assert (stats.num_saved, stats.bytes_kept) == (6, 3 * NBYTES)
        assert 2 * NBYTES < stats.bytes_written <= 3 * NBYTES, "edges that fill no block stay"
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize("moved", [0, 3])
def test_few_calls_and_no_lock_for_what_stays(moved, tmp_path, monkeypatch):
    """A full record takes 79 Python calls and 4 locks; with CUDA 127."""
    length = 20
    program = PassProgram((NBYTES,) * (length + 2), bytes([1] * (length + 2 - moved) + [0] * moved))
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
    with open_offloader(tmp_path, EAGER) as offloader:
        locks = CountedLock(offloader._cache.accounting.lock)
        with offloader.saved_tensors():
            y = (torch.rand(SIDE, SIDE).requires_grad_() * 1).sin()
            offloader._cache.accounting.lock = locks
            try:
                with python_calls() as calls:
                    for _ in range(length):
                        y = y.sin()
            finally:
                num_locks = locks.num_taken
                offloader._cache.accounting.lock = locks.lock
        num_slow = max(moved - 1, 0)
        assert len(calls) <= 2 * (length - num_slow) + 12 * num_slow, calls
        if not moved:
            assert num_locks == 0
            y.backward(torch.ones_like(y), retain_graph=True)  # the first one of a backward looks ahead
            with python_calls() as calls:
                y.backward(torch.ones_like(y))
            assert len(calls) <= length + 2


def test_few_calls_and_a_lock_for_each_group_of_what_moves(tmp_path, monkeypatch):
    """Before there were groups, 50 calls to pack, 65 to unpack, and a lock for each of several operations; before
    records were flat, 18 and 36."""
    length = 128
    program = PassProgram((NBYTES,) * (length + 3), bytes(length + 3))
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
    with open_offloader(tmp_path, EAGER) as offloader:
        accounting = offloader._cache.accounting
        accounting.most_saved_bytes = 1 << 40  # so that 64 make a group
        locks = CountedLock(accounting.lock)
        tier = offloader._cache._tiers.ssd

        def wait_for_reads(gradient):
            tier._reads.wait_idle()

        jobs, read_all = list[int](), SsdTier.read_all

        def noted(tier, requests, device, *, urgent):
            jobs.append(len(requests))
            return read_all(tier, requests, device, urgent=urgent)

        monkeypatch.setattr(SsdTier, "read_all", noted)
        for step in range(3):
            jobs.clear()
            with offloader.saved_tensors():
                y = (torch.rand(SIDE, SIDE).requires_grad_() * 1).sin()
                accounting.lock = locks if step == 2 else locks.lock
                with python_calls() as packing:
                    for _ in range(length):
                        y = y.sin()
                num_locks, accounting.lock = locks.num_taken, locks.lock
                y.register_hook(wait_for_reads)
                y = y.sin()
            offloader.flush()
            offloader._cache.hooks.budget.nbytes = 1 << 40  # all comes back before the second one is asked for
            with python_calls() as unpacking:
                y.backward(torch.ones_like(y))
            offloader.end_backward()
        assert len(packing) <= 10 * length, packing
        assert len(unpacking) <= 8 * length, unpacking
        assert num_locks <= length // 64
        assert offloader.stats.bytes_kept == 0
        assert sum(jobs) == length + 2
        assert len(jobs) <= 2 + length // 64, "one that is waited for, and the others in groups"


def test_few_calls_of_workers_for_each_storage(tmp_path, monkeypatch):
    """65 and 75 where each storage of a group was told of by itself. While a read is waited for, each still is."""
    side, length = 160, 64
    program = PassProgram((side * side * 4,) * (length + 1), bytes(length + 1))
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
    with calls_by_thread() as calls, open_offloader(tmp_path, EAGER) as offloader:
        accounting = offloader._cache.accounting
        accounting.most_saved_bytes = 1 << 40  # so that 64 make a group
        accounting.lock = locks = CountedLock(accounting.lock)
        reads = offloader._cache._tiers.ssd._reads

        def wait_for_reads(gradient):
            reads.wait_idle()

        for _ in range(3):
            calls.clear()
            locks.num_elsewhere = 0
            with offloader.saved_tensors():
                y = sines(torch.rand(side, side).requires_grad_(), length)
                y.register_hook(wait_for_reads)
                y = y.sin()
            offloader.flush()
            offloader._cache.hooks.budget.nbytes = 1 << 40
            y.backward(torch.ones_like(y))
            offloader.end_backward()
    to_write, to_read = (
        sum(number for name, number in calls.items() if f"-{direction}-" in name) / length
        for direction in ("write", "read")
    )
    assert 1 < to_write <= 25
    assert 1 < to_read <= 37
    assert 0 < locks.num_elsewhere <= length, "a few for each chunk; four for each storage before"


@pytest.mark.parametrize("name", ["view", "transposed", "parts", "twice", "dropout", "norm"])
def test_what_moves_is_replayed_whatever_shows_it(name, tmp_path, monkeypatch):
    """Views, parts, transposed tensors, those over what leaves already, and what an operation may fill later."""
    names = [name] * 3
    expected, program = train(names, nullcontext()), NOTHING_KNOWN
    monkeypatch.setattr(SavedTensorHooks, "_known_of", lambda self, current: program)
    with open_offloader(tmp_path, EAGER) as offloader:
        for _ in range(2):
            before = offloader.stats
            with python_calls() as calls:
                found = train(names, offloader.saved_tensors())
            offloader.end_backward()
            assert all(map(same_bits, expected, found))
            program = PassProgram(sizes_of(offloader), bytes(len(sizes_of(offloader))))
        assert "SavedTensorHooks.pack_moved" in calls
        assert "SavedTensorHooks.pack" not in calls
        stats = offloader.stats
        assert (stats.num_saved, stats.bytes_kept) == (2 * before.num_saved, before.bytes_kept)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_over_what_moves_stays(tmp_path):
    """One of its parts has been saved before, and its storage leaves."""

    def gradient(context):
        x = torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).requires_grad_()
        with context:
            y = torch.nested.as_nested_tensor([x[:20], x[20:]]) * 2
            loss = sum(part.sin().sum() for part in y.unbind()) + torch.nested.to_padded_tensor(y.sin(), 0.0).sum()
        (found,) = torch.autograd.grad(loss, x)
        return found

    with open_offloader(tmp_path, EAGER) as offloader:
        assert same_bits(gradient(nullcontext()), gradient(offloader.saved_tensors()))
        assert offloader.stats.num_saved, "its part was, before it"


class CountedLock:
    def __init__(self, lock):
        self.lock = lock
        self.num_taken = self.num_elsewhere = 0  # by this thread, by others

    def __enter__(self):
        is_here = threading.current_thread() is threading.main_thread()
        self.lock.acquire()
        self.num_taken += is_here
        self.num_elsewhere += not is_here

    def __exit__(self, *exc):
        self.lock.release()

    def locked(self):
        return self.lock.locked()


@pytest.mark.parametrize("setup", [EAGER, PLANNED], ids=["by profile", "by plan"])
def test_what_to_keep_is_worked_out_where_no_plan_tells(setup, tmp_path):
    """For 300 storages it takes as long as ten of them take to be moved."""
    with open_offloader(tmp_path, setup) as offloader:
        x = torch.rand(SIDE, SIDE).requires_grad_()
        for _ in range(3):
            with offloader.saved_tensors():
                loss = (x * 1).sin().sin().sum()
            loss.backward()
            with python_calls() as calls:
                offloader.end_backward()
            offloader.wait_for_plan()
        assert ("storages_to_keep" in calls) == (setup is EAGER)
        latest = offloader._cache._passes.book.latest
        assert latest is not None
        assert latest.sizes == (NBYTES,) * 2


def test_an_interrupt_while_one_is_added_spoils_the_pass_and_nothing_else(tmp_path):
    with open_offloader(tmp_path, KEEP) as offloader:
        x = torch.rand(SIDE, SIDE).requires_grad_()
        interrupted = offloader.saved_tensors()

        def forward():
            with interrupted:
                y = (x * 1).sin()
                interrupted.packed_s = Interrupted(interrupted.packed_s)
                y.sin()

        with pytest.raises(KeyboardInterrupt):
            forward()
        assert interrupted.is_spoilt
        for _ in range(2):
            passed(offloader, lambda: (x * 1).sin().sum())
        offloader.reset_peaks()
        assert offloader.stats.resident_peak_bytes == 0


class Interrupted(list[float]):
    def append(self, item):
        raise KeyboardInterrupt


def test_another_pass_finds_what_a_replayed_one_keeps(tmp_path):
    """Both save one storage: it is counted once, and has one share."""
    with open_offloader(tmp_path, KEEP) as offloader:
        with offloader.saved_tensors():
            shared = torch.rand(SIDE, SIDE).requires_grad_() * 1
            first = shared.sin().sum()
        with offloader.saved_tensors():
            second = shared.cos().sum()
        assert offloader.stats.num_saved == 1
        records = [r for r in offloader._cache.accounting.by_storage.values() if isinstance(r, KeptStorage)]
        assert len(records) == 1
        assert isinstance(records[0](), Share)
        (first + second).backward()


def test_counts_are_right_within_a_pass(tmp_path):
    """What hooks have kept counts in the order in which it came and went, whoever asks."""
    with open_offloader(tmp_path, KEEP) as offloader:
        x = torch.rand(SIDE, SIDE).requires_grad_()
        with offloader.saved_tensors():
            for _ in range(5):
                (x * 1).sin()  # each dies before the next one
            assert offloader.stats.resident_bytes == 0
            held = [(x * 1).sin() for _ in range(3)]
            assert offloader.stats.resident_bytes == 3 * NBYTES
            with offloader.saved_tensors():  # adds up again what is there
                held.append((x * 1).sin())
            assert offloader.stats.resident_bytes == 4 * NBYTES
        assert offloader.stats.resident_peak_bytes == offloader.stats.saved_peak_bytes == 4 * NBYTES
        held.clear()
        assert offloader.stats.resident_bytes == 0
        assert not offloader._cache.accounting.watched


def test_one_pass_in_several_threads_counts_each_storage_once(tmp_path):
    with open_offloader(tmp_path, KEEP) as offloader:
        current = offloader.saved_tensors()
        held = []

        def forward():
            with current:
                for _ in range(200):
                    held.append((torch.rand(SIDE, SIDE).requires_grad_() * 1).sin())

        at_once(*[forward] * 3)
        assert offloader.stats.num_saved == 600
        assert [record.index for record in current.records] == list(range(600))


def test_a_frozen_weight_that_waits_is_not_kept_by_the_graph(tmp_path):
    """Also where the forward uses it detached: held by the graph it would stay in memory."""
    model = torch.nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
    with offloader_in(tmp_path, activations="keep", parameters="offload", min_tensor_bytes=1) as offloader:
        offloader.register_module(model)
        packed = []
        hooks = offloader._cache.hooks
        pack = hooks.pack

        def note(current, tensor, moves=False):
            packed.append(pack(current, tensor, moves))
            return packed[-1]

        hooks.pack = note
        with offloader.saved_tensors():
            y = torch.nn.functional.linear(torch.rand(4, SIDE).requires_grad_() * 1, model.weight.detach())
        assert any(isinstance(one, SavedWeight) for one in packed)
        y.sum().backward()
