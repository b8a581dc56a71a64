"""Operations of PyTorch that fill a tensor after they have saved it, and count no version."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import DRAINED, assert_same


class MovesWithin(TorchDispatchMode):
    """A drive that is as fast as can be, while it is entered. Without an offloader it counts alone.

    Attributes:
        names: of the operations.
    """

    def __init__(self, offloader):
        super().__init__()
        self.names = set()
        self._offloader = offloader

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        if self._offloader is not None:
            # Past the guard of flush(): the mode sees our own operations, too, none of which is under a lock.
            self._offloader._opened().flush()
        return func(*args, **(kwargs or {}))


ROWS = 256


FUNCTIONS = {
    "nn.RReLU": nn.RReLU(),
    "nn.RReLU(inplace)": nn.RReLU(inplace=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: torch.rrelu_(x, training=True),
    "rrelu twice": lambda x: F.rrelu(F.rrelu(x, training=True).neg(), training=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_an_operation_fills_after_saving_it(name, tmp_path):
    def program(session):
        weight = torch.randn(ROWS, ROWS, requires_grad=True)
        with session.saved(), MovesWithin(session.offloader) as mode:
            loss = FUNCTIONS[name](weight * 2).square().sum()
        session.backward(loss)
        assert any("rrelu_with_noise" in name for name in mode.names)
        return weight.grad

    assert_same(program, tmp_path, setups=[DRAINED])
