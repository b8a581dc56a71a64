"""Training under plans with a budget: never over it, never stuck."""

import re
import threading
import time
import warnings

import pytest

from lightning_ssd.activations.accounting import MemoryAccounting
from lightning_ssd.errors import BudgetError, OffloaderClosedError
from lightning_ssd.storage.spill_file import Arena
from lightning_ssd.tiers.copy_paths import HostMover
from tests.parity.models import floats
from tests.support.faults import always, eio, enospc
from tests.support.helpers import (
    AUTO,
    Raised,
    Session,
    Setup,
    assert_identical,
    assert_released,
    open_offloader,
    outcome,
    within,
)
from tests.support.named_budget import named_budget
from tests.support.patience import PATIENCE_S
from tests.support.plan_trainings import (
    LARGE,
    MIDDLE_BYTES,
    ROWS,
    SMALLEST,
    WIDTH,
    faulty,
    gradients,
    loss_of,
    make_model,
    num_writes,
    trains,
)

# -- never over the budget --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [SMALLEST, LARGE])
def test_each_step_stays_under_the_budget(budget, tmp_path):
    peaks = []

    def look(step, session):
        if session.offloader is not None:
            peaks.append(session.offloader.stats.resident_peak_bytes)
            session.offloader.reset_peaks()
            if step % 10 == 0:
                session.offloader.wait_for_plan()

    setup = Setup(activations="auto", activation_budget=budget, drained=False)
    expected = outcome(trains(40), Session())
    with open_offloader(tmp_path, setup) as offloader:
        assert_identical(outcome(trains(40, look), Session.of(offloader, setup)), expected)
        assert_released(offloader)
        assert num_writes(offloader) == 0
        assert offloader.stats.bytes_written > 0
    assert len(peaks) == 40
    assert max(peaks) <= budget, [(step, peak) for step, peak in enumerate(peaks) if peak > budget]


@pytest.mark.parametrize("delay_s", [0.0, 0.002], ids=["fast", "slow"])
def test_several_passes_share_the_budget(delay_s, tmp_path):
    """A plan is made for a pass alone; two and three at a time have to do with the same memory."""
    budget = MIDDLE_BYTES

    def program(session):
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


def one_tensor(steps):
    def program(session):
        x, found = floats(0, ROWS, WIDTH).requires_grad_(), []
        for step in range(steps):
            with session.saved():
                loss = (x * (1 + step)).sin().sum()
            loss.backward()
            session.end()
            found.append(x.grad)
            x.grad = None
        return found

    return program


