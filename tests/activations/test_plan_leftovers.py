"""Many steps under plans, and ends in the middle of one, leave nothing."""

import gc
import subprocess
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from lightning_ssd.planning.planner import make_plan
from tests.support.helpers import PLANNING, Session, Setup, assert_identical, assert_released, open_offloader, outcome
from tests.support.patience import PATIENCE_S
from tests.support.plan_trainings import MIDDLE_BYTES, loss_of, make_model, trains
from tests.support.stored_plans import plan_by

# -- nothing is left --------------------------------------------------------------------------------------------------


@contextmanager
def planning_takes(seconds, monkeypatch):
    begun = threading.Event()

    def slow(*args):
        begun.set()
        time.sleep(seconds)
        return make_plan(*args)

    plan_by(monkeypatch, slow)
    yield begun
    monkeypatch.undo()


def our_objects():
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("lightning_ssd"))


OF_PASSES = ("Recorder", "PlanCursor", "SavedPass", "SavedStorage", "FinishedPass", "Lease", "_Seen", "Transfer")


def objects_after_passes(earlier):
    """Count our objects once those of passes are as few as ``earlier``, or patience ends.

    A worker lets go of a read for a dead graph shortly after its place on the drive is free.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        counted = our_objects()
        if all(counted[name] == earlier[name] for name in OF_PASSES) or time.monotonic() > deadline_s:
            return counted
        time.sleep(0.001)


@pytest.mark.parametrize("budget", [None, MIDDLE_BYTES], ids=["no budget", "budget"])
def test_fifty_steps_under_plans_leave_nothing(budget, tmp_path):
    """Recorders, cursors and passes go with their passes; of measurements the last 64 are held."""
    setup = Setup(activations="auto", activation_budget=budget, drained=False, settled=True)
    counted = []
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
            counted.append(objects_after_passes(earlier))
    before, after = counted
    for name in OF_PASSES:
        assert after[name] == before[name] == earlier[name], name
    # A new plan takes the place of the old one; the old one may still be the one that passes were compared with.
    bounds = dict.fromkeys(("StoredPlan", "Plan", "PlanObjective", "Prediction"), 2)
    bounds |= {"Measured": 64, "Overhead": 64, "Trace": 3}
    for name, bound in bounds.items():
        assert after[name] - earlier[name] <= bound, (name, after[name])
    bounded = {*bounds, "TracedStorage", "TracedBlock", "Machine", "TierRates"}
    assert {name: n for name, n in after.items() if name not in bounded} == {
        name: n for name, n in before.items() if name not in bounded
    }


def test_closing_while_a_plan_is_made(tmp_path, monkeypatch):
    with planning_takes(0.3, monkeypatch) as begun, open_offloader(tmp_path, PLANNING) as offloader:
        outcome(trains(1), Session(offloader))
        assert begun.wait(PATIENCE_S)
        assert [t for t in threading.enumerate() if t.name.startswith("lightning_ssd-plan")]
    assert not [t for t in threading.enumerate() if t.name.startswith("lightning_ssd")]


def test_training_goes_on_while_a_plan_is_made(tmp_path, monkeypatch):
    with planning_takes(1.0, monkeypatch) as begun, open_offloader(tmp_path, PLANNING) as offloader:
        assert_identical(outcome(trains(3), Session(offloader)), outcome(trains(3), Session()))
        assert begun.is_set()
        assert offloader.plan_report is None
        offloader.wait_for_plan()
        for _ in range(2):  # the first plan was of a pass that warmed up
            outcome(trains(2), Session(offloader))
            offloader.wait_for_plan()
        assert offloader.plan_report is not None


CHILD = """
import faulthandler, os, sys, time, torch
faulthandler.dump_traceback_later(240, exit=True)
import lightning_ssd as s
from lightning_ssd.scheduling import plan_maker
make_plan = plan_maker.make_plan
def slow(*args):
    time.sleep(1)
    return make_plan(*args)
plan_maker.make_plan = slow
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
pid = os.fork()
if pid == 0:
    try:
        step()
    except s.errors.OffloaderClosedError as error:
        assert "open one after forking" in str(error)
        offloader.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
offloader.wait_for_plan()
step()
offloader.close()
"""


def test_a_fork_while_a_plan_is_made_is_told_so_and_the_parent_goes_on(spill_dir, forks):
    code = CHILD.format(budget=300_000, directory=str(spill_dir))
    child = subprocess.run([*forks, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    assert not [path for path in spill_dir.rglob("*") if path.is_file()]
