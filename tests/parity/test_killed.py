"""A process that is killed in the middle of a step leaves nothing on the drive, whose files have no names."""

import os
import signal
import subprocess

from tests.parity.models import causal_batch, gpt2, hugging_face_loss
from tests.support.everything_away import all_away, away_from_device
from tests.support.helpers import Session, Training, assert_identical

POINTS = {
    "everything": ("taking over", "forward", "backward", "update"),
    "device": ("backward", "between", "update"),
}


def entries(directory):
    return [path for path in directory.rglob("*") if not path.is_dir()]


def held(pid, directory):
    """Bytes that the open files of a process take in a directory; none of them may have a name."""
    taken = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if str(directory) in target:
            assert "(deleted)" in target, f"{target} has a name: it would stay after a kill"
            taken += os.stat(f"/proc/{pid}/fd/{name}").st_blocks * 512
    return taken


def kill(what, point, directory, forks):
    """Kill a training process at a point; return what its files took."""
    command = [*forks, "-m", "tests.parity.killed_script", what, point, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        line = child.stdout.readline().split()
        assert line[:1] == ["reached"], line
        taken = held(int(line[1]), directory)
        assert entries(directory) == []
        os.kill(int(line[1]), signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert entries(directory) == []
    return taken


def assert_trains(directory):
    """The next process that uses the directory finds nothing in its way."""
    training = Training(lambda: gpt2(hidden=160), causal_batch, hugging_face_loss, steps=2)
    expected = training(Session())
    for opens in (all_away, away_from_device):
        with opens(directory, activations="offload") as offloader:
            assert_identical(training(Session(offloader, drained=True)), expected)
    assert entries(directory) == []


def test_nothing_stays_after_kill_9(tmp_path, forks):
    for what, points in POINTS.items():
        for point in points:
            taken = kill(what, point, tmp_path, forks)
            assert taken > 1 << 20, f"{what}, {point}: more was expected"
    assert_trains(tmp_path)
