"""Trains until somebody presses Ctrl-C, with a Trainer, with Fabric, or in two processes. Started by tests."""

import sys
import threading
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset

from lightning_ssd import HardwareProfile, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch, index):
        if index == 5:
            print("training", flush=True)
        return self.layers(batch).tanh().square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(64, 1 << 20), batch_size=64)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


MORE = {}
"""What is offloaded besides activations and states."""


def settings(directory):
    return {
        "policy": OffloadPolicy(activations="offload", optimizer_states="offload", min_tensor_bytes=1024, **MORE),
        "hardware": HardwareProfile(paths=[directory], allow_unsuitable_paths=True),
    }


def by_trainer(directory, devices):
    trainer = L.Trainer(
        strategy=SSDOffloadStrategy(**settings(directory)),
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net())


def by_fabric(directory):
    fabric = L.Fabric(strategy=SSDOffloadFabricStrategy(**settings(directory)), accelerator="cpu", devices=1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    step = 0
    with fabric.strategy:
        while True:
            fabric.backward(model(torch.randn(64, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 5:
                print("training", flush=True)


def main():
    how, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if "everything" in sys.argv[3:]:
        MORE.update(parameters="offload", gradients="offload")
    try:
        if how == "fabric":
            by_fabric(directory)
        else:
            by_trainer(directory, 2 if how == "ddp" else 1)
    except (KeyboardInterrupt, SystemExit):
        ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]
        print("interrupted", ours, flush=True)


if __name__ == "__main__":
    main()
