"""Ctrl-C at any moment: obeyed soon, with nothing left, and training may go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(450)  # dozens of trainings in one child

_KINDS = ("offload", "budget", "states", "everything", "recompute", "plan")
_SOON_S = 20.0
"""5 on a machine that does nothing else."""


@pytest.fixture
def interrupted(spill_dir, forks):
    """Run the child, and give what it tells; a hang is a failure of the child's own watch."""

    def run(how, *options, timeout_s=400):
        command = [*forks, "-m", "tests.support.interrupt_script", how, str(spill_dir), *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr[-8000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["faults"] == [], "\n".join(found["faults"])
        assert found["obeyed"] == found["interrupted"]
        return found

    return run


def test_interrupts_at_random_moments_are_obeyed_and_leave_nothing(interrupted):
    assert interrupted("timer", "--num", 30, "--seed", 1)["interrupted"] == 30


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("seed", range(6))
def test_three_thousand_of_them(seed, interrupted):
    found = interrupted("timer", "--num", 500, "--seed", 100 + seed, timeout_s=3600)
    assert found["interrupted"] == 500


@pytest.mark.parametrize("kind", ["budget", "everything", "recompute"])
def test_interrupts_at_chosen_points(kind, interrupted):
    """One in sixty of the points at which Python looks for signals in our code."""
    assert interrupted("tracer", "--kinds", kind, "--share", 0, 60)["interrupted"] > 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("kind", _KINDS)
def test_interrupts_at_each_point(kind, interrupted):
    assert interrupted("tracer", "--kinds", kind, timeout_s=3600)["interrupted"] > 400


@pytest.mark.parametrize(("how", "more"), [("ddp", "states"), ("trainer", "everything"), ("fabric", "everything")])
def test_a_loop_of_lightning_ends_soon(how, more, spill_dir, forks):
    """The signal goes to all processes of the run, as from a terminal."""
    # Lightning kills the other process at once, which as a fork would hear of the signal a moment too late to clean up.
    begin = [sys.executable] if how == "ddp" else forks
    command = [*begin, "-m", "tests.support.interrupted_loops", how, str(spill_dir), more]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while "training" not in (line := run.stdout.readline()):
            assert line, run.communicate()[1][-4000:]
        sent_s = time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert time.monotonic() - sent_s < _SOON_S
    assert "Exception ignored" not in err
    if how != "ddp":  # where Lightning ends the other processes, and itself
        assert "interrupted []" in out, err[-4000:]
    # With DDP, Lightning kills the other process by SIGKILL as soon as the first one is interrupted: on a busy machine
    # before that one has removed its directory, in which there is nothing (spill files have no name).
    left = list(spill_dir.iterdir()) if how != "ddp" else [path for path in spill_dir.rglob("*") if path.is_file()]
    assert left == []


_CELLS = (
    """
from pathlib import Path
from tests.support.interrupt_script import *
trial = Trial(Path({directory!r}), "offload")
hardware = HardwareProfile(paths=[trial.directory], allow_unsuitable_paths=True, host_memory=0)
policy = OffloadPolicy(activations="offload", min_tensor_bytes=1024)
trial.offloader = Offloader(policy=policy, hardware=hardware).open(trial.model)
""",
    """
for step in range(10**9):
    gradients(trial.model, trial.offloader)
    if step == 5:
        print("training")
""",
    """
print(trial.go_on(), [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")])
""",
)


def test_a_cell_of_a_notebook_ends_soon_and_the_next_one_trains_on(spill_dir):
    jupyter = pytest.importorskip("jupyter_client.manager", reason="what notebooks need is not installed")
    kernel, client = jupyter.start_new_kernel(kernel_name="python3", cwd=str(Path(__file__).parent.parent))
    told = []
    sent_s = []

    def hook(message):
        told.append(str(message["content"].get("text", "")))
        if "training" in told[-1]:
            sent_s.append(time.monotonic())
            kernel.interrupt_kernel()

    try:
        setup, loop, ending = (
            client.execute_interactive(cell.format(directory=str(spill_dir)), timeout=120, output_hook=hook)["content"]
            for cell in _CELLS
        )
        assert setup["status"] == "ok", setup
        assert loop["ename"] == "KeyboardInterrupt"
        assert ending["status"] == "ok", ending
        assert "None []" in "".join(told)
        assert list(spill_dir.iterdir()) == []
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
