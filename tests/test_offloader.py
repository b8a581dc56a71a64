"""The plain-PyTorch API: opening, closing, directories, numbers."""

import errno
import os
import re
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError, OffloaderClosedError, UnsuitablePathError
from tests.support.offloader_steps import OFFLOAD_ALL, step
from tests.support.processes import run_python


def our_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]


def test_nothing_is_opened_before_open(spill_dir):
    offloader = Offloader(hardware=HardwareProfile(paths=spill_dir / "new"))
    assert not offloader.is_open
    assert not our_threads()
    assert not (spill_dir / "new").exists()
    with pytest.raises(OffloaderClosedError, match="call open"):
        offloader.saved_tensors()


def test_open_and_close_leave_nothing(spill_dir):
    fds = len(os.listdir("/proc/self/fd"))
    offloader = Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=spill_dir))
    for _ in range(3):
        with offloader:
            step(offloader)
            assert offloader.stats.bytes_read > 0
        offloader.close()
        assert not our_threads()
        assert len(os.listdir("/proc/self/fd")) == fds
        assert not list(spill_dir.iterdir())


def test_stats_survive_close_and_begin_anew_with_open(spill_dir):
    offloader = Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=spill_dir))
    with offloader:
        step(offloader)
    assert offloader.stats.bytes_written > 0
    with offloader:
        assert offloader.stats.bytes_written == 0


def test_directories_by_precedence(spill_dir, monkeypatch):
    by_variable, by_profile, by_default = spill_dir / "v", spill_dir / "p", spill_dir / "d"

    def used(**kwargs):
        with Offloader(policy=OFFLOAD_ALL, **kwargs) as offloader:
            return offloader.description

    monkeypatch.delenv("LIGHTNING_SSD_PATHS", raising=False)
    assert str(by_default) in used(default_directory=by_default)
    monkeypatch.setenv("LIGHTNING_SSD_PATHS", f"{by_variable}{os.pathsep}{by_variable}2")
    assert f"{by_variable}, {by_variable}2" in used(default_directory=by_default)
    assert str(by_profile) in used(hardware=HardwareProfile(paths=[by_profile]), default_directory=by_default)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here to be refused")
@pytest.mark.parametrize("policy", [OFFLOAD_ALL, OffloadPolicy(activations="keep", optimizer_states="offload")])
def test_a_refused_path_is_named_as_given_and_not_left_behind(spill_dir, policy):
    refused = Path(f"/dev/shm/lightning_ssd_test_{os.getpid()}")
    hardware = HardwareProfile(paths=[spill_dir / "good" / "deep", refused])
    offloader = Offloader(policy=policy, hardware=hardware)
    with pytest.raises(UnsuitablePathError) as caught:
        offloader.open().offload_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(9))]))
    offloader.close()
    assert str(caught.value).startswith(f"{refused} lies on tmpfs")
    assert caught.value.errno == errno.EINVAL
    assert not refused.exists()
    assert not our_threads()
    assert not list(spill_dir.iterdir())


def test_what_was_there_before_a_refusal_stays(spill_dir):
    (spill_dir / "mine").mkdir()
    paths = [spill_dir / "mine", spill_dir / "new", spill_dir / "mine"]
    with pytest.raises(ConfigError, match="names a directory twice"):
        Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=paths)).open()
    assert [path.name for path in spill_dir.iterdir()] == ["mine"]


@pytest.mark.parametrize("spelling", ["one", "sub/../one", "link"])
def test_one_directory_is_not_two_drives(spill_dir, spelling, monkeypatch):
    for name in ("one", "sub"):
        (spill_dir / name).mkdir()
    (spill_dir / "link").symlink_to("one")
    other = f"{spill_dir}/{spelling}"
    message = rf"twice: .*{re.escape(str(Path(other)))}.* would be taken for two drives, and each drive is to have"
    hardware = HardwareProfile(paths=[spill_dir / "one", other])
    with pytest.raises(ConfigError, match=message):
        Offloader(policy=OFFLOAD_ALL, hardware=hardware).open()
    monkeypatch.setenv("LIGHTNING_SSD_PATHS", f"{spill_dir / 'one'}{os.pathsep}{other}")
    with pytest.raises(ConfigError, match=message):
        Offloader(policy=OFFLOAD_ALL).open()
    assert not list((spill_dir / "one").iterdir())


def test_two_directories_of_one_drive_are_told_of_once(spill_dir, caplog):
    paths = [spill_dir / "a", spill_dir / "b"]
    policy = OffloadPolicy(activations="offload", optimizer_states="offload")
    for allowed, num_told in ((True, 0), (False, 1)):
        hardware = HardwareProfile(paths=paths, allow_unsuitable_paths=allowed)
        with Offloader(policy=policy, hardware=hardware) as offloader:
            offloader.offload_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(9))]))
        told = [record.getMessage() for record in caplog.records if "one file system" in record.getMessage()]
        assert len(told) == num_told
    assert told[0].startswith(f"{paths[0]} and {paths[1]} lie on one file system, so that they are one drive")


