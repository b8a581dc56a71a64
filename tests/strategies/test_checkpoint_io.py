"""Checkpoints that are streamed: Lightning's own files, whole or not at all, without a copy in memory."""

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.memory.malloc import trim
from lightning_ssd.strategies import checkpoint_io
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from tests.support.helpers import assert_identical
from tests.support.interrupted_points import PointsIn

MIB = 1 << 20


def checkpoint():
    shared = torch.arange(5000.0)
    return {
        "state_dict": {"weight": torch.rand(300, 40), "half": torch.rand(7).bfloat16(), "empty": torch.empty(0, 3)},
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(3.0), "exp_avg": shared}}, "param_groups": [{"lr": 0.1}]}
        ],
        "views": [shared[10:20], shared.view(50, 100).t()],
        "epoch": 3,
        "text": "ä",
    }


@pytest.mark.parametrize("reader", [TorchCheckpointIO, StreamedCheckpointIO])
@pytest.mark.parametrize("writer", [TorchCheckpointIO, StreamedCheckpointIO])
def test_each_reads_what_the_other_wrote(writer, reader, tmp_path):
    path = tmp_path / "new" / "last.ckpt"
    saved = checkpoint()
    writer().save_checkpoint(saved, path)
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert_identical(reader().load_checkpoint(path, weights_only=True), saved)
    assert_identical(torch.load(path), saved)


def test_what_is_loaded_may_be_changed_and_the_file_stays(tmp_path):
    path, streamed = tmp_path / "last.ckpt", StreamedCheckpointIO()
    saved = checkpoint()
    streamed.save_checkpoint(saved, path)
    before = path.read_bytes()
    loaded = streamed.load_checkpoint(path)
    loaded["state_dict"]["weight"].zero_()
    assert path.read_bytes() == before
    streamed.save_checkpoint({"other": torch.rand(40, 50)}, path)
    assert_identical(loaded["optimizer_states"], saved["optimizer_states"])
    assert streamed.load_checkpoint(path)["other"].device.type == "cpu"
    assert streamed.load_checkpoint(path, map_location="meta")["other"].device.type == "meta"


@pytest.mark.parametrize("form", [str, lambda path: f"file://{path}", lambda path: os.path.relpath(path)])
def test_every_name_of_a_local_file(form, tmp_path):
    path, streamed = tmp_path / "below" / "last.ckpt", StreamedCheckpointIO()
    streamed.save_checkpoint({"a": torch.ones(3)}, form(path))
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert_identical(streamed.load_checkpoint(form(path))["a"], torch.ones(3))
    streamed.remove_checkpoint(form(path))
    assert os.listdir(path.parent) == []


# -- whole or not at all -----------------------------------------------------------------------------------------------


class Unpicklable:
    def __reduce__(self):
        raise ZeroDivisionError("sabotage")


@pytest.mark.parametrize("there", [True, False])
def test_a_save_that_fails_leaves_what_was_there(there, tmp_path):
    path, streamed = tmp_path / "last.ckpt", StreamedCheckpointIO()
    if there:
        streamed.save_checkpoint({"a": torch.ones(3)}, path)
    with pytest.raises(ZeroDivisionError, match="sabotage"):
        streamed.save_checkpoint({"a": torch.zeros(50_000), "b": Unpicklable()}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"] * there
    assert not there or torch.equal(torch.load(path)["a"], torch.ones(3))


def test_an_interrupt_before_the_first_record_does_not_end_the_process(tmp_path, forks):
    """Found by SIGINT at random moments. The writer outlives the file, and PyTorch then ends the archive in C++."""
    path = tmp_path / "last.ckpt"
    script = """
import sys, torch
from torch.serialization import _open_zipfile_writer_buffer as writer
from lightning_ssd.strategies import checkpoint_io
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO

def interrupted(self, buffer, made=writer.__init__):
    made(self, buffer)
    raise KeyboardInterrupt

writer.__init__ = interrupted
try:
    StreamedCheckpointIO().save_checkpoint({"a": torch.ones(4)}, sys.argv[1])
except KeyboardInterrupt:
    print("obeyed")
print("alive")
"""
    done = subprocess.run([*forks, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["obeyed", "alive"]), done.stderr
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "replace", "fchmod"])
def test_a_full_drive_leaves_the_old_file(call, tmp_path, monkeypatch):
    path, streamed = tmp_path / "last.ckpt", StreamedCheckpointIO()
    streamed.save_checkpoint({"a": torch.ones(3)}, path)

    calls = []

    def noted(name, real):
        def note(*arguments):
            calls.append(name)
            if name == call:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        return note

    with monkeypatch.context() as patched:
        for name in ("fsync", "replace", "fchmod"):
            patched.setattr(os, name, noted(name, getattr(os, name)))
        with pytest.raises(OSError, match="No space left"):
            streamed.save_checkpoint({"a": torch.zeros(3)}, path)
    assert "replace" not in calls or "fsync" in calls[: calls.index("replace")], "a crash may leave half of a file"
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert torch.equal(torch.load(path)["a"], torch.ones(3))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_permissions_are_as_the_umask_says(mask, mode, tmp_path):
    before = os.umask(mask)
    try:
        StreamedCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "last.ckpt")
        now = os.umask(mask)
    finally:
        os.umask(before)
    assert now == mask
    assert stat.S_IMODE((tmp_path / "last.ckpt").stat().st_mode) == mode


