"""Modules of Lightning that are made, run or optimized in odd ways."""

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.models import adapted
from tests.support.trainers import WIDTH, Block, ManualNet, Net


class MadeLate(Net):
    """Makes its layers when the strategy asks for them."""

    is_trained = True

    def __init__(self):
        super().__init__()
        del self.blocks

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block() for _ in range(3)).requires_grad_(self.is_trained)


class Branching(Net):
    """How deep it goes depends on what it sees."""

    def forward(self, x):
        depth = 1 + int(x.abs().sum().item()) % 3
        for block in self.blocks[:depth]:
            x = block(x)
            if x.mean() > 0:
                x = x * torch.sigmoid(x)
        return self.head(self.norm(x))


class Ragged(Net):
    """Batches of different size."""

    def loss(self, batch):
        rows = 20 + int(batch[0][0, 0].abs().item() * 1000) % (len(batch[0]) - 20)
        return super().loss([part[:rows] for part in batch])


class Packed(Net):
    """Several sequences in one row, which do not see each other; their lengths differ from batch to batch."""

    def forward(self, x):
        ends = (x[:, 0] > 1).long().cumsum(0)  # which sequence a token belongs to
        allowed = ends[:, None] == ends[None, :]
        for block in self.blocks:
            heads = x.view(1, len(x), 4, -1).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)
            x = block(x + mixed.transpose(1, 2).reshape(x.shape))
        lengths = ends.bincount()
        pooled = torch.segment_reduce(x, "mean", lengths=lengths[lengths > 0])
        return self.head(self.norm(x + pooled.repeat_interleave(lengths[lengths > 0], 0)))


class Adapted(Net):
    """Frozen layers, and trained detours of low rank."""

    def __init__(self):
        super().__init__()
        adapted(self)


class TwoLoaders(Net):
    """A batch of several loaders' batches."""

    def train_dataloader(self):
        x = torch.randn(150, WIDTH, generator=torch.Generator().manual_seed(9))
        other = DataLoader(TensorDataset(x, x[:, :1]), batch_size=50)
        return {"one": super().train_dataloader(), "other": other}

    def training_step(self, batch, batch_idx):
        return sum(
            super(TwoLoaders, self).training_step(part, batch_idx) for part in batch.values() if part is not None
        )


class Adversarial(Net):
    """Generator and discriminator, toggled; gradients of the one flow through the other, frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.make, self.judge = Block(), nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            made = self.make(real.flip(0))
            loss = nn.functional.softplus(-self.judge(made)).mean()
            self.manual_backward(loss)
            self.clip_gradients(first, 0.1, "norm")
            first.step()
            first.zero_grad()
        with self.toggled_optimizer(second):
            judged = nn.functional.softplus(self.judge(made.detach())).mean()
            judged = judged + nn.functional.softplus(-self.judge(real)).mean()
            self.manual_backward(judged)
            if batch_idx % 2:
                second.step()
                second.zero_grad()
        self.losses += [loss.detach(), judged.detach()]

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.make.parameters(), lr=1e-2)
        return first, torch.optim.AdamW(self.judge.parameters(), lr=1e-2)


class ClosesOver(ManualNet):
    """Steps with a closure that does forward and backward."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():

            def closure(optimizer=optimizer):
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)


class Wrapped(Net):
    """Returns its optimizer in the wrapper that Lightning gives to manual optimization."""

    def configure_optimizers(self):
        return LightningOptimizer(super().configure_optimizers())


class NoOptimizer(Net):
    """Trains nothing; Lightning puts a stand-in in the place of the optimizer."""

    def configure_optimizers(self):
        return None


class Words(Net):
    """Sparse gradients of an embedding, dense ones of the rest."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(300, WIDTH, sparse=True)

    def forward(self, x):
        rows = (x[:, :2].abs() * 100).long().clamp(max=299)
        return super().forward(self.words(rows).sum(1) + x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class WordsInTurns(Words):
    """The one with an optimizer for sparse gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        rest = [p for name, p in self.named_parameters() if not name.startswith("words")]
        return torch.optim.SparseAdam(self.words.parameters(), lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        assert self.words.weight.grad.is_sparse
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Scheduled(Net):
    """A learning rate that changes with each epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


class OnPlateau(Net):
    """A scheduler that looks at a metric."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        config = {"scheduler": scheduler, "monitor": "train/loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Fused(Net):
    """Whose optimizer unscales gradients itself."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Overflows(Net):
    """One step has gradients that are no numbers."""

    def on_after_backward(self):
        if len(self.losses) == 3:
            self.head.weight.grad.fill_(torch.inf)


class FusedOverflows(Overflows, Fused):
    """The scaler tells its optimizer, instead of leaving the step out."""


class WithBackbone(Net):
    """For the finetuning callback, which wants a module of this name, and optimizers without it."""

    def __init__(self):
        super().__init__()
        self.backbone = Block()

    def forward(self, x):
        return super().forward(self.backbone(x))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class WithRate(Net):
    def __init__(self):
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Failing(Net):
    """In the fourth step."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 3 and type(self) is Failing:
            raise ZeroDivisionError("on purpose")


class Mended(Failing):
    """Goes on."""
