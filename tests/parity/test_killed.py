"""A process that is killed in the middle of a step leaves nothing on the drive: its files have no names."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

CHILD = """
import os, sys, torch
from pathlib import Path
from tests.support.helpers import open_offloader
from tests.parity.models import gpt2, causal_batch, hugging_face_loss
torch.manual_seed(0)
model = gpt2(layers=2)
with open_offloader(Path({directory!r})) as offloader:
    offloader.register_module(model)
    for step in range(1000):
        with offloader.saved_tensors():
            loss = hugging_face_loss(model, causal_batch(step))
            big = [torch.rand(1 << 20, requires_grad=True).sin().exp() for _ in range(8)]
        if step == 1:
            offloader.flush()
            print("mid step", offloader.stats.bytes_written, os.getpid(), flush=True)
            sys.stdin.read()
        (loss + sum(t.sum() for t in big)).backward()
        offloader.end_backward()
"""


def entries(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if not path.is_dir()]


def kill_in_mid_step(directory: Path, forks: list[str]) -> tuple[int, int]:
    """Kill a training process that has bytes on disk; returns these and what its open files took."""
    code = textwrap.dedent(CHILD).format(directory=str(directory))
    with subprocess.Popen([*forks, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline().split()
        assert line[:2] == ["mid", "step"], line
        taken, pid = 0, int(line[3])
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if str(directory) in target:
                assert "(deleted)" in target, f"{target} has a name: it would stay after a kill"
                taken += os.stat(f"/proc/{pid}/fd/{name}").st_blocks * 512
        assert entries(directory) == []
        os.kill(pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    return int(line[2]), taken


def test_nothing_stays_after_kill_9(tmp_path: Path, forks: list[str]) -> None:
    written, taken = kill_in_mid_step(tmp_path, forks)
    assert written > 32 << 20
    assert taken >= 32 << 20, "the spill file was expected to hold the written bytes"
    assert entries(tmp_path) == []


def test_file_system_is_as_empty_as_before_after_kill_9(small_disk: Callable[[int], Path], forks: list[str]) -> None:
    """The same on a file system that nobody else uses, by its own count of free blocks."""
    mount = small_disk(512)
    os.sync()
    free_before = os.statvfs(mount).f_bfree
    written, taken = kill_in_mid_step(mount, forks)
    os.sync()
    directory_block = 1  # our directory itself stays; it holds no data of a run
    assert os.statvfs(mount).f_bfree >= free_before - directory_block
    assert written > 32 << 20
    assert taken > 0