@pytest.mark.parametrize("spare_bytes", [-1, 0, 1])
def test_a_budget_of_one_tensor(spare_bytes, tmp_path):
    """It is enough for a pass that saves one, to the byte."""
    nbytes = 4 * ROWS * WIDTH
    setup = Setup(activations="auto", activation_budget=nbytes + spare_bytes, drained=False, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        got = outcome(one_tensor(40), Session.of(offloader, setup))
        assert offloader.stats.resident_peak_bytes == nbytes
    if spare_bytes < 0:
        assert isinstance(got, Raised)
        assert named_budget(got.text) == nbytes
    else:
        assert_identical(got, outcome(one_tensor(40), Session()))


def test_an_impossible_budget_names_the_smallest_one_which_works(tmp_path):
    setup = Setup(activations="auto", activation_budget=100_000, drained=False, settled=True)
    with open_offloader(tmp_path, setup) as offloader:
        got = outcome(trains(3), Session.of(offloader, setup))
    assert isinstance(got, Raised)
    assert got.type == BudgetError.__name__
    assert "OffloadPolicy.activation_budget=100000 is too small" in got.text
    smallest = named_budget(got.text)
    assert 2 * ROWS * WIDTH * 4 <= smallest < 2_000_000
    works = Setup(activations="auto", activation_budget=smallest, drained=False, settled=True)
    with open_offloader(tmp_path, works) as offloader:
        assert_identical(outcome(trains(10), Session.of(offloader, works)), outcome(trains(10), Session()))
        assert offloader.stats.resident_peak_bytes <= smallest


def test_out_of_memory_while_a_limit_is_in_force(tmp_path, monkeypatch):
    """Every third allocation fails once: what was brought up early goes, and the read is tried again."""
    allocate, calls = HostMover.allocate, [0]

    def fails(self, *args):
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
def test_writes_fail_under_a_budget(error, tmp_path):
    """Nothing can make room: the tensors stay, with one warning, and the results are exact."""
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    expected = outcome(trains(6), Session())

    def work():
        with warnings.catch_warnings(record=True) as caught, faulty(tmp_path, setup) as (offloader, backend):
            warnings.simplefilter("always")
            offloader.machine  # noqa: B018  the probe of a drive that still works
            backend.fail_write = always(error)
            assert_identical(outcome(trains(6), Session.of(offloader, setup)), expected)
            assert_released(offloader)
            assert offloader.stats.failures > 0
            assert num_writes(offloader) == 0
        assert len([w for w in caught if "injected" in str(w.message)]) == 1

    within(PATIENCE_S, work)


def test_everything_is_held_by_the_user(tmp_path):
    """Moving frees nothing then: pack goes on when all has been written, and says so by going over the budget."""
    setup = Setup(activations="auto", activation_budget=MIDDLE_BYTES, drained=False, settled=True)

    told = []

    def program(session):
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

    def work():
        with open_offloader(tmp_path, setup) as offloader:
            assert_identical(outcome(program, Session.of(offloader, setup)), outcome(program, Session()))
            assert offloader.stats.resident_peak_bytes > MIDDLE_BYTES
            assert told
            assert_released(offloader)

    within(PATIENCE_S, work)


def test_the_drive_hangs_for_a_while(tmp_path):
    """Pack waits under a budget until the drive answers again, and no longer."""
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    answers = threading.Event()

    def hang(_):
        assert answers.wait(PATIENCE_S)

    expected = outcome(trains(3), Session())

    def work():
        with faulty(tmp_path, setup) as (offloader, backend):
            offloader.machine  # noqa: B018  the probe must not hang
            backend.fail_write = hang
            timer = threading.Timer(0.5, answers.set)
            timer.start()
            assert_identical(outcome(trains(3), Session.of(offloader, setup)), expected)
            timer.join()
            assert offloader.stats.stall_s > 0.3
            assert offloader.stats.resident_peak_bytes <= SMALLEST

    within(PATIENCE_S, work)


def test_closed_by_another_thread_while_pack_waits(tmp_path):
    setup = Setup(activations="auto", activation_budget=SMALLEST, drained=False)
    answers, waits = threading.Event(), threading.Event()

    def hang(_):
        waits.set()
        assert answers.wait(PATIENCE_S)

    def work():
        with faulty(tmp_path, setup) as (offloader, backend):
            offloader.machine  # noqa: B018
            backend.fail_write = hang
            ended = []
            training = threading.Thread(target=lambda: ended.append(outcome(trains(1), Session(offloader))))
            training.start()
            assert waits.wait(PATIENCE_S)
            time.sleep(0.2)  # until pack has used up the budget
            assert training.is_alive()
            threading.Timer(0.2, answers.set).start()
            offloader.close()
            training.join(PATIENCE_S)
            assert not training.is_alive()
            assert ended[0].type == OffloaderClosedError.__name__

    within(PATIENCE_S, work)


def test_without_a_budget_no_pack_waits(tmp_path, monkeypatch):
    """And a drive that is too slow gets little to do, instead of making training crawl."""

    def refuse(*_):
        raise AssertionError("pack waits for room")

    monkeypatch.setattr(MemoryAccounting, "admit", refuse)
    written = []

    def look(step, session):
        if session.offloader is not None:
            session.offloader.flush()
            written.append(session.offloader.stats.bytes_written)

    expected = outcome(trains(24), Session())
    with faulty(tmp_path, AUTO, delay_s=0.05) as (offloader, _):
        assert_identical(outcome(trains(24, look), Session.of(offloader, AUTO)), expected)
        saved = offloader.stats.bytes_saved
        assert_released(offloader)
    assert written[-1] - written[-7] <= saved / 24 * 6 / 4


@pytest.mark.parametrize("budget", [100_000, None])
def test_a_run_on_a_full_drive_says_why_nothing_moves_and_a_budget_blames_the_drive(budget, tmp_path, monkeypatch):
    setup = Setup(activations="auto", activation_budget=budget, max_slowdown=50.0, settled=True)
    monkeypatch.setattr(Arena, "_preallocate", lambda self, nbytes: False)
    with open_offloader(tmp_path, setup) as offloader:
        # Also of the writes of the first pass, which has no plan.
        with pytest.warns(UserWarning, match="failed|measured") as caught:
            got = outcome(trains(6), Session.of(offloader, setup))
        place = f"the directory {tmp_path} could not be measured "
        assert any(re.match(rf"{place}.*; nothing will be moved there\. Free space", str(w.message)) for w in caught)
        assert offloader.unusable is not None
        assert f"{place}(the file system of" in offloader.unusable
        assert offloader.stats.bytes_written == 0
    if budget is None:
        assert_identical(got, outcome(trains(6), Session()))
        return
    assert isinstance(got, Raised)
    assert got.type == BudgetError.__name__
    assert "OffloadPolicy.activation_budget=100000 is too small" in got.text
    assert re.search(
        rf"because no drive can be used: the directory {tmp_path} could not be measured \(the file system of "
        rf"{tmp_path} is full: [\d,]+ more bytes are needed, [\d,]+ are free, .*\)\. Without one the smallest "
        r"that works is .*\. Free space there, or name other directories in HardwareProfile\(paths=\.\.\.\); or raise",
        got.text,
    )
    assert got.text.count("Free space") == 1
