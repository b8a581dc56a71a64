"""Training under plans: exact while plans come, change and are departed from; never over a budget; never stuck."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy, scheduler
from lightning_ssd.errors import BudgetError, OffloaderClosedError
from lightning_ssd.ledger import Ledger
from lightning_ssd.planning import rates
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.storage.arena import Arena
from lightning_ssd.storage.backend import Backend, WrappedBackend
from lightning_ssd.storage.movers import HostMover
from tests.helpers import (
    AUTO,
    PLANNED,
    PLANNING,
    Raised,
    Session,
    Setup,
    assert_identical,
    assert_released,
    assert_same,
    open_offloader,
    outcome,
    within,
)
from tests.parity.models import Perceptrons, floats
from tests.storage.faults import FaultyBackend, always, eio, enospc

WIDTH, ROWS, BLOCKS = 64, 256, 4  # an activation of 64 KiB, or thrice that
SMALLEST, MIDDLE_BYTES, LARGE = 600_000, 900_000, 1_500_000  # of 2.2 MB that one pass saves
TIMEOUT_S = 60
SETUPS = (PLANNED, PLANNING, AUTO, Setup(activations="auto", activation_budget=MIDDLE_BYTES, drained=False))
IDS = ["planned", "planning", "auto", "budget"]


def make_model(blocks: int = BLOCKS, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(3)
    return Perceptrons(width=width, num_blocks=blocks)


def loss_of(model: nn.Module, step: int, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    return model(floats(step, rows, width)).square().mean()


def gradients(*modules: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for module in modules for p in module.parameters()]


Between = Callable[[int, Session], None]


def trains(steps: int, between: Between = lambda step, session: None) -> Callable[[Session], Any]:
    """A plain training; ``between`` is called after each step."""

    def program(session: Session) -> Any:
        model = make_model()
        session.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(steps):
            with session.saved():
                loss = loss_of(model, step)
            session.drain()
            loss.backward()
            session.end()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            between(step, session)
        return losses, [p.detach().clone() for p in model.parameters()]

    return program


@contextmanager
def faulty(directory: Path, setup: Setup, **faults: Any) -> Iterator[tuple[Offloader, FaultyBackend]]:
    """An offloader on a drive with faults."""
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend, **faults))
        return made[-1]

    with open_offloader(directory, setup, _wrap_backend=wrap) as offloader:
        yield offloader, made[0]


def num_writes(offloader: Offloader) -> int:
    assert offloader._cache is not None
    return offloader._cache.ledger.num_writes


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
def test_ten_steps_are_exact(setup: Setup, tmp_path: Path) -> None:
    expected = outcome(trains(10), Session())
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(trains(10), Session.of(offloader, setup)), expected)
        offloader.wait_for_plan()
        assert_released(offloader)
        assert num_writes(offloader) == 0
        report = offloader.plan_report
        assert report is not None
        assert report.num_plans >= 1


def test_the_drive_changes_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast, slow, fast: plans are made anew, and every step is exact."""
    plans: list[int] = []

    def run(backend: FaultyBackend | None) -> Callable[[Session], Any]:
        def change(step: int, session: Session) -> None:
            if backend is not None and session.offloader is not None:
                backend.delay_s = 0.01 if 8 <= step < 24 else 0.0
                report = session.offloader.plan_report
                plans.append(0 if report is None else report.num_plans)

        return trains(34, change)

    monkeypatch.setattr(rates, "MIN_SAMPLE_BYTES", 1 << 20)  # so little moves here
    setup = Setup(activations="auto", max_slowdown=1.5, settled=True)
    expected = outcome(run(None), Session())
    with faulty(tmp_path, setup) as (offloader, backend):
        assert_identical(outcome(run(backend), Session.of(offloader, setup)), expected)
        assert_released(offloader)
        assert offloader.stats.bytes_written > 0
    assert plans[-1] > plans[7] >= 1, "no plan was made anew"


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
@pytest.mark.parametrize("named", [True, False], ids=["signatures", "no signatures"])
def test_shapes_alternate(setup: Setup, named: bool, tmp_path: Path) -> None:
    """Bucketed lengths and a last, small batch, told apart by their signature or by what they save."""

    def program(session: Session) -> Any:
        model, seen = make_model(), []
        session.register(model)
        for step in range(18):
            rows = (ROWS, ROWS // 2, 3)[step % 3 if step % 6 else 2]
            saved = session.saved()
            if session.offloader is not None and named:
                saved = session.offloader.saved_tensors(signature=("rows", rows))
            with saved:
                loss = loss_of(model, step, rows)
            session.drain()
            loss.backward()
            session.end()
            seen.append([loss.detach(), gradients(model)])
            model.zero_grad()
        return seen

    assert_same(program, tmp_path, setups=[setup], moves=False)


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
def test_two_networks_in_turns(setup: Setup, tmp_path: Path) -> None:
    """As in adversarial training: two kinds of passes, the first pass still alive while the second one runs."""

    def program(session: Session) -> Any:
        one, two = make_model(2), make_model(3, 24)
        shrink = nn.Linear(WIDTH, 24)
        modules = nn.ModuleList([one, two, shrink])
        session.register(modules)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (one, two)]
        for step in range(10):
            with session.saved():
                made = one(floats(step, ROWS, WIDTH))
                judged = two(shrink(made.detach())).square().mean()
            session.drain()
            judged.backward()
            session.end()
            optimizers[1].step()
            with session.saved():
                fooled = two(shrink(made)).square().mean()
            session.drain()
            fooled.backward()
            session.end()
            optimizers[0].step()
            modules.zero_grad()
        return [parameter.detach().clone() for parameter in modules.parameters()]

    assert_same(program, tmp_path, setups=[setup], moves=False)


