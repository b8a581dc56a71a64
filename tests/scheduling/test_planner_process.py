"""Plans are made in a process of their own: the same plans, the same refusals, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ssd.planning.plan import Machine, PlanObjective
from lightning_ssd.planning.planner import BudgetTooSmall, make_plan
from lightning_ssd.scheduling import plan_maker, planner_process
from lightning_ssd.scheduling.pass_kind import TracedPass
from lightning_ssd.scheduling.plan_maker import PlanMaker
from lightning_ssd.scheduling.planner_process import make_plan_apart
from tests.support.host_traffic import wait_until
from tests.support.patience import PATIENCE_S
from tests.support.traces import network, rates

MACHINE = Machine(ssd=rates(2_000.0))
TRACE = network(8, 5)
GOAL = PlanObjective(max_slowdown=1.05)


def begin(maker, trace=TRACE, goal=GOAL):
    sizes = tuple(storage.nbytes for storage in trace.storages)
    return maker.begin(TracedPass(sizes, trace, 0, 0), goal, MACHINE)


def here(*arguments):
    raise AssertionError("planned in the training process")


@pytest.mark.parametrize("goal", [GOAL, PlanObjective(budget_bytes=2_000), PlanObjective(recompute=True)])
def test_a_process_makes_the_plan_that_we_would_make(goal, monkeypatch):
    expected = make_plan(TRACE, MACHINE, goal)
    monkeypatch.setattr(plan_maker, "make_plan", here)
    maker = PlanMaker(max_tasks=4)
    assert begin(maker, goal=goal).task.result() == expected
    maker.close()


def test_few_storages_need_no_process(monkeypatch):
    monkeypatch.setattr(plan_maker, "make_plan_apart", here)
    maker = PlanMaker(max_tasks=4)
    trace = network(2, 5)
    assert begin(maker, trace).task.result() == make_plan(trace, MACHINE, GOAL)
    with pytest.raises(AssertionError, match="in the training process"):
        begin(maker, trace, PlanObjective(recompute=True)).task.result()
    maker.close()


def test_a_budget_that_is_too_small_is_told_as_ever():
    with pytest.raises(BudgetTooSmall) as expected:
        make_plan(TRACE, MACHINE, PlanObjective(budget_bytes=1))
    with pytest.raises(BudgetTooSmall) as told:
        make_plan_apart(TRACE, MACHINE, PlanObjective(budget_bytes=1))
    assert str(told.value) == str(expected.value)
    assert told.value.smallest_bytes == expected.value.smallest_bytes


def test_it_loads_no_pytorch_and_asks_no_environment(monkeypatch, tmp_path):
    (tmp_path / "pickle.py").write_text("raise SystemExit('a file of the user was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert make_plan_apart(TRACE, MACHINE, GOAL) == make_plan(TRACE, MACHINE, GOAL)
    command = [sys.executable, "-X", "importtime", "-I", "-S", planner_process.__file__]
    child = subprocess.run(command, input=b"", capture_output=True, timeout=PATIENCE_S, check=False)
    assert b"lightning_ssd.planning.planner" in child.stderr
    assert b"torch" not in child.stderr


def test_a_process_that_ends_is_made_good_in_the_thread(monkeypatch, caplog):
    dump = planner_process.pickle.dump

    def dump_to_the_dead(content, file):
        dump(("not", "a", "trace"), file)

    monkeypatch.setattr(planner_process.pickle, "dump", dump_to_the_dead)
    maker = PlanMaker(max_tasks=4)
    with caplog.at_level("INFO"):
        assert begin(maker).task.result() == make_plan(TRACE, MACHINE, GOAL)
    assert "because no process does it: the planner's process has ended without a plan" in caplog.text
    maker.close()


@pytest.mark.parametrize("name", ["executable", "frozen"])
def test_a_program_without_an_interpreter_plans_in_the_thread(name, monkeypatch):
    monkeypatch.setattr(sys, name, None if name == "executable" else True, raising=False)
    maker = PlanMaker(max_tasks=4)
    assert begin(maker).task.result() == make_plan(TRACE, MACHINE, GOAL)
    maker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_it_ends_with_its_parent_whatever_kills_that():
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "import subprocess\n"
        "from lightning_ssd.scheduling import planner_process\n"
        "class Told(subprocess.Popen):\n"
        "    def __enter__(self): print(self.pid, flush=True); time.sleep(600)\n"
        "subprocess.Popen = Told\n"
        "planner_process.make_plan_apart(None, None, None)"
    )
    root = str(Path(planner_process.__file__).parents[2])
    parent = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    deadline_s = time.monotonic() + PATIENCE_S
    num_asleep = 0
    while num_asleep < 5:  # it waits for its input, which it does last
        num_asleep = num_asleep + 1 if _state(pid) == "S" else 0
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.kill(pid, signal.SIGSTOP)  # so that the end of its input does not end it
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: _state(pid) in ("Z", None))


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
