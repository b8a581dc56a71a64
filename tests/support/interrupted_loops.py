"""Trains until somebody presses Ctrl-C, with a Trainer, with Fabric, or in two processes. Started by tests."""

import sys
import threading
from pathlib import Path

import torch

from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from tests.support.loops import make_fabric
from tests.support.trainers import Net, make_trainer, offload_strategy

AWAY = {"activations": "offload", "optimizer_states": "offload", "min_tensor_bytes": 1024}
EVERYTHING = {"parameters": "offload", "gradients": "offload"}


class Telling(Net):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            print("training", flush=True)
        return super().training_step(batch, batch_idx)


def by_trainer(directory, devices, away):
    make_trainer(offload_strategy(directory, **away), directory, devices=devices, max_epochs=-1).fit(Telling())


def by_fabric(directory, away):
    fabric = make_fabric(offload_strategy(directory, SSDOffloadFabricStrategy, **away))
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


def main(how, directory, more):
    torch.set_num_threads(1)
    away = AWAY | (EVERYTHING if more == "everything" else {})
    try:
        if how == "fabric":
            by_fabric(Path(directory), away)
        else:
            by_trainer(Path(directory), 2 if how == "ddp" else 1, away)
    except (KeyboardInterrupt, SystemExit):
        ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]
        print("interrupted", ours, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
