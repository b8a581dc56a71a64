"""Offloaded optimizers under failing drives, interruptions and odd use: exact, or refused; never silently wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy, slicing
from lightning_ssd import paged_states as module_under_test
from lightning_ssd.errors import CorruptionError, OffloaderClosedError, StorageError
from lightning_ssd.inner_step import InnerStep
from lightning_ssd.optimizer import OffloadedOptimizer
from lightning_ssd.storage.backend import Backend
from tests.storage.faults import Fail, FaultyBackend, always, eio, enospc, on_calls


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are many more than fit into memory."""
    monkeypatch.setattr(module_under_test, "_MIN_SUBGROUP_BYTES", 64 << 10)
    monkeypatch.setattr("lightning_ssd.planning.subgroups.GRANULE", 1024)


class Pair:
    """The same parameters twice: one for an offloaded optimizer, one for a plain twin."""

    def __init__(self, make: Callable[[Any], Optimizer], shapes: tuple[tuple[int, ...], ...] = ((128, 150),) * 10):
        generator = torch.Generator().manual_seed(1)
        self.mine = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.mine]
        self.inner, self.twin = make(self.mine), make(self.plain)
        self._generator = generator

    def set_gradients(self, active: list[int] | None = None) -> None:
        for number, (mine, plain) in enumerate(zip(self.mine, self.plain, strict=True)):
            mine.grad = plain.grad = None
            if active is None or number in active:
                gradient = torch.randn(mine.shape, generator=self._generator).to(mine.dtype)
                mine.grad, plain.grad = gradient, gradient.clone()

    def step(self, optimizer: Optimizer, active: list[int] | None = None) -> None:
        self.set_gradients(active)
        optimizer.step()
        self.twin.step()

    def check(self, optimizer: Optimizer | None = None) -> None:
        for number, (mine, plain) in enumerate(zip(self.mine, self.plain, strict=True)):
            assert torch.equal(mine, plain), f"parameter {number}"
        if optimizer is not None:
            assert_same_states(optimizer.state_dict(), self.twin.state_dict())


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def assert_same_states(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    assert mine["param_groups"] == plain["param_groups"]
    assert mine["state"].keys() == plain["state"].keys()
    for number, state in plain["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert same(mine["state"][number][key], value), (number, key)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Where both are not a number they are equal."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        if other.layout != torch.strided:
            return bool(one.layout == other.layout) and same(one.to_dense(), other.to_dense())
        return one.dtype == other.dtype and one.stride() == other.stride() and equal(one, other)
    if isinstance(other, list):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@contextmanager
def opened(*directories: Path, faults: list[FaultyBackend] | None = None, **kwargs: Any) -> Iterator[Offloader]:
    """An offloader whose optimizers' backends are put into ``faults``."""

    def wrap(backend: Backend) -> Backend:
        if faults is None:
            return backend
        faults.append(FaultyBackend(backend))
        return faults[-1]

    policy = OffloadPolicy(activations="keep", optimizer_states="offload", verify=kwargs.pop("verify", "full"))
    hardware = HardwareProfile(paths=[str(directory) for directory in directories], **kwargs)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap).open() as offloader:
        yield offloader


@contextmanager
def offloaded(
    inner: Optimizer, *directories: Path, **kwargs: Any
) -> Iterator[tuple[OffloadedOptimizer, FaultyBackend]]:
    faults: list[FaultyBackend] = []
    with opened(*directories, faults=faults, **kwargs) as offloader:
        optimizer = offloader.offload_optimizer(inner)
        assert isinstance(optimizer, OffloadedOptimizer)
        yield optimizer, faults[-1]


def used_bytes(optimizer: OffloadedOptimizer) -> int:
    return sum(arena.used_bytes for tier in optimizer._states.store.tiers for arena in tier._arenas)


# -- drives that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fail",
    [
        pytest.param(on_calls({3}, eio), id="once"),
        pytest.param(always(eio), id="always"),
        pytest.param(on_calls(range(7, 10**9), enospc), id="full after a while"),
    ],
)
def test_failed_writes_cost_nothing_but_memory(fail: Fail, spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        drive.fail_write = fail
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                pair.step(optimizer)
                pair.check()
            saved = optimizer.state_dict()
            assert_same_states(saved, pair.twin.state_dict())
            expected = copy.deepcopy(saved)
            pair.step(optimizer)
            assert_same_states(saved, expected)
        mine = [str(w.message) for w in caught if "optimizer states could not be written" in str(w.message)]
        assert len(mine) == 1
    pair.check(optimizer)


def test_memory_returns_when_the_drive_does(spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        slots = optimizer._states.store.num_slots
        drive.fail_write = always(enospc)
        with pytest.warns(UserWarning, match="stay in memory"):
            pair.step(optimizer)
        for _ in range(2):
            pair.step(optimizer)
        assert optimizer.stats.resident_bytes == optimizer.stats.state_bytes
        drive.fail_write = None
        optimizer.flush()
        pair.step(optimizer)
        assert optimizer._states.store.num_slots == slots
        assert optimizer.stats.resident_bytes <= slots * (128 << 10) + optimizer.stats.state_bytes // 4
        pair.check(optimizer)


def test_a_read_that_fails_once_is_tried_again(spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        # Far apart: the second try of one must not be a call that fails by itself.
        drive.fail_read = on_calls({2, 42}, eio)
        drive.corrupt_read = lambda index: index == 22
        for _ in range(4):
            pair.step(optimizer)
        assert drive.num_reads > 45
        assert sum(tier.num_retries for tier in optimizer._states.store.tiers) == 3
        pair.check(optimizer)


@pytest.mark.parametrize("kind", ["eio", "corrupt"])
def test_states_that_cannot_be_read_end_training_until_a_checkpoint_is_loaded(kind: str, spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        for _ in range(2):
            pair.step(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in pair.mine]
        if kind == "eio":
            drive.fail_read = always(eio)
        else:
            drive.corrupt_read = lambda index: True
        pair.set_gradients()
        with pytest.raises(StorageError if kind == "eio" else CorruptionError) as caught:
            optimizer.step()
        assert "optimizer states of subgroup" in caught.value.__notes__[0]
        drive.fail_read = drive.corrupt_read = None
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(RuntimeError, match="incomplete"):
                refused()
        with pytest.raises(ValueError, match="groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()  # what could not be loaded has repaired nothing
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for p, weight in zip(pair.mine, weights, strict=True):
                p.copy_(weight)
        pair.check(optimizer)
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)
        optimizer.flush()
        assert used_bytes(optimizer) == pytest.approx(optimizer.stats.state_bytes, rel=0.05)


def test_a_load_that_is_interrupted_ends_training(spill_dir: Path) -> None:
    """Half of the states are of another time then."""
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        pair.step(optimizer)
        wrong = copy.deepcopy(saved)
        wrong["state"][7] = {"exp_avg": _Unmovable()}
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(wrong)
        assert not optimizer.inner.state
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        assert_same_states(optimizer.state_dict(), saved)


class _Unmovable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyboardInterrupt


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_closure_that_fails_touches_nothing(error: type[BaseException], spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)

        def closure() -> float:
            raise error("in the model")

        with pytest.raises(error):
            optimizer.step(closure)
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


class Stumbling(torch.optim.AdamW):
    """Fails in its own code, on demand."""

    error: type[BaseException] | None = None

    def _init_group(self, *args: Any) -> Any:
        if self.error is not None and args[0]["params"][0].shape == (77, 77):
            raise self.error
        return super()._init_group(*args)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_is_not_trained_on(error: type[BaseException], spill_dir: Path) -> None:
    pair = Pair(lambda p: Stumbling(p, lr=1e-2), shapes=((128, 150),) * 5 + ((77, 77),) + ((128, 150),) * 5)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [p.detach().clone() for p in pair.mine]
        assert isinstance(pair.inner, Stumbling)
        for _ in range(10):  # what a lost slot would be seen by
            pair.inner.error = error
            pair.set_gradients()
            with pytest.raises(error):
                optimizer.step()
            pair.inner.error = None
            with pytest.raises(RuntimeError, match=error.__name__):
                optimizer.step()
            optimizer.load_state_dict(saved)
        with torch.no_grad():
            for p, weight in zip(pair.mine, weights, strict=True):
                p.copy_(weight)
        pair.check(optimizer)
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)
        optimizer.flush()
        optimizer._states.store.evict(range(len(optimizer._states.store)))
        assert optimizer._states.store.slots.lent_bytes == 0


def test_closing_an_incomplete_one_is_quiet_and_leaves_nothing(spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        pair.step(optimizer)
        drive.fail_read = always(eio)
        with pytest.raises(StorageError):
            pair.step(optimizer)
    with pytest.raises(RuntimeError, match="incomplete"):
        optimizer.state_dict()
    with pytest.raises(OffloaderClosedError):
        optimizer.load_state_dict(pair.twin.state_dict())
    with pytest.raises(RuntimeError, match="incomplete"):
        optimizer.state_dict()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_state_dict_may_be_loaded_again_and_again(spill_dir: Path) -> None:
    """Not even its small tensors, which stay in memory, may follow the training that was loaded from it."""
    pair = Pair(adamw, shapes=((128, 150),) * 3 + ((5,), (300, 200)))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved = optimizer.state_dict()
        expected = copy.deepcopy(saved)
        for _ in range(3):
            optimizer.load_state_dict(saved)
            assert_same_states(optimizer.state_dict(), expected)
            pair.set_gradients()
            optimizer.step()
            assert_same_states(saved, expected)


def test_a_state_dict_while_writes_are_under_way_outlives_everything(spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, drive):
        drive.delay_s = 0.005
        for _ in range(2):
            pair.step(optimizer)
        saved = optimizer.state_dict()
        expected = copy.deepcopy(pair.twin.state_dict())
        for _ in range(3):
            pair.step(optimizer)
        assert_same_states(saved, expected)
    assert_same_states(saved, expected)
    del optimizer
    gc.collect()
    assert_same_states(saved, expected)
    saved["state"][0]["exp_avg"].zero_()  # private, and writable as a plain one


def test_copies_and_pickles_are_refused(spill_dir: Path) -> None:
    with offloaded(Pair(adamw).inner, spill_dir) as (optimizer, _):
        for refused in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                refused(optimizer)


def test_the_inner_optimizer_must_not_be_stepped_or_loaded(spill_dir: Path) -> None:
    """Its states would be new ones, beside those on the drive."""
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        saved = optimizer.state_dict()
        pair.set_gradients()
        pair.inner.step()
        with pytest.raises(RuntimeError, match="stepped or loaded directly"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        optimizer.step()
        pair.inner.load_state_dict(saved)
        with pytest.raises(RuntimeError, match="stepped or loaded directly"):
            optimizer.step()


def test_states_are_not_lost_when_they_cannot_be_taken_over(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(adamw)
    pair.step(pair.inner)
    expected = copy.deepcopy(pair.inner.state_dict())

    def refuse(*args: Any) -> Any:
        raise MemoryError("injected")

    monkeypatch.setattr("lightning_ssd.slots.Slots.take", refuse)
    with opened(spill_dir) as offloader, pytest.raises(MemoryError):
        offloader.offload_optimizer(pair.inner)
    assert_same_states(pair.inner.state_dict(), expected)


# -- nothing is left ---------------------------------------------------------------------------------------------------


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return sum(thread.name.startswith("lightning_ssd") for thread in threading.enumerate())


def test_dropping_everything_leaves_no_thread_and_no_file(spill_dir: Path) -> None:
    files, threads = num_files(), num_threads()
    pair = Pair(adamw)
    policy = OffloadPolicy(activations="keep", optimizer_states="offload")
    offloader = Offloader(policy=policy, hardware=HardwareProfile(paths=[str(spill_dir)])).open()
    optimizer = offloader.offload_optimizer(pair.inner)
    pair.step(optimizer)
    gone = weakref.ref(optimizer)
    del offloader, optimizer
    for _ in range(1000):
        gc.collect()
        if gone() is None and num_files() == files and num_threads() == threads:
            break
        threading.Event().wait(0.01)
    assert gone() is None
    assert (num_files(), num_threads()) == (files, threads)
    assert not list(spill_dir.iterdir())


def test_refused_optimizers_leave_no_thread_and_no_file(spill_dir: Path) -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with opened(spill_dir) as offloader:
        files, threads = num_files(), num_threads()
        for _ in range(3):
            with pytest.raises(ValueError, match="LBFGS"):
                offloader.offload_optimizer(torch.optim.LBFGS(parameters))
        assert (num_files(), num_threads()) == (files, threads)


def test_two_optimizers_share_an_offloader(spill_dir: Path) -> None:
    one, two = Pair(adamw), Pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with opened(spill_dir) as offloader:
        first, second = offloader.offload_optimizer(one.inner), offloader.offload_optimizer(two.inner)
        for _ in range(3):
            one.step(first)
            two.step(second)
        assert isinstance(first, OffloadedOptimizer)
        first.close()  # the other one stays good
        two.step(second)
        two.check(second)
    one.check(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_not_to_use_it(spill_dir: Path) -> None:
    """It has no workers: whoever waited for one there would wait for ever."""
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for _ in range(2):
            pair.step(optimizer)
        saved = optimizer.state_dict()
        pair.set_gradients()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(_child(optimizer, saved))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()
        pair.twin.step()
        pair.check(optimizer)


def _child(optimizer: OffloadedOptimizer, saved: dict[str, Any]) -> int:
    """Which check failed; 0: none."""
    uses: list[Callable[[], Any]] = [optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)]
    for number, use in enumerate(uses, 1):
        try:
            use()
        except StorageError:
            continue
        except BaseException:
            return number
        return number
    value = saved["state"][0]["exp_avg"][0, 0].item()  # what is mapped can be read
    optimizer.close()
    saved.clear()
    gc.collect()
    return 0 if value == value else 9


# -- odd states, parameters and gradients ------------------------------------------------------------------------------


class Nested(Optimizer):
    """Keeps a list of tensors, a dictionary, a late state, and swaps two buffers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, past=[], a=torch.zeros_like(p), b=torch.ones_like(p), notes={"sum": p.sum()})
                state["count"] += 1
                state["past"] = [*state["past"][-1:], p.grad.clone()]
                state["a"].add_(p.grad)
                state["a"], state["b"] = state["b"], state["a"]
                if state["count"] == 3:
                    state["late"] = p.clone()
                if state["count"] == 5:
                    del state["late"]
                    state["a"] = state["a"].double()
                p.sub_(state["a"].to(p.dtype), alpha=group["lr"] / group["calls"])
                p.sub_(state["past"][0], alpha=group["lr"])


def test_states_come_late_go_swap_nest_and_change_their_type(spill_dir: Path) -> None:
    pair = Pair(Nested)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for step in range(7):
            pair.step(optimizer, None if step % 2 else [0, 1, 2, 8])
            pair.check(optimizer)
        saved = copy.deepcopy(pair.twin.state_dict())
        optimizer.load_state_dict(saved)
        pair.twin.load_state_dict(copy.deepcopy(saved))
        pair.step(optimizer)
        pair.check(optimizer)


def test_a_group_without_gradients_counts_its_steps_as_plainly(spill_dir: Path) -> None:
    pair = Pair(lambda p: Nested([{"params": p[:5]}, {"params": p[5:]}]))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for active in ([0, 1], [], [5, 6], None):
            pair.step(optimizer, active)
            pair.check(optimizer)
        assert [group["calls"] for group in optimizer.param_groups] == [4, 4]


def test_options_may_change_between_steps(spill_dir: Path) -> None:
    """``amsgrad`` makes new states in the middle."""
    pair = Pair(lambda p: torch.optim.Adam(p, lr=1e-2))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for step in range(8):
            if step in (3, 5):
                for group in (optimizer.param_groups[0], pair.twin.param_groups[0]):
                    group["amsgrad"] = step == 3
            # A state that amsgrad finds without its maximum is a KeyError in the plain optimizer, too.
            if step == 3:
                plain = pair.twin.state_dict()
                for state in plain["state"].values():
                    state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
                optimizer.load_state_dict(copy.deepcopy(plain))
            pair.step(optimizer)
            pair.check(optimizer)


def _channels_last(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(p.detach().view(10, 16, 10, 12).to(memory_format=torch.channels_last))


ODD: dict[str, Callable[[nn.Parameter], nn.Parameter]] = {
    "complex": lambda p: nn.Parameter(torch.view_as_complex(p.detach().view(-1, 2).clone())),
    "complex double": lambda p: nn.Parameter(torch.view_as_complex(p.detach().double().view(-1, 2).clone())),
    "double": lambda p: nn.Parameter(p.detach().double()),
    "half": lambda p: nn.Parameter(p.detach().half()),
    "bfloat16": lambda p: nn.Parameter(p.detach().bfloat16()),
    "channels last": _channels_last,
    "transposed": lambda p: nn.Parameter(p.detach().t()),
    "view of a larger one": lambda p: nn.Parameter(torch.cat([p.detach(), p.detach()])[3:131]),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("large", [False, True])
def test_parameters_of_all_kinds(odd: str, large: bool, spill_dir: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(128, 150, generator=generator) for _ in range(4)]
    if large and odd in ("double", "half", "bfloat16", "complex"):
        start = [torch.randn(600, 200, generator=generator) for _ in range(3)]
    mine = [ODD[odd](nn.Parameter(p)) for p in start]
    plain = [ODD[odd](nn.Parameter(p)) for p in start]
    twin = torch.optim.AdamW(plain, lr=1e-2)
    with offloaded(torch.optim.AdamW(mine, lr=1e-2), spill_dir) as (optimizer, _):
        for _ in range(4):
            for a, b in zip(mine, plain, strict=True):
                gradient = torch.randn(a.shape, generator=generator, dtype=torch.float32).to(a.dtype)
                a.grad, b.grad = gradient, gradient.clone()
            optimizer.step()
            twin.step()
        assert all(map(equal, mine, plain))
        assert_same_states(optimizer.state_dict(), twin.state_dict())
        optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
        assert_same_states(optimizer.state_dict(), twin.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["sparse_adam", "adagrad", "sgd"])
def test_sparse_gradients(kind: str, spill_dir: Path) -> None:
    """Of parameters that are not cut; those of sliced ones are refused by name."""
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=1e-2),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    pair = Pair(makers[kind], shapes=((40, 30),) * 9)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for step in range(4):
            for mine, plain in zip(pair.mine, pair.plain, strict=True):
                rows = torch.tensor([[step, step + 5, step + 20]])
                gradient = torch.sparse_coo_tensor(
                    rows, torch.full((3, 30), 0.5 + step), (40, 30), check_invariants=True
                )
                mine.grad, plain.grad = gradient.coalesce(), gradient.clone().coalesce()
            optimizer.step()
            pair.twin.step()
        pair.check(optimizer)


def test_data_that_is_replaced_is_what_is_updated(spill_dir: Path) -> None:
    pair = Pair(adamw, shapes=((300, 200), (128, 150), (7,), *[(128, 150)] * 6))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for _ in range(4):
            for mine, plain in zip(pair.mine, pair.plain, strict=True):
                mine.data, plain.data = mine.data * 2, plain.data * 2
            pair.step(optimizer)
        pair.check(optimizer)
        pair.mine[0].grad = None
        pair.mine[0].data = torch.ones(200, 300)
        pair.mine[0].grad = torch.ones(200, 300)
        with pytest.raises(RuntimeError, match="Make a new optimizer"):
            optimizer.step()


def test_gradients_that_stay_and_are_zeroed(spill_dir: Path) -> None:
    pair = Pair(adamw, shapes=((300, 200), (128, 150), (7,), *[(128, 150)] * 6))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        held = [p.grad for p in pair.mine]
        for optimizers in ((optimizer, pair.twin),) * 3:
            for each in optimizers:
                each.zero_grad(set_to_none=False)
                each.step()
        assert all(p.grad is g for p, g in zip(pair.mine, held, strict=True))
        pair.check(optimizer)


def test_a_parameter_in_two_groups_is_refused_as_plainly(spill_dir: Path) -> None:
    pair = Pair(adamw)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [pair.mine[0]]})
        pair.step(optimizer)
        pair.check(optimizer)


def test_states_elsewhere_stay_there(spill_dir: Path) -> None:
    """On another device, or none."""

    class Elsewhere(Nested):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["shape"] = torch.empty(p.shape, device="meta")
                state["m"] = state.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(state["m"])

    pair = Pair(Elsewhere)
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for _ in range(3):
            pair.step(optimizer)
        pair.check()
        assert optimizer.state_dict()["state"][3]["shape"].device.type == "meta"


def test_a_new_group_may_bring_states(spill_dir: Path) -> None:
    class Eager(torch.optim.SGD):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group(param_group)
            for p in param_group["params"]:
                self.state[p]["momentum_buffer"] = torch.ones_like(p)

    pair = Pair(lambda p: Eager(p, lr=0.1, momentum=0.9))
    extra, extra_plain = nn.Parameter(torch.ones(128, 150)), nn.Parameter(torch.ones(128, 150))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)
        optimizer.add_param_group({"params": [extra]})
        pair.twin.add_param_group({"params": [extra_plain]})
        extra.grad, extra_plain.grad = torch.full((128, 150), 0.25), torch.full((128, 150), 0.25)
        for _ in range(3):
            pair.step(optimizer)
        assert torch.equal(extra, extra_plain)
        pair.check(optimizer)


class Ragged(torch.optim.SGD):
    """Rounds the last element of each tensor otherwise, as vectorised loops may."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                p[-1] -= group["lr"] / 16


@pytest.mark.parametrize("rate", [0.0, 0.1, torch.tensor(0.0)])
def test_a_rate_of_zero_does_not_hide_that_slices_differ(
    rate: float | torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-ups begin at 0, and trials are made before the first step."""
    monkeypatch.setattr(slicing, "_ELEMENTWISE", (Ragged,))
    optimizer = Ragged([nn.Parameter(torch.ones(300, 200))], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    trials = slicing.Trials(InnerStep(optimizer), optimizer, master_weights=False)
    assert not trials.may_slice(optimizer.param_groups[0]["params"][0], 0)
    assert optimizer.param_groups[0]["lr"] is rate


def test_an_interrupted_trial_leaves_no_parameter_out(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known, but in no subgroup, it would never be updated again."""
    pair = Pair(adamw)
    extra, extra_plain = nn.Parameter(torch.ones(300, 200)), nn.Parameter(torch.ones(300, 200))
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        pair.step(optimizer)

        def interrupt(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(slicing.Trials, "may_slice", interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.add_param_group({"params": [extra]})
        pair.twin.add_param_group({"params": [extra_plain]})
        extra.grad, extra_plain.grad = torch.ones(300, 200), torch.ones(300, 200)
        pair.step(optimizer)
        assert torch.equal(extra, extra_plain)
        pair.check(optimizer)


# -- a soak ------------------------------------------------------------------------------------------------------------


SOAKED: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nested": Nested,
}


@pytest.mark.parametrize("kind", SOAKED)
@pytest.mark.parametrize("cache", ["none", "some"])
def test_random_training_has_the_bits_of_the_plain_twin(
    kind: str, cache: str, spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing subsets of gradients, new groups, checkpoints, loads, failing writes, slow drives."""
    seed = 10 * list(SOAKED).index(kind) + len(cache)
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    monkeypatch.setattr(module_under_test, "_NUM_SLOTS", 2 + draw(4))
    shapes = ((128, 150), (7,), (300, 200), (0, 4), (), *[(60, 100)] * 8, (64, 64))
    pair = Pair(SOAKED[kind], shapes)
    directories = spill_dir / "one", spill_dir / "two"
    host_memory = 300_000 if cache == "some" else "auto"
    kept: list[tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]] = []
    with (
        warnings.catch_warnings(),
        offloaded(pair.inner, *directories, host_memory=host_memory) as (optimizer, drive),
    ):
        warnings.filterwarnings("ignore", "optimizer states could not be written")
        drive.fail_write = lambda index: eio() if index % 37 in (5, 6) else None
        drive.delay_s = 0.0005
        for _ in range(40):
            number = len(pair.mine)
            chosen = draw(3)
            active = None if chosen == 0 else [i for i in range(number) if draw(2) or (chosen == 1 and draw(2))]
            pair.step(optimizer, active)
            pair.check()
            match draw(12):
                case 0 if number < 20:
                    fresh = torch.randn(80 + draw(100), 100, generator=generator)
                    pair.mine.append(nn.Parameter(fresh.clone()))
                    pair.plain.append(nn.Parameter(fresh.clone()))
                    optimizer.add_param_group({"params": [pair.mine[-1]], "lr": 1e-3})
                    pair.twin.add_param_group({"params": [pair.plain[-1]], "lr": 1e-3})
                    kept.clear()  # of fewer groups
                case 1 | 2:
                    weights = [p.detach().clone() for p in pair.mine]
                    kept = [*kept[-2:], (optimizer.state_dict(), copy.deepcopy(pair.twin.state_dict()), weights)]
                case 3 if kept:
                    back = draw(len(kept))
                    optimizer.load_state_dict(kept[back][0])
                    pair.twin.load_state_dict(copy.deepcopy(kept[back][1]))
                    with torch.no_grad():
                        for a, b, weight in zip(pair.mine, pair.plain, kept[back][2], strict=True):
                            a.copy_(weight)
                            b.copy_(weight)
                case 4:
                    with contextlib.suppress(StorageError):
                        optimizer.flush()
        while kept:
            assert_same_states(*kept.pop()[:2])
        pair.check(optimizer)
        drive.fail_write = None
        gc.collect()
        optimizer.flush()
        blocks = sum(s.layout.nbytes for s in optimizer._states.partition.subgroups if s.layout is not None)
        assert used_bytes(optimizer) == blocks
    pair.check(optimizer)
