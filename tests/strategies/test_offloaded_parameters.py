"""Weights and gradients that wait, under Lightning and Fabric: in files, and away from a device, races being faults."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_ssd import SSDOffloadStrategy
from lightning_ssd.memory import gauge
from lightning_ssd.parameters.device_weights import DeviceWeights
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.parity.lightning_nets import MadeLate
from tests.support.helpers import assert_identical
from tests.support.leftovers import assert_nothing_left
from tests.support.pairs import each_once
from tests.support.pretended_training import everything_there
from tests.support.trainers import LIGHTNING_NOISE, WIDTH, Block, fit, make_trainer, offload_strategy, result

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]

BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4


class Tuned(MadeLate):
    """Its blocks are frozen, as in a model whose head is trained anew."""

    is_trained = False


class Kind(NamedTuple):
    """What is trained, and what of it waits."""

    make: type[MadeLate]
    policy: dict[str, Any]
    is_on_device: bool = True


STATES = {"optimizer_states": "offload"}
FROZEN = Kind(Tuned, {"parameters": "offload"}, is_on_device=False)
WEIGHTS = Kind(MadeLate, STATES | {"parameters": "offload"})
GRADIENTS = Kind(MadeLate, STATES | {"gradients": "offload"})
EVERYTHING = Kind(MadeLate, STATES | {"parameters": "offload", "gradients": "offload"})
KINDS = {"frozen": FROZEN, "weights": WEIGHTS, "gradients": GRADIENTS, "everything": EVERYTHING}


@pytest.fixture
def kind(request, small_subgroups):
    """Where it is on a device, that is pretended."""
    chosen = KINDS[request.param]
    with everything_there() if chosen.is_on_device else nullcontext():
        yield chosen


def strategy(directory, kind=FROZEN, make=SSDOffloadStrategy, **options):
    memory = {"host_memory": 0} if kind.is_on_device else {}
    return offload_strategy(directory, make, **memory, **(kind.policy | options))


WITHOUT_A_DEVICE = pytest.mark.parametrize(
    "kind", ["frozen", pytest.param("weights", marks=pytest.mark.exhaustive)], indirect=True
)
"""By default: those of a simulated device take several times as long."""
TRAINERS = {
    "as it is": {},
    "mixed, clipped by norm": {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
    "accumulated, clipped by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01},
    "accumulated, clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 1e-4,
        "gradient_clip_algorithm": "value",
    },
}


@each_once("kind, activations, name", KINDS, ["auto", "offload", "keep"], TRAINERS, indirect=["kind"])
def test_training_is_lightning_s_own(kind, activations, name, tmp_path):
    _, expected = fit(kind.make, "auto", tmp_path, **TRAINERS[name])
    ours = strategy(tmp_path, kind, activations=activations)
    _, module = fit(kind.make, ours, tmp_path, **TRAINERS[name])
    assert_identical(result(module), result(expected))
    stats = ours.stats
    if "parameters" in kind.policy:
        assert stats.weights_bytes >= 3 * BLOCK_BYTES
        assert kind.is_on_device or 0 < stats.weights_resident_peak_bytes <= stats.weights_bytes == 3 * BLOCK_BYTES
    if "gradients" in kind.policy:
        assert stats.bytes_written > 0
    assert_nothing_left(tmp_path)


class Manual(MadeLate):
    """Accumulates, clips, changes and keeps gradients by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.norms = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch) * 0.5)
        if batch_idx % 2:
            return
        weight = self.blocks[0].up.weight
        weight.grad = weight.grad * 2
        self.blocks[1].down.weight.grad.add_(1e-3)
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        by_norm = batch_idx % 4 == 0
        self.clip_gradients(
            optimizer,
            gradient_clip_val=0.01 if by_norm else 1e-4,
            gradient_clip_algorithm="norm" if by_norm else "value",
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=by_norm)


@pytest.mark.parametrize("kind", ["gradients"], indirect=True)
def test_manual_optimization(kind, tmp_path):
    _, expected = fit(Manual, "auto", tmp_path, max_epochs=2)
    _, module = fit(Manual, strategy(tmp_path, kind, activations="offload"), tmp_path, max_epochs=2)
    assert_identical(result(module), result(expected))
    assert_identical(module.norms, expected.norms)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("available", "num_waiting"), [(1 << 40, 0), (0, 3), (None, 3)])
def test_with_auto_as_many_wait_as_memory_lacks(available, num_waiting, tmp_path, monkeypatch):
    monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: available)
    monkeypatch.setattr(gauge, "anonymous_bytes", lambda: 1 << 20)
    _, expected = fit(Tuned, "auto", tmp_path)
    ours = strategy(tmp_path, parameters="auto", activations="keep")
    _, module = fit(Tuned, ours, tmp_path)
    assert_identical(result(module), result(expected))
    assert ours.stats.weights_bytes == num_waiting * BLOCK_BYTES
    assert ours.stats.weights_kept_bytes == (3 - num_waiting) * BLOCK_BYTES
    assert (ours.stats.bytes_written > 0) is (num_waiting > 0)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("activity", ["validate", "test", "predict"])
