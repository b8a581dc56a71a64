"""Ways of making modules, and odd modules, with Lightning: all on SSD, with the bits of the plain strategy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.lightning_pairs import (
    EVERYTHING_EXHAUSTIVELY,
    MARKS,
    Make,
    all_on_ssd,
    assert_moved,
    both,
    everything,
)
from tests.support.helpers import assert_identical
from tests.support.trainers import (
    WIDTH,
    Block,
    Net,
    make_trainer,
)

pytestmark = [*MARKS, *EVERYTHING_EXHAUSTIVELY]


# -- how modules are made ----------------------------------------------------------------------------------------------


class MadeLate(Net):
    """Makes its layers when the strategy asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.blocks = nn.ModuleList(Block() for _ in range(3))


def test_layers_made_in_configure_model(tmp_path: Path) -> None:
    both(MadeLate, tmp_path)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_a_module_made_under_init_module(precision: Any, tmp_path: Path) -> None:
    seen = []
    for strategy in ("auto", all_on_ssd(tmp_path)):
        trainer = make_trainer(strategy, tmp_path, precision=precision, limit_val_batches=0)
        L.seed_everything(7, verbose=False)
        with trainer.init_module():
            module = Net()
        trainer.fit(module)
        seen.append(everything(trainer, module))
    assert_identical(seen[1], seen[0])
    assert_moved(trainer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_cli_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class_path = "lightning_ssd.strategies.ssd_offload.SSDOffloadStrategy"
    policy = {"activations": "offload", "min_tensor_bytes": 4096, "optimizer_states": "offload"}
    ours = {
        "class_path": class_path,
        "init_args": {"policy": policy, "hardware": {"paths": [str(tmp_path)], "allow_unsuitable_paths": True}},
    }
    monkeypatch.setattr("sys.argv", ["train"])
    seen = []
    for strategy in ("auto", ours):
        settings = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "num_sanity_val_steps": 0}
        quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        arguments = {"seed_everything": 7, "trainer": {**settings, **quiet, "strategy": strategy}}
        cli = LightningCLI(Net, run=False, save_config_callback=None, args=arguments)
        cli.trainer.fit(cli.model)
        seen.append(everything(cli.trainer, cli.model))
    assert_identical(seen[1], seen[0])
    assert_moved(cli.trainer)


# -- models ------------------------------------------------------------------------------------------------------------


class Branching(Net):
    """How deep it goes depends on what it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        depth = 1 + int(x.abs().sum().item()) % 3
        for block in self.blocks[:depth]:
            x = block(x)
            if x.mean() > 0:
                x = x * torch.sigmoid(x)
        return self.head(self.norm(x))


class Ragged(Net):
    """Batches of different size."""

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        rows = 20 + int(batch[0][0, 0].abs().item() * 1000) % (len(batch[0]) - 20)
        return super().loss([part[:rows] for part in batch])


class Packed(Net):
    """Several sequences in one row, which do not see each other; their lengths differ from batch to batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = (x[:, 0] > 1).long().cumsum(0)  # which sequence a token belongs to
        allowed = ends[:, None] == ends[None, :]
        for block in self.blocks:
            heads = x.view(1, len(x), 4, -1).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)
            x = block(x + mixed.transpose(1, 2).reshape(x.shape))
        lengths = ends.bincount()
        pooled = torch.segment_reduce(x, "mean", lengths=lengths[lengths > 0])
        return self.head(self.norm(x + pooled.repeat_interleave(lengths[lengths > 0], 0)))


class Adapter(nn.Module):
    """A frozen layer and a trained detour of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 16, bias=False)
        self.up = nn.Linear(16, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(nn.functional.dropout(self.down(x), 0.1, self.training))


class Adapted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class TwoLoaders(Net):
    """A batch of several loaders' batches."""

    def train_dataloader(self) -> Any:
        x = torch.randn(150, WIDTH, generator=torch.Generator().manual_seed(9))
        other = DataLoader(TensorDataset(x, x[:, :1]), batch_size=50)
        return {"one": super().train_dataloader(), "other": other}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(
            super(TwoLoaders, self).training_step(part, batch_idx) for part in batch.values() if part is not None
        )


MODELS: dict[str, Make] = {
    "data-dependent-control-flow": Branching,
    "variable-shapes": Ragged,
    "sequence-packing": Packed,
    "low-rank-adapters": Adapted,
    "several-loaders": TwoLoaders,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    both(MODELS[name], tmp_path)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(how: str) -> Net:
    module = Net()
    if how == "module":
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # Lightning's own trouble in a graph
        return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return module


@pytest.mark.parametrize("how", ["module", "blocks"])
@pytest.mark.filterwarnings("ignore:Net is compiled as a whole")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(how: str, tmp_path: Path) -> None:
    def settings(directory: Path) -> dict[str, Any]:
        return {"limit_train_batches": 3, "limit_val_batches": 0}

    both(partial(compiled, how), tmp_path, settings)