# What both graphs of a double backward save counts twice, hence the larger budget.
TWICE = Setup(activations="auto", activation_budget=2_000_000, drained=False)


@pytest.mark.parametrize("setup", [*SETUPS[:3], TWICE], ids=IDS)
def test_graphs_are_used_in_every_way(setup: Setup, tmp_path: Path) -> None:
    """Accumulation, a retained graph, double backward, in one training and in changing order."""

    def program(session: Session) -> Any:
        model, seen = make_model(3), []
        session.register(model)
        for step in range(12):
            x = floats(step, ROWS, WIDTH).requires_grad_()
            with session.saved():
                loss = model(x).square().mean()
            session.drain()
            if step % 4 == 1:
                loss.backward(retain_graph=True)
                loss.backward()
            elif step % 4 == 3:
                with session.saved():
                    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                gradient.square().sum().backward()
                del gradient
            else:
                loss.backward()
            session.end()
            seen.append([loss.detach(), gradients(model), x.grad])
            if step % 2:
                model.zero_grad()
        return seen

    assert_same(program, tmp_path, setups=[setup], moves=False)


class Boom(Exception):
    pass


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
def test_errors_in_mid_step(setup: Setup, tmp_path: Path) -> None:
    """A forward and a backward that fail half way; the steps after them are exact, and plans go on being made."""

    def fails(*_: Any) -> Any:
        raise Boom

    def program(session: Session) -> Any:
        model, seen = make_model(), []
        session.register(model)
        for step in range(15):
            try:
                with session.saved():
                    hidden = model(floats(step, ROWS, WIDTH))
                    if step % 5 == 2:
                        raise Boom
                    if step % 5 == 4:
                        middle = model(hidden * 2)
                        hidden.register_hook(fails)
                        hidden = middle
                    loss = hidden.square().mean()
                session.drain()
                loss.backward()
                seen.append(loss.detach())
            except Boom:
                model.zero_grad()
            finally:
                hidden = loss = middle = None  # type: ignore[assignment]
            session.end()
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    expected = assert_same(program, tmp_path, setups=[setup], moves=False)
    assert len(expected) == 15 + 9


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
def test_a_pass_departs_from_its_plan(setup: Setup, tmp_path: Path) -> None:
    """Control flow that hangs on data: shorter, longer and other passes than the plan was made for."""

    def program(session: Session) -> Any:
        model, seen = make_model(), []
        assert isinstance(model, Perceptrons)
        session.register(model)
        for step in range(16):
            x = floats(step, ROWS, WIDTH)
            with session.saved():
                if step in (6, 11):
                    x = x.requires_grad_().sin().exp()
                for block in model.blocks[: 2 if step in (5, 11) else BLOCKS]:
                    x = x + block(x)
                if step in (7, 12):
                    x = (x.exp() * x).tanh()
                if step == 9:
                    x = (x[: ROWS // 2] * 2).sin()
                loss = x.square().mean()
            session.drain()
            loss.backward()
            session.end()
            seen.append([loss.detach(), gradients(model)])
            model.zero_grad()
        return seen

    assert_same(program, tmp_path, setups=[setup], moves=False)


@pytest.mark.parametrize("setup", SETUPS, ids=IDS)
def test_one_context_is_entered_twice(setup: Setup, tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        model, seen = make_model(2), []
        session.register(model)
        for step in range(8):
            saved = session.saved()
            with saved:
                one = loss_of(model, step)
            with saved:
                two = loss_of(model, step + 50)
            (one + two).backward()
            session.end()
            seen.append(gradients(model))
            model.zero_grad()
            del one, two
        return seen

    assert_same(program, tmp_path, setups=[setup], moves=False)


# -- never over the budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [SMALLEST, MIDDLE_BYTES, LARGE])
def test_a_hundred_steps_stay_under_the_budget(budget: int, tmp_path: Path) -> None:
    peaks: list[int] = []

    def look(step: int, session: Session) -> None:
        if session.offloader is not None:
            peaks.append(session.offloader.stats.resident_peak_bytes)
            session.offloader.reset_peaks()
            if step % 10 == 0:
                session.offloader.wait_for_plan()

    setup = Setup(activations="auto", activation_budget=budget, drained=False)
    expected = outcome(trains(100), Session())
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(trains(100, look), Session.of(offloader, setup)), expected)
        assert_released(offloader)
        assert num_writes(offloader) == 0
        assert offloader.stats.bytes_written > 0
    assert len(peaks) == 100
    assert max(peaks) <= budget, [(step, peak) for step, peak in enumerate(peaks) if peak > budget]


@pytest.mark.parametrize("delay_s", [0.0, 0.002], ids=["fast", "slow"])
def test_several_passes_share_the_budget(delay_s: float, tmp_path: Path) -> None:
    """A plan is made for a pass alone; two and three at a time have to do with the same memory."""
    budget = MIDDLE_BYTES

    def program(session: Session) -> Any:
        model, seen = make_model(), []
        session.register(model)
        for step in range(12):
            losses = []
            for number in range((1, 1, 2, 3)[step % 4]):
                with session.saved():
                    losses.append(loss_of(model, step + 100 * number))
            for loss in losses if step % 8 < 4 else reversed(losses):
                loss.backward()
            losses.clear()
            del loss
            session.end()
            seen.append(gradients(model))
            model.zero_grad()
        return seen

    setup = Setup(activations="auto", activation_budget=budget, drained=False, settled=True)
    expected = outcome(program, Session())
    with faulty(tmp_path, setup, delay_s=delay_s) as (offloader, _):
        assert_identical(outcome(program, Session.of(offloader, setup)), expected)
        assert_released(offloader)
        assert offloader.stats.resident_peak_bytes <= budget
        assert num_writes(offloader) == 0


def test_the_budget_is_what_bounds_the_peak(tmp_path: Path) -> None:
    """The tests above can fail: without a budget the peak is far higher."""
    with open_offloader(tmp_path, Setup(activations="auto")) as offloader:
        outcome(trains(3), Session(offloader))
        assert offloader.stats.resident_peak_bytes > LARGE


def test_an_impossible_budget_names_the_smallest_one_which_works(tmp_path: Path) -> None:
    setup = Setup(activations="auto", activation_budget=100_000, drained=False, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        got = outcome(trains(3), Session.of(offloader, setup))
    assert isinstance(got, Raised)
    assert got.type == BudgetError.__name__
    assert "OffloadPolicy.activation_budget=100000 bytes" in got.text
    smallest = int(got.text.split("smallest possible is ")[1].split(" bytes")[0])
    assert 2 * ROWS * WIDTH * 4 <= smallest < 2_000_000
    works = Setup(activations="auto", activation_budget=smallest, drained=False, settled=True)
    with open_offloader(tmp_path, works) as offloader:
        assert_identical(outcome(trains(10), Session.of(offloader, works)), outcome(trains(10), Session()))
        assert offloader.stats.resident_peak_bytes <= smallest


class FullBackend(WrappedBackend):
    """The file systems of some directories give no byte."""

    def __init__(self, inner: Backend, full: Sequence[Path]) -> None:
        super().__init__(inner)
        self._full = full

    def open_arena(self, directory: Path) -> Arena:
        arena = super().open_arena(directory)
        if directory in self._full:
            arena._preallocate = lambda nbytes: False  # type: ignore[method-assign]
        return arena


def test_a_budget_on_a_full_drive_blames_the_drive(tmp_path: Path) -> None:
    setup = Setup(activations="auto", activation_budget=100_000, drained=False, settled=True)
    full = {"_wrap_backend": lambda inner: FullBackend(inner, [tmp_path])}
    with open_offloader(tmp_path, setup, **full) as offloader:
        # Also of the writes of the first pass, which has no plan.
        with pytest.warns(UserWarning, match="failed|measured") as caught:
            got = outcome(trains(3), Session.of(offloader, setup))
        place = f"the directory {tmp_path} could not be measured "
        assert any(re.match(rf"{place}.*; nothing will be moved there\. Free space", str(w.message)) for w in caught)
        assert offloader.unusable is not None
    assert isinstance(got, Raised)
    assert got.type == BudgetError.__name__
    assert "OffloadPolicy.activation_budget=100000 bytes" in got.text
    assert re.search(
        rf"because no drive could be used: the directory {tmp_path} could not be measured \(the file system of "
        rf"{tmp_path}\S+ is full: [\d,]+ more bytes are needed, [\d,]+ are free, .*\)\. Without one the smallest "
        r"possible is \d+ bytes .*\. Free space there, or name other directories in HardwareProfile\(paths=\.\.\.\): "
        "with a drive it is lower",
        got.text,
    )
    assert got.text.count("Free space") == 1


def test_a_run_on_a_full_drive_says_why_nothing_moves(tmp_path: Path) -> None:
    full = {"_wrap_backend": lambda inner: FullBackend(inner, [tmp_path])}
    with open_offloader(tmp_path, PLANNED, **full) as offloader:
        with pytest.warns(UserWarning, match="could not be measured"):
            assert_identical(outcome(trains(6), Session.of(offloader, PLANNED)), outcome(trains(6), Session()))
        assert offloader.unusable is not None
        assert f"the directory {tmp_path} could not be measured (the file system of" in offloader.unusable
        assert offloader.stats.bytes_written == 0


def test_a_full_drive_is_passed_over_when_the_drives_are_measured(tmp_path: Path) -> None:
    paths = [tmp_path / "full", tmp_path / "empty"]
    hardware = HardwareProfile(paths=paths, allow_unsuitable_paths=True)
    policy = OffloadPolicy(activations="auto", max_slowdown=9.0, min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=lambda b: FullBackend(b, paths[:1])) as offloader:
        assert_identical(outcome(trains(6), Session.of(offloader, PLANNED)), outcome(trains(6), Session()))
        assert offloader.unusable is None
        assert offloader.stats.bytes_written > 0


def test_out_of_memory_while_a_limit_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third allocation fails once: what was brought up early goes, and the read is tried again."""
    allocate, calls = HostMover.allocate, [0]

    def fails(self: HostMover, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 0:
            raise MemoryError("injected")
        return allocate(self, *args)

    setup = Setup(activations="auto", activation_budget=SMALLEST, settled=True)
    expected = outcome(trains(8), Session())
    with open_offloader(tmp_path, setup) as offloader:
        session = Session.of(offloader, setup)
        program = trains(8)
        monkeypatch.setattr(HostMover, "allocate", fails)
        got = outcome(program, session)
        monkeypatch.undo()
        if not isinstance(got, Raised):
            assert_identical(got, expected)
            assert offloader.stats.resident_peak_bytes <= SMALLEST
        else:  # nothing had been brought up that could go: the error of the allocation itself, as without us
            assert got.type == "MemoryError", got.trace
        assert calls[0] > 10
        assert_identical(outcome(trains(8), session), expected)  # whatever happened, the next training is exact
        assert_released(offloader)


# -- never stuck ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [enospc, eio], ids=["ENOSPC", "EIO"])
def test_writes_fail_under_a_budget(error: Callable[[], BaseException], tmp_path: Path) -> None:
    """Nothing can make room: the tensors stay, with one warning, and the results are exact."""
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    expected = outcome(trains(6), Session())

    def work() -> None:
        with warnings.catch_warnings(record=True) as caught, faulty(tmp_path, setup) as (offloader, backend):
            warnings.simplefilter("always")
            offloader.machine  # noqa: B018  the probe of a drive that still works
            backend.fail_write = always(error)
            assert_identical(outcome(trains(6), Session.of(offloader, setup)), expected)
            assert_released(offloader)
            assert offloader.stats.failures > 0
            assert num_writes(offloader) == 0
        assert len([w for w in caught if "injected" in str(w.message)]) == 1

    within(TIMEOUT_S, work)


def test_everything_is_held_by_the_user(tmp_path: Path) -> None:
    """Moving frees nothing then: pack goes on when all has been written, and says so by going over the budget."""
    setup = Setup(activations="auto", activation_budget=MIDDLE_BYTES, drained=False, settled=True)

    told: list[BudgetError] = []

    def program(session: Session) -> Any:
        held, x = [], floats(0, ROWS, WIDTH).requires_grad_()
        for _ in range(3):
            with session.saved():
                y = x
                for _ in range(20):
                    y = y.sin()
                    held.append(y)
                loss = y.sum()
            loss.backward()
            held.clear()
            del loss, y
            try:
                session.end()
            except BudgetError as error:
                told.append(error)
        return x.grad

    def work() -> None:
        with open_offloader(tmp_path, setup) as offloader:
            assert_identical(outcome(program, Session.of(offloader, setup)), outcome(program, Session()))
            assert offloader.stats.resident_peak_bytes > MIDDLE_BYTES
            assert told
            assert_released(offloader)

    within(TIMEOUT_S, work)


def test_the_drive_hangs_for_a_while(tmp_path: Path) -> None:
    """Pack waits under a budget until the drive answers again, and no longer."""
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    answers = threading.Event()

    def hang(_: int) -> None:
        assert answers.wait(TIMEOUT_S)

    expected = outcome(trains(3), Session())

    def work() -> None:
        with faulty(tmp_path, setup) as (offloader, backend):
            offloader.machine  # noqa: B018  the probe must not hang
            backend.fail_write = hang
            timer = threading.Timer(0.5, answers.set)
            timer.start()
            assert_identical(outcome(trains(3), Session.of(offloader, setup)), expected)
            timer.join()
            assert offloader.stats.stall_s > 0.3
            assert offloader.stats.resident_peak_bytes <= SMALLEST

    within(TIMEOUT_S, work)


def test_closed_by_another_thread_while_pack_waits(tmp_path: Path) -> None:
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    answers, waits = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        waits.set()
        assert answers.wait(TIMEOUT_S)

    def work() -> None:
        with faulty(tmp_path, setup) as (offloader, backend):
            offloader.machine  # noqa: B018
            backend.fail_write = hang
            ended: list[Any] = []
            training = threading.Thread(target=lambda: ended.append(outcome(trains(1), Session(offloader))))
            training.start()
            assert waits.wait(TIMEOUT_S)
            time.sleep(0.2)  # until pack has used up the budget
            assert training.is_alive()
            threading.Timer(0.2, answers.set).start()
            offloader.close()
            training.join(TIMEOUT_S)
            assert not training.is_alive()
            assert ended[0].type == OffloaderClosedError.__name__

    within(2 * TIMEOUT_S, work)


def test_without_a_budget_no_pack_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a drive that is too slow gets little to do, instead of making training crawl."""

    def refuse(*_: Any) -> None:
        raise AssertionError("pack waits for room")

    monkeypatch.setattr(Ledger, "admit", refuse)
    written: list[int] = []

    def look(step: int, session: Session) -> None:
        if session.offloader is not None:
            session.offloader.flush()
            written.append(session.offloader.stats.bytes_written)

    expected = outcome(trains(24), Session())
    with faulty(tmp_path, AUTO, delay_s=0.05) as (offloader, _):
        assert_identical(outcome(trains(24, look), Session.of(offloader, AUTO)), expected)
        saved = offloader.stats.bytes_saved
        assert_released(offloader)
    assert written[0] == 0, "the first pass is kept while memory permits"
    assert written[-1] - written[-7] <= saved / 24 * 6 / 4


# -- the numbers, and the host tier -----------------------------------------------------------------------------------


def test_numbers_are_those_of_the_run(tmp_path: Path) -> None:
    began_s, steps_s, peaks = [0.0], [], []

    def look(_: int, session: Session) -> None:
        if session.offloader is not None:
            steps_s.append(time.perf_counter() - began_s[0])
            peaks.append(session.offloader.stats.resident_peak_bytes)
            session.offloader.reset_peaks()
            began_s[0] = time.perf_counter()

    setup = Setup(activations="auto", activation_budget=MIDDLE_BYTES, drained=False, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        assert offloader.plan_report is None
        assert not any(key.startswith("plan/") for key in offloader.drain_metrics())
        began_s[0] = time.perf_counter()
        outcome(trains(12, look), Session.of(offloader, setup))
        report, metrics, trace = offloader.plan_report, offloader.drain_metrics(), offloader.trace
    assert report is not None
    assert trace is not None
    assert report.num_passes >= 1
    assert 0 < report.measured_step_s <= max(steps_s[1:])
    assert report.measured_peak_bytes in peaks
    assert report.measured_peak_bytes <= MIDDLE_BYTES
    assert report.predicted_peak_bytes <= MIDDLE_BYTES
    assert metrics["plan/num_plans"] == report.num_plans >= 1
    assert metrics["plan/predicted_step_s"] == report.predicted_step_s > 0
    assert metrics["plan/predicted_peak_gib"] == report.predicted_peak_bytes / 2**30
    assert metrics["plan/measured_peak_gib"] * 2**30 in peaks
    assert metrics["plan/measured_step_s"] > 0
    assert metrics["plan/predicted_stall_s"] >= 0


def test_the_host_tier_takes_what_the_drive_cannot(tmp_path: Path) -> None:
    """On CPU it saves nothing and is off, but can be asked for."""
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend, delay_s=0.3))
        return made[-1]

    def program(session: Session) -> Any:
        x, seen = floats(0, ROWS, WIDTH).requires_grad_(), []
        for _ in range(10):
            with session.saved():
                y = x * 1
                for _ in range(30):
                    y = y.sin()
                loss = y.square().sum()
            del y
            loss.backward()
            session.end()
            seen.append(loss.detach())
        return seen, x.grad

    policy = OffloadPolicy(activations="auto", min_tensor_bytes=0, activation_budget=SMALLEST)
    hardware = HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True, host_memory="8MiB")
    expected = outcome(program, Session())
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap) as offloader:
        machine = offloader.machine  # the probe of a drive that is slow
        assert machine is not None
        assert machine.ssd is not None
        assert machine.ssd.write_bytes_per_s < 100e6
        assert machine.host is not None
        assert offloader._parts.scheduler is not None
        # What the run shows is not what is tested here, nor what a busy machine's probe of its memory does.
        slow, fast = (TierRates(write_bytes_per_s=rate, read_bytes_per_s=rate) for rate in (1e5, 1e10))
        planned = Machine(ssd=slow, host=replace(fast, capacity_bytes=machine.host.capacity_bytes))
        offloader._parts.scheduler._measure = lambda: planned
        made[0].delay_s = 0.005
        assert_identical(outcome(program, Session(offloader, settled=True)), expected)
        assert_released(offloader)
        host = offloader._parts.tiers.host
        assert host is not None
        host.flush()
        assert host.used_bytes == 0  # type: ignore[attr-defined]
        assert offloader.stats.bytes_host > 0
        assert offloader.stats.resident_peak_bytes <= SMALLEST
        assert offloader.stats.failures == 0