def test_without_training(activity, tmp_path):
    results = []
    for own in ("auto", strategy(tmp_path)):
        L.seed_everything(7, verbose=False)
        module = Tuned()
        trainer = make_trainer(own, tmp_path)
        found = getattr(trainer, activity)(module, **({} if activity == "predict" else {"verbose": False}))
        results.append((module.losses, found))
        if own != "auto":
            assert own.stats.weights_bytes == 3 * BLOCK_BYTES
            assert own.stats.bytes_saved == 0
    assert_identical(results[0], results[1])
    assert_nothing_left(tmp_path)


@WITHOUT_A_DEVICE
def test_checkpoints_are_lightning_s_own_and_resume(kind, tmp_path):
    def saved(name, own):
        saving = ModelCheckpoint(tmp_path / name, save_last=True)
        fit(kind.make, own, tmp_path, callbacks=[saving], enable_checkpointing=True)
        return tmp_path / name / "last.ckpt"

    plain, ours = saved("plain", "auto"), saved("ours", strategy(tmp_path, kind))
    loaded = [torch.load(path, weights_only=False) for path in (plain, ours)]
    for part in ("state_dict", "optimizer_states") if kind is WEIGHTS else ("state_dict",):
        assert_identical(loaded[1][part], loaded[0][part])
    resumed = []
    for path, is_ours in ((plain, False), (ours, True), (plain, True), (ours, False)):
        own = strategy(tmp_path, kind) if is_ours else "auto"
        resumed.append(result(fit(kind.make, own, tmp_path, ckpt_path=path, max_epochs=2)[1]))
    for other in resumed[1:]:
        assert_identical(other, resumed[0])


@WITHOUT_A_DEVICE
def test_fit_twice_then_test(kind, tmp_path):
    found = []
    for is_ours in (False, True):
        own = [strategy(tmp_path, kind) if is_ours else "auto" for _ in range(3)]
        _, module = fit(kind.make, own[0], tmp_path)
        make_trainer(own[1], tmp_path).fit(module)
        make_trainer(own[2], tmp_path).test(module, verbose=False)
        found.append(result(module))
    assert own[1].stats.weights_bytes >= 3 * BLOCK_BYTES
    assert_identical(found[1], found[0])


@pytest.mark.parametrize("where", ["on_before_zero_grad", "configure_model"])
def test_what_fails_in_a_step_or_in_building_leaves_nothing(where, tmp_path):
    def fail(self, *args):
        if where == "configure_model":
            Tuned.configure_model(self)
            assert self.trainer.strategy.stats.weights_bytes == 3 * BLOCK_BYTES, "it is never whole in memory"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(type("Failing", (Tuned,), {where: fail}), strategy(tmp_path), tmp_path)
    assert_nothing_left(tmp_path)
    nn.Sequential(nn.Linear(WIDTH, WIDTH))  # nobody listens any more


def fabric_training(fabric, path, clip, *, is_trained):
    torch.manual_seed(3)
    with fabric.init_module():
        blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 8))
    blocks[:3].requires_grad_(is_trained)
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]
    model, optimizer = fabric.setup(blocks, torch.optim.AdamW(trained, lr=1e-3))
    found = []
    for step in range(6):
        loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        fabric.backward(loss)
        found.append(loss.detach())
        if step % 2:
            norm = fabric.clip_gradients(model, optimizer, **clip)
            found += [*([] if norm is None else [norm]), *(p.grad.clone() for p in trained)]
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    return [*found, torch.load(path, weights_only=False)]


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("frozen", {"max_norm": 0.01}),
        ("weights", {"max_norm": 0.01}),
        ("gradients", {"max_norm": 0.01}),
        ("gradients", {"clip_val": 1e-4}),
    ],
    indirect=["kind"],
)
def test_fabric(kind, clip, tmp_path):
    is_trained = kind.make.is_trained
    ours = strategy(tmp_path, kind, SSDOffloadFabricStrategy)
    with ours:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=ours)
        found = fabric_training(fabric, tmp_path / "ours.ckpt", clip, is_trained=is_trained)
        if "parameters" in kind.policy:
            assert ours.stats.weights_bytes >= 3 * BLOCK_BYTES
            weights = ours.offloader._parts.parameters.weights
            assert isinstance(weights, DeviceWeights) is kind.is_on_device
        assert ours.stats.bytes_written > 0
    plain = Fabric(accelerator="cpu", devices=1)
    assert_identical(found, fabric_training(plain, tmp_path / "plain.ckpt", clip, is_trained=is_trained))
