"""Training under plans: exact while plans come, change and are departed from; its numbers are those of the run."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ssd.planning import bandwidth
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.scheduling.scheduler import Scheduler
from tests.activations.test_where_bytes_are import parts_of
from tests.parity.models import floats
from tests.support.faults import FaultyBackend
from tests.support.helpers import (
    AUTO,
    PLANNED,
    PLANNING,
    Session,
    Setup,
    assert_identical,
    assert_released,
    assert_same,
    open_offloader,
    outcome,
)
from tests.support.opened import offloader_in
from tests.support.plan_trainings import (
    BLOCKS,
    MIDDLE_BYTES,
    ROWS,
    SMALLEST,
    WIDTH,
    faulty,
    gradients,
    loss_of,
    make_model,
    trains,
)
from tests.support.sines import gradient_of_sines, sines

SETUPS = (PLANNED, PLANNING, AUTO, Setup(activations="auto", activation_budget=MIDDLE_BYTES, drained=False))
IDS = ["planned", "planning", "auto", "budget"]


# -- exact ------------------------------------------------------------------------------------------------------------


def test_the_drive_changes_in_mid_run(tmp_path, monkeypatch):
    """Fast, slow until a plan has been made anew, fast again: every step is exact.

    The new plan is always put in force: whether it is predicted to be better depends on how busy the machine is.
    """
    num_fast, most = 8, 100
    num_steps, num_before = most, 0

    def drive_changes(step, session):
        """Return whether that was the last step."""
        nonlocal num_steps, num_before
        report = session.offloader.plan_report
        num_plans = 0 if report is None else report.num_plans
        if step < num_fast:
            num_before = num_plans
        is_slow = step >= num_fast and num_plans == num_before
        backend.delay_s = 0.03 if is_slow else 0.0
        if step >= num_fast and not is_slow and num_steps == most:
            num_steps = step + num_fast
        return step + 1 >= num_steps

    monkeypatch.setattr(bandwidth, "MIN_SAMPLE_BYTES", 1 << 20)  # so little moves here
    monkeypatch.setattr(Scheduler, "_better", staticmethod(lambda old, new, *_, **__: new))
    setup = Setup(activations="auto", max_slowdown=1.5, settled=True)
    with faulty(tmp_path, setup) as (offloader, backend):
        offloaded = outcome(trains(most, drive_changes), Session.of(offloader, setup))
        assert_released(offloader)
        assert offloader.stats.bytes_written > 0
    assert num_before >= 1
    assert num_steps < most, f"no plan was made anew in {most} steps"
    assert_identical(offloaded, outcome(trains(num_steps), Session()))


def steps(num, step_of, make=make_model, *, num_added=1):
    def program(session):
        model, seen = make(), []
        session.register(model)
        for step in range(num):
            seen.append([step_of(session, model, step), gradients(model)])
            if step % num_added == num_added - 1:
                model.zero_grad()
        return seen

    return program


def trained(session, loss):
    session.drain()
    loss.backward()
    session.end()
    return loss.detach()


def alternating(session, model, step, *, named=False):
    """Bucketed lengths and a last, small batch, told apart by their signature or by what they save."""
    rows = (ROWS, ROWS // 2, 3)[step % 3 if step % 6 else 2]
    saved = session.saved()
    if session.offloader is not None and named:
        saved = session.offloader.saved_tensors(signature=("rows", rows))
    with saved:
        loss = loss_of(model, step, rows)
    return trained(session, loss)


def two_networks():
    return nn.ModuleList([make_model(2), make_model(3, 24), nn.Linear(WIDTH, 24)])


def in_turns(session, networks, step):
    """As in adversarial training: two kinds of passes, the first pass still alive while the second one runs."""
    one, two, shrink = networks
    with session.saved():
        made = one(floats(step, ROWS, WIDTH))
        judged = two(shrink(made.detach())).square().mean()
    trained(session, judged)
    torch.optim.SGD(two.parameters(), lr=0.1).step()
    with session.saved():
        fooled = two(shrink(made)).square().mean()
    trained(session, fooled)
    torch.optim.SGD(one.parameters(), lr=0.1).step()


def every_use(session, model, step):
    """Accumulation, a retained graph, double backward, in one training and in changing order."""
    x = floats(step, ROWS, WIDTH).requires_grad_()
    with session.saved():
        loss = model(x).square().mean()
    session.drain()
    if step % 4 == 1:
        loss.backward(retain_graph=True)
    if step % 4 == 3:
        with session.saved():
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
    else:
        loss.backward()
    session.end()
    return [loss.detach(), x.grad]


class Boom(Exception):
    pass


def fails(*_):
    raise Boom


def failing(session, model, step):
    """A forward and a backward that fail half way; the steps after them are exact, and plans go on being made."""
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
    except Boom:
        model.zero_grad()
        loss = None
    session.end()
    return None if loss is None else loss.detach()


def departing(session, model, step):
    """Control flow that hangs on data: shorter, longer and other passes than the plan was made for."""
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
    return trained(session, loss)


PROGRAMS = {
    "shapes alternate, named": steps(18, partial(alternating, named=True)),
    "shapes alternate": steps(18, alternating),
    "two networks in turns": steps(10, in_turns, two_networks),
    "graphs are used in every way": steps(12, every_use, partial(make_model, 3), num_added=2),
    "errors in mid step": steps(15, failing),
    "passes depart from their plan": steps(16, departing),
}
# What both graphs of a double backward save counts twice, hence the larger budget.
TWICE = Setup(activations="auto", activation_budget=2_000_000, drained=False)


def cases():
    """Half of the programs run by default under one of the two setups without a limit, the others under the other."""
    for number, name in enumerate(PROGRAMS):
        for kind, setup in zip(IDS, SETUPS, strict=True):
            chosen = TWICE if (name, kind) == ("graphs are used in every way", "budget") else setup
            marks = pytest.mark.exhaustive if kind == ("planning", "auto")[number % 2] else ()
            yield pytest.param(PROGRAMS[name], chosen, marks=marks, id=f"{name}, {kind}")


@pytest.mark.parametrize(("program", "setup"), list(cases()))
def test_it_is_exact_under_plans(program, setup, tmp_path):
    assert_same(program, tmp_path, setups=[setup], moves=False)


def test_a_trace_that_is_asked_for_between_two_forwards_of_a_pass_waits(tmp_path):
    """What the first forward saves is part of every trace, and of every plan."""

    def program(session):
        model, seen = make_model(2), []
        session.register(model)
        for step in range(6):
            saved = session.saved()
            with saved:
                one = loss_of(model, step)
            if session.offloader is not None and (scheduler := session.offloader._parts.scheduler) is not None:
                (kind,) = scheduler._kinds.values()
                kind.ask_for_trace()
            with saved:
                two = loss_of(model, step + 50)
            (one + two).backward()
            session.end()
            seen.append(gradients(model))
            model.zero_grad()
            del one, two
        return seen

    with open_offloader(tmp_path, PLANNED) as offloader:
        assert_identical(outcome(program, Session.of(offloader, PLANNED)), outcome(program, Session()))
        assert_released(offloader)
        report = offloader.plan_report
        assert report is not None, "plans are of both forwards"
        assert report.num_passes >= 1


def test_memory_falls_from_the_first_pass_on(tmp_path):
    """Without a plan whatever is large enough moves."""
    x, length = floats(0, ROWS, WIDTH).requires_grad_(), 10
    with open_offloader(tmp_path, AUTO) as offloader:
        with offloader.saved_tensors():
            loss = sines(x, length, offloader.flush).sum()
        assert offloader.stats.saved_peak_bytes == length * 4 * ROWS * WIDTH
        assert offloader.stats.resident_peak_bytes <= 2 * 4 * ROWS * WIDTH
        loss.backward()
        offloader.end_backward()
    assert_identical(x.grad, gradient_of_sines(x, length))


# -- the numbers, and the host tier -----------------------------------------------------------------------------------


def test_numbers_are_those_of_the_run(tmp_path):
    began_s, steps_s, peaks = [0.0], [], []

    def look(_, session):
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


def test_the_host_tier_takes_what_the_drive_cannot_and_is_told_apart(tmp_path):
    """On CPU it saves nothing and is off, but can be asked for."""
    made, rows = [], []

    def wrap(backend):
        made.append(FaultyBackend(backend, delay_s=0.3))
        return made[-1]

    def program(session):
        x, seen = floats(0, ROWS, WIDTH).requires_grad_(), []
        for _ in range(10):
            with session.saved():
                loss = sines(x, 30).square().sum()
            loss.backward()
            session.end()
            seen.append(loss.detach())
            if session.offloader is not None:
                rows.append(session.offloader.drain_metrics())
        return seen, x.grad

    expected = outcome(program, Session())
    settings = {"min_tensor_bytes": 0, "activation_budget": SMALLEST, "host_memory": "8MiB"}
    with offloader_in(tmp_path, **settings, _wrap_backend=wrap) as offloader:
        machine = offloader.machine  # the probe of a drive that is slow
        assert machine.ssd.write_bytes_per_s < 100e6
        # What the run shows is not what is tested here, nor what a busy machine's probe of its memory does.
        slow, fast = (TierRates(write_bytes_per_s=rate, read_bytes_per_s=rate) for rate in (1e5, 1e10))
        planned = Machine(ssd=slow, host=replace(fast, capacity_bytes=machine.host.capacity_bytes))
        offloader._parts.scheduler._measure = lambda: planned
        made[0].delay_s = 0.005
        assert_identical(outcome(program, Session(offloader, settled=True)), expected)
        assert_released(offloader)
        host = offloader._parts.tiers.host
        host.flush()
        assert host.used_bytes == 0
        assert 0 < rows[-1]["memory/host_tier_gib"] <= 8 / 1024
        stats = offloader.stats
    assert stats.bytes_host > 0
    assert stats.resident_peak_bytes <= SMALLEST
    assert stats.failures == 0
    parts = [parts_of(row)[:3] for row in rows]  # kept, in host memory, on the drive
    assert all(sum(places) == stats.saved_peak_bytes and min(places) >= 0 for places in parts)
    assert parts[-1][1] > 0
