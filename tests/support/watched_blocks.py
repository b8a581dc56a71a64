"""Models of small blocks, and an observer that remembers what it is told."""

import functools

import torch
from torch import nn

from lightning_ssd.common.method_patch import MethodPatch


class Watch:
    """An observer that writes down what it is told."""

    recomputes_all = False

    def __init__(self, *, recompute=False, wants_inputs=False):
        self.recompute = recompute
        self.wants_inputs = wants_inputs
        self.told = []
        self.num_trials = 0

    def block_enters(self, name):
        self.told.append(name)
        return self.recompute

    def block_inputs(self, nbytes):
        self.told.append(nbytes)

    def block_is_kept(self):
        """Somebody else has decided."""

    def block_recomputed(self, sizes):
        """What is told of forward is enough."""

    def block_tried(self, begin_s, end_s):
        assert 0 < begin_s < end_s
        self.num_trials += 1

    def block_leaves(self):
        self.told.append("left")


class Half(nn.Module):
    """A small block."""

    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, *, scale=0.5, extra=None):
        """Halves."""
        return self.linear(x).tanh() * scale


def chain(num_blocks=2):
    torch.manual_seed(1)
    return nn.Sequential(*[Half() for _ in range(num_blocks)])


LAYER = functools.partial(nn.TransformerEncoderLayer, 8, 2, 8, batch_first=True)


def nothing_of_ours(model):
    """Each module has the forward of its class, and knows no other way to be copied than that of its class."""
    for module in model.modules():
        assert not {"forward", "__getstate__", "_compiled_call_impl"} & set(vars(module))
        assert not any(isinstance(value, MethodPatch) for value in vars(module).values())
