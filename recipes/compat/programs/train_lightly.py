"""MoCo of lightly: a second encoder that follows the first, and a bank of features, on random pictures."""

import copy

import pytorch_lightning as pl
import recording
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.data.multi_view_collate import MultiViewCollate
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import nn


class MoCo(pl.LightningModule):
    """Learn from two views of a picture."""

    def __init__(self) -> None:
        super().__init__()
        resnet = torchvision.models.resnet18()
        resnet.fc = nn.Identity()
        self.encoder = nn.ModuleList([resnet, MoCoProjectionHead(512, 512, 128)])
        self.follower = copy.deepcopy(self.encoder)
        deactivate_requires_grad(self.follower)
        self.criterion = NTXentLoss(memory_bank_size=(64, 128))

    def training_step(self, batch, batch_idx):
        update_momentum(self.encoder, self.follower, m=0.99)
        (query, key), _, _ = batch
        for mine, other in zip(self.encoder, self.follower, strict=True):
            query = mine(query)
            with torch.no_grad():
                key = other(key)
        loss = self.criterion(query, key)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


pl.seed_everything(1)
pictures = torchvision.datasets.FakeData(size=32, image_size=(3, 48, 48), num_classes=4)
dataset = LightlyDataset.from_torch_dataset(pictures, transform=MoCoV2Transform(input_size=32))
data = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=MultiViewCollate())
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, strategy=recording.strategy())
trainer.fit(MoCo(), data)