# -- nothing is left --------------------------------------------------------------------------------------------------


@contextmanager
def planning_takes(seconds: float, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Plans take at least so long; the event tells that one has begun."""
    make_plan, begun = scheduler.make_plan, threading.Event()

    def slow(*args: Any) -> Any:
        begun.set()
        time.sleep(seconds)
        return make_plan(*args)

    monkeypatch.setattr(scheduler, "make_plan", slow)
    yield begun
    monkeypatch.undo()


def our_objects() -> Counter[str]:
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("lightning_ssd"))


@pytest.mark.parametrize("budget", [None, MIDDLE_BYTES], ids=["no budget", "budget"])
def test_fifty_steps_under_plans_leave_nothing(budget: int | None, tmp_path: Path) -> None:
    """Recorders, guides and passes go with their passes; of measurements the last 64 are held."""
    setup = Setup(activations="auto", activation_budget=budget, drained=False, settled=True)
    counted: list[Counter[str]] = []
    earlier = our_objects()  # what the traceback of a failed test may hold
    with open_offloader(tmp_path, setup) as offloader:
        session = Session.of(offloader, setup)
        model = make_model(2)
        session.register(model)
        for steps in (10, 50):
            for step in range(steps):
                with session.saved():
                    loss = loss_of(model, step)
                loss.backward()
                session.end()
                del loss
                model.zero_grad()
            assert_released(offloader)
            offloader.flush()
            offloader.drain_metrics()
            counted.append(our_objects())
    before, after = counted
    for name in ("Recorder", "Guide", "SavedPass", "SavedStorage", "FinishedPass", "Lease", "_Seen", "Transfer"):
        assert after[name] == before[name] == earlier[name], name
    # A new plan takes the place of the old one; the old one may still be the one that passes were compared with.
    for name in ("StoredPlan", "Plan", "Goal", "Prediction"):
        assert after[name] - earlier[name] <= 2, (name, after[name])
    assert after["Measured"] - earlier["Measured"] <= 64
    assert after["Trace"] - earlier["Trace"] <= 3
    bounded = {"StoredPlan", "Plan", "Goal", "Prediction", "Measured", "Trace", "TracedStorage", "TracedBlock"}
    bounded |= {"Machine", "TierRates"}
    assert {name: n for name, n in after.items() if name not in bounded} == {
        name: n for name, n in before.items() if name not in bounded
    }


def test_plans_of_many_signatures_are_bounded(tmp_path: Path) -> None:
    setup = Setup(activations="auto", drained=False, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        session = Session.of(offloader, setup)
        x = floats(0, 64, 64).requires_grad_()
        for number in range(150):
            with offloader.saved_tensors(signature=number):
                loss = x.sin().exp().sum()
            loss.backward()
            session.end()
        for number in range(30):  # without one: told apart by sizes
            with session.saved():
                loss = x[: number + 1].sin().exp().sum()
            loss.backward()
            session.end()
        made = offloader._parts.scheduler
        assert made is not None
        assert len(made._kinds) <= 64
        assert max(len(kind.plans) for kind in made._kinds.values()) <= 8
        assert made.num_plans >= 100


def test_closing_while_a_plan_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planning_takes(0.3, monkeypatch) as begun, open_offloader(tmp_path, PLANNING) as offloader:
        outcome(trains(1), Session(offloader))
        assert begun.wait(TIMEOUT_S)
        assert [t for t in threading.enumerate() if t.name.startswith("lightning_ssd-plan")]
    assert not [t for t in threading.enumerate() if t.name.startswith("lightning_ssd")]


def test_training_goes_on_while_a_plan_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planning_takes(1.0, monkeypatch) as begun, open_offloader(tmp_path, PLANNING) as offloader:
        assert_identical(outcome(trains(3), Session(offloader)), outcome(trains(3), Session()))
        assert begun.is_set()
        assert offloader.plan_report is None
        offloader.wait_for_plan()
        outcome(trains(2), Session(offloader))
        assert offloader.plan_report is not None


CHILD = """
import faulthandler, os, sys, time, torch
faulthandler.dump_traceback_later(60, exit=True)
import lightning_ssd as s
from lightning_ssd import scheduler
make_plan = scheduler.make_plan
def slow(*args):
    time.sleep(1)
    return make_plan(*args)
scheduler.make_plan = slow
torch.set_num_threads(1)
policy = s.OffloadPolicy(min_tensor_bytes=0, activation_budget={budget})
hardware = s.HardwareProfile(paths={directory!r}, allow_unsuitable_paths=True)
offloader = s.Offloader(policy=policy, hardware=hardware).open()
x = torch.randn(128, 128, requires_grad=True)
def step():
    with offloader.saved_tensors():
        loss = (x * 1).sin().exp().sin().exp().sin().exp().square().sum()
    loss.backward()
    offloader.end_backward()
for _ in range(3):
    step()
"""
FORK = """
pid = os.fork()
if pid == 0:
    try:
        step()
    except s.errors.OffloaderClosedError:
        offloader.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
offloader.wait_for_plan()
step()
offloader.close()
"""


@pytest.mark.parametrize(
    ("ending", "budget"),
    [("", None), ("raise SystemExit(0)", 300_000), (FORK, 300_000)],
    ids=["falls off", "exit under a budget", "fork under a budget"],
)
def test_interpreter_ends_while_a_plan_is_made(ending: str, budget: int | None, spill_dir: Path) -> None:
    code = CHILD.format(budget=budget, directory=str(spill_dir)) + ending
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    assert not [path for path in spill_dir.rglob("*") if path.is_file()]
