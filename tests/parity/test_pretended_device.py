"""Whole trainings on a pretended device: late copies, any order, poisoned memory, backward in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ssd.assembly
from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from recipes.determinism import make_deterministic
from tests.helpers import (
    DRAINED,
    EAGER,
    PLANNED,
    Session,
    Setup,
    Training,
    assert_identical,
    assert_parity,
    assert_released,
    open_offloader,
    outcome,
)
from tests.parity import models
from tests.parity.test_cuda import Task, place_of, run
from tests.parity.test_models import TRAININGS
from tests.storage.faults import FaultyBackend, eio, on_calls
from tests.storage.pretended import PretendedDevice, WatchedBackend
from tests.storage.pretended_training import on, pretended_device

VERIFIED = Setup(verify="full", drained=False)
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they are reused soon."""
    monkeypatch.setattr(lightning_ssd.assembly, "_STAGING_BYTES", 1 << 20)


def small() -> Training:
    return Training(models.Perceptrons, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square)


def checkpointed() -> Training:
    def model() -> torch.nn.Module:
        return models.Perceptrons(mode="alternate", dropout=0.1)

    return Training(model, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square)


CHOSEN: dict[str, Callable[[], Training]] = {"perceptrons": small, "checkpointed": checkpointed}


@pytest.mark.parametrize("setup", [DRAINED, EAGER, VERIFIED, PLANNED], ids=["drained", "eager", "verified", "planned"])
@pytest.mark.parametrize("name", [*CHOSEN, *(pytest.param(name, marks=SLOW) for name in TRAININGS)])
def test_training_is_exact(name: str, setup: Setup, spill_dir: Path) -> None:
    with pretended_device() as device:
        assert_parity((CHOSEN | TRAININGS)[name](), spill_dir, setups=[setup], **on(device))
    assert device.faults == []
    assert device.num_copies > 0
    assert device.num_backwards > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_training_is_exact_in_any_order(seed: int, spill_dir: Path) -> None:
    with pretended_device(seed=seed, lag_s=0.001 * seed) as device:
        assert_parity(checkpointed(), spill_dir, setups=[DRAINED, EAGER], **on(device))
    assert device.faults == []


@pytest.mark.usefixtures("small_subgroups")
@pytest.mark.parametrize("host_memory", ["none", "some"])
@pytest.mark.parametrize(
    "task",
    [
        Task(steps=3),
        pytest.param(Task(adamw="fused", master_weights=True), marks=SLOW),
        pytest.param(Task(steps=3, micro_batches=2, autocast=True), marks=SLOW),
    ],
    ids=["float32", "master_weights", "accumulation"],
)
@pytest.mark.parametrize("activations", ["offload", "auto"])
def test_states_and_activations(task: Task, activations: str, host_memory: str, spill_dir: Path) -> None:
    place = place_of("cpu")
    make_deterministic(place.device)
    policy: dict[str, Any] = {"activations": activations, "optimizer_states": "offload", "verify": "full"}
    if activations == "auto":
        policy["activation_budget"] = 1 << 20
    with pretended_device() as device:
        expected = run(task, place, Session())
        memory = place.some_host_memory if host_memory == "some" else 0
        hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True, host_memory=memory)
        policies = OffloadPolicy(min_tensor_bytes=4096, master_weights=task.master_weights, **policy)
        with Offloader(policy=policies, hardware=hardware, **on(device)) as offloader:
            got = run(task, place, Session(offloader, settled=True))
            assert_released(offloader)
        assert_identical(got, expected)
        (stats,) = offloader.optimizer_stats
        assert stats.read_bytes > 0
        assert offloader.stats.failures == 0
    assert device.faults == []


# -- faults ------------------------------------------------------------------------------------------------------------


def faulty(device: PretendedDevice, **faults: Any) -> dict[str, Any]:
    """Arguments of an offloader whose drive fails."""
    return on(device) | {"_wrap_backend": lambda inner: WatchedBackend(FaultyBackend(inner, **faults), device)}


def test_writes_that_fail_cost_no_number(spill_dir: Path) -> None:
    with pretended_device() as device:
        expected = outcome(small(), Session())
        failing = faulty(device, fail_write=on_calls(range(0, 200, 3), eio))
        with open_offloader(spill_dir, DRAINED, **failing) as offloader:
            got = outcome(small(), Session.of(offloader, DRAINED))
            assert offloader.stats.failures > 0
            assert_released(offloader)
        assert_identical(got, expected)
    assert device.faults == []


def test_a_bit_that_flips_once_is_read_again(spill_dir: Path) -> None:
    with pretended_device() as device:
        expected = outcome(small(), Session())
        flipping = faulty(device, corrupt_read=lambda index: index % 5 == 0)
        with open_offloader(spill_dir, Setup(verify="full"), **flipping) as offloader:
            got = outcome(small(), Session.of(offloader, DRAINED))
            assert_released(offloader)
        assert_identical(got, expected)
    assert device.faults == []


def test_a_read_that_fails_is_raised_where_backward_was_called(spill_dir: Path) -> None:
    """It comes from autograd's thread; nothing is held afterwards, and the next step trains."""
    broken = [True]
    with pretended_device() as device:
        expected = outcome(small(), Session())
        failing = faulty(device, fail_read=lambda index: eio() if broken[0] else None)
        with open_offloader(spill_dir, DRAINED, **failing) as offloader:
            assert outcome(small(), Session.of(offloader, DRAINED)).type == "StorageError"
            broken[0] = False
            offloader.end_backward()
            got = outcome(small(), Session.of(offloader, DRAINED))
            assert_released(offloader)
        assert_identical(got, expected)
    assert device.faults == []


def test_backward_has_a_thread_of_its_own(spill_dir: Path) -> None:
    threads: list[str] = []
    x = torch.ones(4096, requires_grad=True)
    with pretended_device() as device, open_offloader(spill_dir, DRAINED, **on(device)) as offloader:
        with offloader.saved_tensors():
            y = x.exp()
            y.register_hook(lambda gradient: threads.append(threading.current_thread().name))
            loss = y.sum()
        loss.backward()
    assert threads == ["pretended-autograd"]
