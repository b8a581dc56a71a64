"""Small LightningModules and Trainers that the Lightning tests share. Importable by spawned processes."""

import warnings
from collections import OrderedDict
from contextlib import contextmanager

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ssd import HardwareProfile, OffloadPolicy
from lightning_ssd.common.dtensor import local_of
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy

WIDTH = 128
BATCH_SIZE = 64  # 32 KiB per activation
NUM_BATCHES = 6

# Warnings of Lightning on what these tests do on purpose (tiny data, no workers), and on its own use of PyTorch.
LIGHTNING_NOISE = (
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches .* is smaller than the logging interval",
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning",
    "ignore:GPU available but not used",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:You're resuming from a checkpoint that ended",
    "ignore:.*no-op when using barebones",
    "ignore:.*no-op if `Trainer.barebones=True.`",
    "ignore:You are trying to `self.log.*barebones",
)

# A Trainer without anything it can do without. What make_trainer() says of these Lightning does not allow then.
BAREBONES = {
    "barebones": True,
    "enable_progress_bar": None,
    "logger": None,
    "enable_checkpointing": None,
    "enable_model_summary": None,
    "num_sanity_val_steps": None,
}


class Block(torch.nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(L.LightningModule):
    """Three blocks and a batch norm, automatic optimization; remembers its losses."""

    def __init__(self, width=WIDTH, *, checkpointed=False, batch_size=BATCH_SIZE):
        super().__init__()
        self.width, self.batch_size, self.checkpointed = width, batch_size, checkpointed
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 1)
        self.losses = []

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x).float(), y.float())
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=self.trainer.world_size > 1)

    def test_step(self, batch, batch_idx):
        self.loss(batch)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        """Of what is trained at first."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def dataset(self):
        generator = torch.Generator().manual_seed(5)
        rows = NUM_BATCHES * BATCH_SIZE
        x = torch.randn(rows, self.width, generator=generator)
        return TensorDataset(x, x.square().mean(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.dataset(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.dataset(), batch_size=self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Unlogged(Net):
    """For :func:`step_after_fit`: Lightning has nowhere to log to then."""

    def log(self, *args, **kwargs):
        pass


class ManualNet(Net):
    """Two optimizers in turn, as a GAN has them; ``through_lightning=False`` calls ``loss.backward()`` itself."""

    def __init__(self, *, through_lightning=True):
        super().__init__()
        self.automatic_optimization = False
        self.through_lightning = through_lightning

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            if self.through_lightning:
                self.manual_backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.blocks.parameters(), lr=1e-2)
        return first, torch.optim.SGD([*self.norm.parameters(), *self.head.parameters()], lr=1e-2)


class LBFGSNet(Net):
    """One optimizer step runs the closure, so forward and backward, as often as it likes."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


@contextmanager
def one_thread():
    """Models as small as these run many times faster so, above all where the machine is shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def offload_strategy(directory, kind=SSDOffloadStrategy, **options):
    """Ours, with a policy for small models; works where the temporary directory is in memory, too.

    Args:
        directory: of its files.
        kind: of strategy, or what else takes a policy.
        options: of the policy, the hardware and the strategy.
    """
    policy, hardware = (
        {name: options.pop(name) for name in settings.__dataclass_fields__ if name in options}
        for settings in (OffloadPolicy, HardwareProfile)
    )
    return kind(
        policy=OffloadPolicy(**({"min_tensor_bytes": 4096} | policy)),
        hardware=HardwareProfile(**({"paths": [directory], "allow_unsuitable_paths": True} | hardware)),
        **options,
    )


def make_trainer(strategy, directory, **more):
    """A quiet Trainer on one CPU device."""
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
    }
    return L.Trainer(strategy=strategy, **(settings | more))


def fit(make, strategy, directory, *, ckpt_path=None, weights_only=None, **more):
    """Train from a fixed seed; on from a checkpoint, if there is one, whatever the weights were before."""
    L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
    module = make()
    trainer = make_trainer(strategy, directory, **more)
    with warnings.catch_warnings():
        for noise in LIGHTNING_NOISE:
            _, message, *category = noise.split(":")
            kind = {"FutureWarning": FutureWarning, "DeprecationWarning": DeprecationWarning}.get("".join(category))
            warnings.filterwarnings("ignore", message, category=kind or Warning)
        trainer.fit(module, ckpt_path=ckpt_path, weights_only=weights_only)
    return trainer, module


def step_after_fit(trainer):
    """Call the loop once more when everything has been torn down, as some of Lightning's own tests do."""
    module = trainer.lightning_module
    kwargs = OrderedDict(batch=list(module.dataset()[:BATCH_SIZE]), batch_idx=0)
    epoch_loop = trainer.fit_loop.epoch_loop
    if module.automatic_optimization:
        epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, kwargs)
    else:
        epoch_loop.manual_optimization.run(kwargs)


def result(module):
    """What two equal trainings have in common."""
    return {"losses": module.losses, "state": {name: value.clone() for name, value in module.state_dict().items()}}


def everything(trainer, module):
    """Losses, weights and optimizer states of a training, as far as they are in this process."""
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    for saved in optimizers:
        # Plainly in the order in which parameters first got gradients, ours in that of the parameters.
        saved["state"] = dict(sorted(saved.get("state", {}).items()))
    found = result(module) | {"optimizers": optimizers}
    # Lightning moves states to the CPU when a fit is over; of ours, small ones stay on the card.
    return apply_to_collection(found, torch.Tensor, lambda tensor: local_of(tensor.detach()).cpu().clone())