# -- Lightning's way ---------------------------------------------------------------------------------------------------


def test_what_goes_elsewhere_goes_lightnings_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    streamed, saved, url = StreamedCheckpointIO(), checkpoint(), "memory://below/last.ckpt"
    streamed.save_checkpoint(saved, url)
    assert_identical(streamed.load_checkpoint(url, weights_only=True), saved)
    assert_identical(TorchCheckpointIO().load_checkpoint(url, weights_only=True), saved)
    streamed.remove_checkpoint(url)
    assert os.listdir(tmp_path) == []


def test_files_of_the_old_format_are_read(tmp_path):
    saved = checkpoint()
    torch.save(saved, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert_identical(StreamedCheckpointIO().load_checkpoint(tmp_path / "old.ckpt"), saved)


def test_mistakes_get_lightnings_messages(tmp_path):
    streamed = StreamedCheckpointIO()
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*nowhere\.ckpt"):
        streamed.load_checkpoint(tmp_path / "nowhere.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        streamed.save_checkpoint({"a": 1}, tmp_path / "last.ckpt", storage_options={})
    assert os.listdir(tmp_path) == []


# -- memory ------------------------------------------------------------------------------------------------------------


def anonymous_bytes():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("RssAnon:")))


def extra_bytes(work):
    """By how much anonymous memory grows at most while something runs, and what it gives."""
    trim()  # what other tests have left resident in malloc's holes would be used without any growth
    begin, stop = anonymous_bytes(), threading.Event()
    peaks = [begin]

    def watch():
        while not stop.wait(0.002):
            peaks.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = work()
        peaks.append(anonymous_bytes())
    finally:
        stop.set()
        thread.join()
    return max(peaks) - begin, result


@pytest.fixture
def states(spill_dir):
    """100 MB of states that are on the drive alone."""
    parameters = [torch.nn.Parameter(torch.rand(1_250_000)) for _ in range(10)]
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
    policy = OffloadPolicy(activations="keep", optimizer_states="offload")
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[spill_dir / "spill"])).open() as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.Adam(parameters))
        optimizer.step()
        found = optimizer.state_dict()
        assert sum(value.nbytes for state in found["state"].values() for value in state.values()) > 100_000_000
        yield {"optimizer_states": [found]}


def test_states_on_ssd_do_not_pass_through_memory(states, spill_dir):
    streamed, path = StreamedCheckpointIO(), spill_dir / "last.ckpt"
    extra, _ = extra_bytes(lambda: streamed.save_checkpoint(states, path))
    assert extra < 40 * MIB
    extra, loaded = extra_bytes(lambda: streamed.load_checkpoint(path, weights_only=True))
    assert extra < 40 * MIB
    assert_identical(loaded, states)


def test_the_measurement_sees_lightnings_copy(states, spill_dir):
    extra, _ = extra_bytes(lambda: TorchCheckpointIO().save_checkpoint(states, spill_dir / "last.ckpt"))
    assert extra > 75 * MIB


def test_an_interrupt_leaves_the_mask_of_new_files():
    points, before = PointsIn("strategies/checkpoint_io.py"), checkpoint_io._umask()
    while (where := points.interrupt(checkpoint_io._umask)) is not None:
        assert checkpoint_io._umask() == before, where
    assert len(points.seen) > 1
