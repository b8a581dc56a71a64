"""Train on a device that PyTorch knows as one, whose memory the host cannot touch; say what was seen. Started by tests.

A process has one such device for good, and a fault of the host's ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ssd._assembly
from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.tiers import copy_paths
from lightning_ssd.tiers.copy_paths import HostMover, StagedMover
from lightning_ssd.tiers.streams import StreamCopies, _EventMark
from tests.parity.models import FAMILIES
from tests.parity.test_cuda import Place, Task, run
from tests.support.faults import FaultyBackend, eio, on_calls
from tests.support.helpers import Session, Setup, assert_identical, assert_parity, assert_released
from tests.support.pretended_backend import NAME, pretended_backend
from tests.support.pretended_training import WatchedBackend


def place():
    """The device, once PyTorch knows its name."""
    return Place(torch.device(NAME, 0), None, width=32, window=32)


@dataclass(frozen=True)
class Program:
    """A training, and what is moved of it."""

    task: Task
    host_memory: int = 0
    stream: str = "main"
    fail: dict[str, Any] | None = None
    policy: dict[str, Any] | None = None

    def __call__(self, directory, device):
        expected = run(self.task, place(), Session())
        policy = OffloadPolicy(min_tensor_bytes=4096, master_weights=self.task.master_weights, **self.policy or {})
        hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=self.host_memory)
        faults = self.fail or {}
        offloader = Offloader(
            device=NAME,
            policy=policy,
            hardware=hardware,
            _wrap_backend=lambda inner: WatchedBackend(FaultyBackend(inner, **faults), device),
        )
        with offloader, device.stream(self.stream):
            device.forward_stream = self.stream
            device.wait_stream("main")
            got = run(self.task, place(), Session(offloader, settled=True))
            assert_released(offloader)
            report = offloader.plan_report
        assert_identical(got, expected)
        self._check(offloader, is_planned=report is not None)

    def _check(self, offloader, *, is_planned):
        """That it was moved."""
        stats, policy = offloader.stats, self.policy or {}
        assert (stats.failures > 0) == (self.fail is not None)
        if policy["activations"] != "keep":
            assert stats.bytes_written + stats.bytes_host > 0
            assert stats.bytes_read > 0
        assert is_planned == (policy["activations"] == "auto")
        for optimizer in offloader.optimizer_stats:
            assert optimizer.written_bytes > 0
            assert optimizer.read_bytes > 0
            assert 0 < optimizer.resident_peak_bytes < optimizer.state_bytes


OFFLOAD = {"activations": "offload", "verify": "full"}
AUTO = {"activations": "auto", "activation_budget": 1 << 19, "verify": "full"}
STATES = {"optimizer_states": "offload"}
SOME = 64 << 10
FUSED = Task(adamw="fused", steps=2)
PROGRAMS = {
    "offload": Program(FUSED, policy=OFFLOAD),
    "auto": Program(replace(FUSED, steps=4), SOME, policy=AUTO),
    "recompute": Program(FUSED, policy={"activations": "recompute_offload"}),
    "states": Program(FUSED, policy={"activations": "keep"} | STATES),
    "states-auto": Program(replace(FUSED, steps=4), SOME, policy=AUTO | STATES),
    "master-weights": Program(replace(FUSED, master_weights=True), SOME, policy=OFFLOAD | STATES),
    "side-stream": Program(FUSED, stream="side", policy=OFFLOAD | STATES),
    "failing-writes": Program(FUSED, fail={"fail_write": on_calls(range(0, 500, 3), eio)}, policy=OFFLOAD | STATES),
    "flipped-bits": Program(FUSED, fail={"corrupt_read": lambda index: index % 5 == 0}, policy=OFFLOAD | STATES),
}


def trained_there(training):
    """The same on the device."""

    def batch(step):
        return {name: value.to(NAME) for name, value in training.make_batch(step).items()}

    return replace(training, make_batch=batch, prepare=lambda model: training.prepare(model).to(NAME), steps=2)


# -- mistakes, each of which must be noticed ---------------------------------------------------------------------------


def host_mover(patch):
    """Tensors are taken for the host's: their ends are copied by the host, and their bodies given to the file."""
    made = HostMover.__init__

    def init(mover, backend, staging, copies):
        made(mover, backend, ReloadPool(0))

    patch.setattr(lightning_ssd._assembly, "StagedMover", type("StagedMover", (HostMover,), {"__init__": init}))


def host_checksum(patch):
    """What is to be written is summed where it is."""
    store = StagedMover.store

    def summed(mover, piece, *, check):
        copy_paths.checksum(piece.memory)
        return store(mover, piece, check=check)

    patch.setattr(StagedMover, "store", summed)


def host_write(patch):
    """The file is given the tensor itself; the system call fails, so that no tensor leaves memory."""

    def store(mover, piece, *, check):
        mover._backend.write(piece.arena, piece.memory, piece.offset)

    patch.setattr(StagedMover, "store", store)


def no_wait_before_copies(patch):
    """Copies begin whenever they like."""
    copy = StreamCopies._copy

    def at_once(copies, stream, target, source, after):
        return copy(copies, stream, target, source, _EventMark(copies._accelerator, stream))

    patch.setattr(StreamCopies, "_copy", at_once)


MISTAKES = {
    "host-mover": host_mover,
    "host-checksum": host_checksum,
    "host-write": host_write,
    "no-wait-before-copies": no_wait_before_copies,
}


def main(directory, names):
    """Run programs, models, or a program with a mistake."""
    faulthandler.enable()
    with pytest.MonkeyPatch.context() as patch:
        _make_small(patch)
        with pretended_backend() as device:
            try:
                for name in names:
                    _run(name, directory, device, patch)
            finally:
                device.close()
                print(json.dumps({"faults": device.faults, "num_copies": device.num_copies}))


def _make_small(patch):
    """Have many subgroups."""
    for name, value in {
        "tests.parity.test_cuda.NUM_BLOCKS": 2,
        "lightning_ssd.optimizer.step.elementwise._NUM_TINY": 20,
        "lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES": 32 << 10,
        "lightning_ssd.optimizer.step.subgroups.GRANULE": 1024,
    }.items():
        patch.setattr(name, value)


def _run(name, directory, device, patch):
    if name in FAMILIES:
        training, there = (
            trained_there(FAMILIES[name]()),
            {"_wrap_backend": lambda inner: WatchedBackend(inner, device)},
        )
        assert_parity(training, directory, setups=[Setup(verify="full")], device=NAME, **there)
        return
    if name in MISTAKES:
        MISTAKES[name](patch)
    PROGRAMS["offload" if name in MISTAKES else name](directory, device)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
