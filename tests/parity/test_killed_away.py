"""A process that is killed while weights, gradients and states are in files: nothing stays, and the next one trains."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parameters.test_device_gradients import policy as device_policy
from tests.parameters.test_everything_away import Loop
from tests.parameters.test_paged_weights import same
from tests.parity.models import causal_batch, gpt2, hugging_face_loss
from tests.parity.test_killed import entries
from tests.support.everything_away import all_away, train
from tests.support.helpers import assert_identical
from tests.support.late_offloaders import late_offloaders

WINDOWS = ("taking over", "forward", "backward", "update")
CHILD = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from lightning_ssd.planning import update_memory
from lightning_ssd.parameters.files import weight_files
from tests.parity.models import causal_batch, gpt2, hugging_face_loss
from tests.support.everything_away import all_away, train
window, directory = {window!r}, {directory!r}
update_memory._MIN_SUBGROUP_BYTES = 64 << 10
counts = dict.fromkeys(("taking over", "forward", "backward", "update"), 0)

def reached(what, number):
    counts[what] += 1
    if what == window and counts[what] == number:
        print("reached", os.getpid(), flush=True)
        sys.stdin.read()

write = weight_files.WeightFiles.write
def writes(self, *arguments, **named):
    reached("taking over", 5)
    return write(self, *arguments, **named)
weight_files.WeightFiles.write = writes

def model():
    made = gpt2(layers=2)
    made.transformer.h[1].mlp.c_fc.register_forward_hook(lambda *_: reached("forward", 2))
    made.transformer.h[1].mlp.c_fc.weight.register_hook(lambda _: reached("backward", 2))
    return made

class Stops(torch.optim.AdamW):
    def step(self, closure=None):
        if any(p.numel() > 5**4 for group in self.param_groups for p in group["params"]):  # no small copies
            reached("update", 6)  # each subgroup is a step of its own
        return super().step(closure)

from tests.support import everything_away
everything_away.OPTIMIZERS["adamw"] = lambda parameters: Stops(parameters, lr=1e-3)
if window == "any":
    print("reached", os.getpid(), flush=True)
with all_away(Path(directory), activations="offload", per_parameter_optimizers="Stops") as offloader:
    train(model, causal_batch, hugging_face_loss, offloader, steps=1000)
"""

DEVICE_WINDOWS = ("backward", "between", "update")
DEVICE_CHILD = """
import os, sys
from pathlib import Path
import torch
from lightning_ssd.planning import update_memory
from tests.parameters.test_device_gradients import policy
from tests.parameters.test_everything_away import Loop
from tests.support.late_offloaders import late_offloaders
window, directory = {window!r}, {directory!r}
update_memory._MIN_SUBGROUP_BYTES = 1 << 17
counts = dict.fromkeys(("backward", "between", "update"), 0)

def reached(what, number):
    counts[what] += 1
    if what == window and counts[what] == number:
        print("reached", os.getpid(), flush=True)
        sys.stdin.read()

class Stops(torch.optim.AdamW):
    def step(self, closure=None):
        if any(p.numel() > 5**4 for group in self.param_groups for p in group["params"]):
            reached("update", 6)
        return super().step(closure)

if window == "any":
    print("reached", os.getpid(), flush=True)
with late_offloaders(Path(directory), policy) as make:
    offloader = make(parameters="offload", per_parameter_optimizers="Stops")
    loop = Loop(offloader, make=Stops, accumulate=2, before_step=lambda *_: reached("between", 2))
    list(loop.model.parameters())[0].register_hook(lambda _: reached("backward", 3))
    loop.run(1000)
"""


def held(pid: int, directory: Path) -> int:
    """Bytes that the open files of a process take in a directory; none of them may have a name."""
    taken = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if str(directory) in target:
            assert "(deleted)" in target, f"{target} has a name: it would stay after a kill"
            taken += os.stat(f"/proc/{pid}/fd/{name}").st_blocks * 512
    return taken


def kill(window: str, directory: Path, forks: list[str], delay_s: float = 0.0, child_code: str = CHILD) -> int:
    """Kill a training process in a window, or so long after its beginning; returns what its files took."""
    code = textwrap.dedent(child_code).format(window=window, directory=str(directory))
    with subprocess.Popen([*forks, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline().split()
        assert line[:1] == ["reached"], line
        time.sleep(delay_s)
        taken = held(int(line[1]), directory) if window != "any" else 0
        assert entries(directory) == []
        os.kill(int(line[1]), signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert entries(directory) == []
    return taken


def assert_trains(directory: Path) -> None:
    """The next process that uses the directory finds nothing in its way."""
    steps = (lambda: gpt2(layers=2)), causal_batch, hugging_face_loss
    with all_away(directory, activations="offload") as offloader:
        got = train(*steps, offloader, steps=2).result()
    assert_identical(got, train(*steps, steps=2).result())
    assert entries(directory) == []


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_stays_after_kill_9(window: str, tmp_path: Path, forks: list[str]) -> None:
    assert kill(window, tmp_path, forks) > 1 << 20, "weights were expected in the files"
    assert_trains(tmp_path)


@pytest.mark.parametrize("window", DEVICE_WINDOWS)
def test_nothing_of_a_device_stays_after_kill_9(window: str, tmp_path: Path, forks: list[str]) -> None:
    """Weights, gradients and states of a device whose copies end late."""
    assert kill(window, tmp_path, forks, child_code=DEVICE_CHILD) > 1 << 20, "gradients were expected in the files"
    with late_offloaders(tmp_path, device_policy) as make:
        got = Loop(make(parameters="offload"), accumulate=2).run(2).result()
    assert same(got, Loop(accumulate=2).run(2).result())
    assert entries(tmp_path) == []


def test_file_system_is_as_empty_as_before_after_kill_9(small_disk: Callable[[int], Path], forks: list[str]) -> None:
    """The same on a file system that nobody else uses, by its own count of free blocks."""
    mount = small_disk(512)
    os.sync()
    free_before = os.statvfs(mount).f_bfree
    assert kill("update", mount, forks) > 8 << 20
    os.sync()
    directory_block = 1
    assert os.statvfs(mount).f_bfree >= free_before - directory_block
    assert_trains(mount)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_at_random_moments(tmp_path: Path, forks: list[str]) -> None:
    draw = random.Random(3)
    for child_code in (CHILD, DEVICE_CHILD):
        for _ in range(60):
            kill("any", tmp_path, forks, draw.uniform(0, 1.5), child_code)
    assert_trains(tmp_path)
