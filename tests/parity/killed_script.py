"""Train until a point of the second step, say so, and wait to be killed. Started by ``test_killed``.

``python -m tests.parity.killed_script WHAT POINT DIRECTORY``
"""

import functools
import os
import sys
from pathlib import Path

import torch

from lightning_ssd.parameters.files.weight_files import WeightFiles
from lightning_ssd.planning import update_memory
from tests.parity.models import causal_batch, gpt2, hugging_face_loss
from tests.support.everything_away import all_away, away_from_device
from tests.support.helpers import Session, Training

COUNTS = {}


def reached(what, number):
    """Stop at the chosen point when it is reached for the ``number``-th time."""
    COUNTS[what] = COUNTS.get(what, 0) + 1
    if what == sys.argv[2] and COUNTS[what] == number:
        print("reached", os.getpid(), flush=True)
        sys.stdin.read()


class Stops(torch.optim.AdamW):
    """Each subgroup is a step of its own."""

    def step(self, closure=None):
        if any(p.numel() > 5**4 for group in self.param_groups for p in group["params"]):  # no small copies
            reached("update", 6)
        return super().step(closure)


def model():
    """GPT-2, with points in its second block."""
    made = gpt2(hidden=160)
    layer = made.transformer.h[1].mlp.c_fc
    layer.register_forward_hook(lambda *_: reached("forward", 2))
    layer.weight.register_hook(lambda _: reached("backward", 2))
    return made


def optimizer(parameters):
    made = Stops(parameters, lr=1e-3)
    made.register_step_pre_hook(lambda *_: reached("between", 2))
    return made


def everything(directory, opens=all_away):
    """Weights, gradients and states, in files."""
    update_memory._MIN_SUBGROUP_BYTES = 64 << 10
    write = WeightFiles.write

    def writes(files, *args, **named):
        reached("taking over", 5)
        return write(files, *args, **named)

    WeightFiles.write = writes
    training = Training(model, causal_batch, hugging_face_loss, steps=1000, make_optimizer=optimizer)
    with opens(directory, activations="offload", per_parameter_optimizers="Stops") as offloader:
        training(Session(offloader, drained=True))


def device(directory):
    """The same of a device whose copies end late."""
    everything(directory, functools.partial(away_from_device, gradients="offload"))


PROGRAMS = {program.__name__: program for program in (everything, device)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Path(sys.argv[3]))
