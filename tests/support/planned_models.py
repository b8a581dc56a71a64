"""What ``lightning-ssd plan --model tests.support.planned_models:NAME`` is tried with."""

import torch
from torch import nn

WIDTH = 1024
NUM_BLOCKS = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    """Plain PyTorch, with a batch of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def example_batch(self, batch, sequence):
        return torch.randn(batch, sequence, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Adapted(Net):
    """Only its biases are trained."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


class NeedsValues(Net):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else super().forward(-x)


class NoLoss(Net):
    def forward(self, x):
        return "done"


def no_model():
    return "no model"


class TakesPairs(nn.Module):
    """A model of tokens; its ``training_step`` takes what most data sets give."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 100)

    def loss(self, tokens, labels):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())

    def training_step(self, batch, batch_idx):
        tokens, labels = batch
        return self.loss(tokens, labels)


class TakesMappings(TakesPairs):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["input_ids"], batch["labels"])


class TakesOne(TakesPairs):
    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        return self.loss(tokens, tokens)


class TakesTensors(TakesPairs):
    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch)


class TakesVectors(TakesPairs):
    """Of a batch that only its data module knows."""

    def training_step(self, batch, batch_idx):
        x = batch["x"].expand(-1, -1, WIDTH).float()
        for block in self.blocks:
            x = block(x)
        return (self.head(x).mean(1) + batch["weights"]).square().mean()


class Data:
    """What ``--data`` asks of a LightningDataModule."""

    def prepare_data(self):
        self.is_prepared = True

    def setup(self, stage):
        assert stage == "fit"

    def train_dataloader(self):
        assert self.is_prepared
        return [{"x": torch.zeros(3, 7, 1, dtype=torch.int64), "weights": torch.zeros(3, 1)}]


class NoData(Data):
    def train_dataloader(self):
        return []


NOT_CALLABLE = 3