def test_keep_counts_and_opens_nothing():
    with Offloader(policy=OffloadPolicy(activations="keep", min_tensor_bytes=0)) as offloader:
        step(offloader)
        stats = offloader.stats
        assert not our_threads()
    assert stats.bytes_kept == stats.bytes_saved > 0
    assert stats.resident_peak_bytes == stats.saved_peak_bytes > 0
    assert stats.bytes_written == stats.resident_bytes == 0


def test_metrics_are_drained_once(spill_dir):
    with Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=spill_dir)) as offloader:
        step(offloader)
        first, second = offloader.drain_metrics(), offloader.drain_metrics()
    assert first["io/write_gib"] > 0
    assert first["io/overlap_ratio"] <= 1
    assert second["io/write_gib"] == 0


def test_what_a_signal_handler_drains_meanwhile_is_not_drained_again(spill_dir, monkeypatch):
    with Offloader(policy=OFFLOAD_ALL, hardware=HardwareProfile(paths=spill_dir)) as offloader:
        step(offloader)
        offloader.flush()
        read, drained = Offloader._moved, []

        def interrupted(self):
            numbers = read(self)
            if not drained:
                drained.append(None)
                drained[:] = [self.drain_metrics()]
            return numbers

        monkeypatch.setattr(Offloader, "_moved", interrupted)
        written = [row["io/write_gib"] for row in (offloader.drain_metrics(), *drained, offloader.drain_metrics())]
    assert written[1] > 0
    assert written[0] == written[2] == 0


def test_dropped_unclosed_under_the_accounting_lock(spill_dir, forks):
    """The garbage collector may find a forgotten offloader while we hold a lock that its workers wait for."""
    code = f"""
import faulthandler, gc, torch, lightning_ssd as s
from lightning_ssd.activations.accounting import MemoryAccounting
faulthandler.dump_traceback_later(240, exit=True)
note_peaks = MemoryAccounting._note_peaks
def collecting(self):
    gc.collect()
    note_peaks(self)
MemoryAccounting._note_peaks = collecting
policy = s.OffloadPolicy(activations="offload", min_tensor_bytes=0)
hardware = s.HardwareProfile(paths={str(spill_dir)!r})
forgotten = s.Offloader(policy=policy, hardware=hardware).open()
forgotten.cycle = forgotten
x = torch.randn(300, 300, requires_grad=True)
with forgotten.saved_tensors():
    loss = x.exp().sin().sum()
    del forgotten
del loss
with s.Offloader(policy=policy, hardware=hardware) as other, other.saved_tensors():
    loss = x.exp().sin().sum()
faulthandler.cancel_dump_traceback_later()
print("ended")
"""
    assert run_python(code, begin=forks) == "ended\n"


def test_a_module_that_is_registered_again_is_watched_once(spill_dir):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    with Offloader(policy=OffloadPolicy(activations="recompute"), hardware=HardwareProfile(paths=spill_dir)) as opened:
        opened.register_module(model)
        stand_ins = [block.__dict__["forward"] for block in model.layers]
        for module in (model, model.layers, torch.nn.Sequential(model)):
            opened.register_module(module)
        assert [block.__dict__["forward"] for block in model.layers] == stand_ins
    assert not any("forward" in block.__dict__ for block in model.layers)


def test_a_module_on_a_gpu_and_an_offloader_for_the_cpu(spill_dir, monkeypatch):
    """Opened before it knew of any module, it would move nothing and say nothing."""
    hardware = HardwareProfile(paths=spill_dir, allow_unsuitable_paths=True)
    with Offloader(hardware=hardware) as offloader:
        offloader.register_module(torch.nn.Linear(2, 2))
        offloader.register_module(torch.nn.Linear(2, 2, device="meta"))
        monkeypatch.setattr("lightning_ssd.offloader.device_of", lambda modules: torch.device("cuda", 0))
        with pytest.raises(ConfigError, match="device=next"):
            offloader.register_module(torch.nn.Linear(2, 2))


@contextmanager
def no_descriptor_to_be_had():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_pass_begins_without_a_file_descriptor_to_be_had(activations, spill_dir):
    policy = OffloadPolicy(activations=activations, min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir, host_memory=0)) as offloader:
        step(offloader)
        with no_descriptor_to_be_had():
            for _ in range(4):
                step(offloader)


def test_a_plan_is_not_made_without_knowing_what_is_in_memory(spill_dir):
    """What else is in memory would count as nothing, so that a budget would be exceeded."""
    policy = OffloadPolicy(activations="auto", memory_budget="1TiB", min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=HardwareProfile(paths=spill_dir, host_memory=0)) as offloader:
        with (
            no_descriptor_to_be_had(),
            pytest.raises(OSError, match="Too many open files"),
            offloader.saved_tensors(),
        ):
            pass
        step(offloader)
