"""Whole trainings on a pretended device: late copies, any order, poisoned memory, backward in a thread of its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import StorageError
from recipes.determinism import make_deterministic
from tests.parity import models
from tests.parity.test_cuda import Task, place_of, run
from tests.parity.test_models import TRAININGS
from tests.support.faults import FaultyBackend, eio, on_calls
from tests.support.helpers import (
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
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import WatchedBackend, on, poisoned_memory, pretended_device

VERIFIED = Setup(verify="full", drained=False)
SLOW = pytest.mark.slow


def small() -> Training:
    return Training(models.Perceptrons, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square)


def checkpointed() -> Training:
    def model() -> torch.nn.Module:
        return models.Perceptrons(mode="alternate", dropout=0.1)

    return Training(model, lambda step: {"x": models.floats(step, 16, 40)}, models.mean_square)


def rectified() -> Training:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = (torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.RReLU()) for _ in range(4))
        return torch.nn.Sequential(*layers)

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(batch["x"]).square().mean()

    return Training(model, lambda step: {"x": models.floats(step, 16, 40)}, loss)


def assert_exact(training: Training, directory: Path, setup: Setup, **settings: Any) -> None:
    """The bits of plain PyTorch, and no race on the way to them."""
    with pretended_device(**settings) as device:
        assert_parity(training, directory, setups=[setup], **on(device))
    assert device.faults == []
    assert device.num_copies > 0
    assert device.num_backwards > 0


@pytest.mark.parametrize("setup", [DRAINED, EAGER, VERIFIED], ids=["drained", "eager", "verified"])
@pytest.mark.parametrize(
    "training", [small(), checkpointed(), rectified()], ids=["perceptrons", "checkpointed", "rectified"]
)
def test_training_is_exact(training: Training, setup: Setup, spill_dir: Path) -> None:
    assert_exact(training, spill_dir, setup)


def test_training_is_exact_under_plans(spill_dir: Path) -> None:
    assert_exact(replace(small(), steps=8), spill_dir, PLANNED)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_model_is_exact(name: str, spill_dir: Path) -> None:
    assert_exact(replace(TRAININGS[name](), steps=2), spill_dir, DRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_training_is_exact_in_any_order(seed: int, spill_dir: Path) -> None:
    assert_exact(checkpointed(), spill_dir, EAGER if seed % 2 else DRAINED, seed=seed, lag_s=0.001 * seed)


@pytest.mark.usefixtures("small_subgroups")
@pytest.mark.parametrize(
    ("task", "activations", "host_memory"),
    [
        (Task(steps=3), "offload", "some"),
        (Task(steps=3), "auto", "none"),
        pytest.param(Task(adamw="fused", master_weights=True, steps=3), "offload", "none", marks=SLOW),
        pytest.param(Task(adamw="fused", master_weights=True, steps=3), "auto", "some", marks=SLOW),
        pytest.param(Task(steps=2, micro_batches=2, autocast=True), "offload", "none", marks=SLOW),
    ],
    ids=["offload", "auto", "master_weights", "master_weights-auto", "accumulation"],
)
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


@pytest.mark.filterwarnings("ignore:offloading failed")
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
    """It comes from autograd's thread; nothing is held afterwards, the next step trains, and close tells once more."""
    broken = [True]
    with pretended_device() as device:
        expected = outcome(small(), Session())
        offloader = Offloader(
            policy=OffloadPolicy(activations="offload", min_tensor_bytes=0),
            hardware=HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True),
            **faulty(device, fail_read=lambda index: eio() if broken[0] else None),
        ).open()
        assert outcome(small(), Session(offloader, drained=True)).type == "StorageError"
        broken[0] = False
        offloader.end_backward()
        got = outcome(small(), Session(offloader, drained=True))
        assert_released(offloader)
        with pytest.raises(StorageError, match="injected"):
            offloader.close()
        assert_identical(got, expected)
    assert device.faults == []


def test_training_in_poisoned_host_memory_is_exact(spill_dir: Path) -> None:
    """Without streams: reloads on a CPU go to memory of a pool."""
    with poisoned_memory() as poisoned:
        assert_parity(checkpointed(), spill_dir, setups=[DRAINED, EAGER])
        assert_parity(TRAININGS["convolutions-channels-last"](), spill_dir, setups=[DRAINED])
    assert poisoned, "no memory came back"


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
