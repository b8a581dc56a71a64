"""Frozen weights that wait on drives, under Lightning: fit, validate, predict, checkpoints, Fabric, two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.memory import gauge
from lightning_ssd.parameters import step_memory
from lightning_ssd.planning import residency
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.fabric_runs import assert_nothing_left
from tests.support.helpers import assert_identical
from tests.support.processes import run_script
from tests.support.trainers import LIGHTNING_NOISE, WIDTH, Block, Net, fit, make_trainer, one_thread, result

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]

POLICY = {"parameters": "offload", "min_tensor_bytes": 4096}
BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class Tuned(Net):
    """Blocks are frozen, as in a model whose head is trained anew. They are made when Lightning asks for it."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block(self.width) for _ in range(3)).requires_grad_(False)


def strategy(directory: Path, **options: Any) -> SSDOffloadStrategy:
    return SSDOffloadStrategy(
        policy=OffloadPolicy(**POLICY | options),
        hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True),
    )


@pytest.mark.parametrize("activations", ["auto", "offload", "keep"])
@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}])
def test_training_is_lightning_s_own(activations: str, more: dict[str, Any], tmp_path: Path) -> None:
    _, expected = fit(Tuned, "auto", tmp_path, **more)
    ours = strategy(tmp_path, activations=activations)
    _, module = fit(Tuned, ours, tmp_path, **more)
    assert_identical(result(module), result(expected))
    assert ours.stats.weights_bytes == 3 * BLOCK_BYTES
    assert 0 < ours.stats.weights_resident_peak_bytes <= ours.stats.weights_bytes
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("available", "num_waiting"), [(1 << 40, 0), (0, 3), (None, 3)])
def test_with_auto_as_many_wait_as_memory_lacks(
    available: int | None, num_waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


class Scarce(L.Callback):
    """From the second batch on the machine has no memory left, and from the fifth on much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.available_bytes = 1 << 40
        self.waiting: list[int] = []
        monkeypatch.setattr(gauge, "host_available_bytes", lambda cached: self.available_bytes)
        monkeypatch.setattr(step_memory, "_REST_S", 0.0)
        monkeypatch.setattr(residency, "_PATIENCE", 2)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.waiting.append(trainer.strategy.stats.weights_bytes)
        self.available_bytes = 0 if 2 <= len(self.waiting) < 5 else 1 << 40


@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("kind", [Tuned, Net])
def test_memory_that_becomes_scarce_in_the_middle_of_training(
    kind: type[L.LightningModule], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if kind is Tuned else {"gradients": "auto", "optimizer_states": "offload"}
    _, expected = fit(kind, "auto", tmp_path, max_epochs=4, **more)
    scarce = Scarce(monkeypatch)
    ours = strategy(tmp_path, parameters="auto", activations="auto", **options)
    _, module = fit(kind, ours, tmp_path, max_epochs=4, callbacks=[scarce], **more)
    assert_identical(result(module), result(expected))
    assert scarce.waiting[0] == scarce.waiting[-1] == 0
    assert max(scarce.waiting) >= 3 * BLOCK_BYTES
    assert_nothing_left(tmp_path)


def test_what_lightning_builds_is_never_whole_in_memory(tmp_path: Path) -> None:
    class Watched(Tuned):
        def configure_model(self) -> None:
            super().configure_model()
            self.waiting = self.trainer.strategy.stats.weights_bytes

    _, module = fit(Watched, strategy(tmp_path), tmp_path)
    assert module.waiting == 3 * BLOCK_BYTES


@pytest.mark.parametrize("activity", ["validate", "test", "predict"])
def test_without_training(activity: str, tmp_path: Path) -> None:
    results = []
    for own in ("auto", strategy(tmp_path)):
        L.seed_everything(7, verbose=False)
        module = Tuned()
        trainer = make_trainer(own, tmp_path)
        found = getattr(trainer, activity)(module, **({} if activity == "predict" else {"verbose": False}))
        results.append((module.losses, found))
        if isinstance(own, SSDOffloadStrategy):
            assert own.stats.weights_bytes == 3 * BLOCK_BYTES
            assert own.stats.bytes_saved == 0
    assert_identical(results[0], results[1])
    assert_nothing_left(tmp_path)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # on purpose without its callback
def test_checkpoints_are_lightning_s_own_and_resume(tmp_path: Path) -> None:
    def saved(name: str, own: Any) -> Path:
        saving = ModelCheckpoint(tmp_path / name, save_last=True)
        fit(Tuned, own, tmp_path, callbacks=[saving], enable_checkpointing=True)
        return tmp_path / name / "last.ckpt"

    plain, ours = saved("plain", "auto"), saved("ours", strategy(tmp_path))
    loaded = [torch.load(path, weights_only=False) for path in (plain, ours)]
    assert_identical(loaded[1]["state_dict"], loaded[0]["state_dict"])
    resumed = []
    for path, own in ((plain, "auto"), (ours, strategy(tmp_path)), (plain, strategy(tmp_path)), (ours, "auto")):
        L.seed_everything(8, verbose=False)
        module = Tuned()
        make_trainer(own, tmp_path, max_epochs=2).fit(module, ckpt_path=path)
        resumed.append(result(module))
    for other in resumed[1:]:
        assert_identical(other, resumed[0])


def test_fit_twice_then_test(tmp_path: Path) -> None:
    found = []
    for own in ("auto", strategy(tmp_path)):
        _, module = fit(Tuned, own, tmp_path)
        again = strategy(tmp_path) if own != "auto" else own
        make_trainer(again, tmp_path).fit(module)
        make_trainer(again if own == "auto" else strategy(tmp_path), tmp_path).test(module, verbose=False)
        found.append(result(module))
        if own != "auto":
            assert again.stats.weights_bytes == 3 * BLOCK_BYTES
    assert_identical(found[1], found[0])


class Frugal(Tuned):
    """Its optimizer has what is trained, as finetuning wants it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Unfreezes(BaseFinetuning):
    """The last block is trained from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[2], optimizer, lr=1e-2)


def test_weights_that_are_unfrozen_while_they_wait(tmp_path: Path) -> None:
    found = []
    for own in ("auto", strategy(tmp_path)):
        _, module = fit(Frugal, own, tmp_path, callbacks=[Unfreezes()], max_epochs=3)
        found.append(result(module))
    assert_identical(found[1], found[0])


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Tuned):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Failing, strategy(tmp_path), tmp_path)
    assert_nothing_left(tmp_path)


def test_building_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Failing(Tuned):
        def configure_model(self) -> None:
            super().configure_model()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Failing, strategy(tmp_path), tmp_path)
    assert_nothing_left(tmp_path)
    nn.Sequential(nn.Linear(WIDTH, WIDTH))  # nobody listens any more


def fabric_training(make: Callable[[], Fabric]) -> dict[str, Any]:
    fabric = make()
    torch.manual_seed(3)
    with fabric.init_module():
        model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 1))
    model[:3].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[3].parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for step in range(4):
        loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def test_fabric(tmp_path: Path) -> None:
    ours = SSDOffloadFabricStrategy(
        policy=OffloadPolicy(**POLICY), hardware=HardwareProfile(paths=[tmp_path], allow_unsuitable_paths=True)
    )
    with ours:
        found = fabric_training(lambda: Fabric(accelerator="cpu", devices=1, strategy=ours))
        assert ours.stats.weights_bytes == 3 * BLOCK_BYTES
    assert_identical(found, fabric_training(lambda: Fabric(accelerator="cpu", devices=1)))
    assert_nothing_left(tmp_path)


def test_two_processes(tmp_path: Path, forks: list[str]) -> None:
    output = run_script("tests.support.ddp_script", str(tmp_path), "popen", "weights", begin=forks).stdout
    for rank in (0, 1):
        assert f"rank {rank}: weights ok" in output
