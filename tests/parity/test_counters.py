"""One storage under several version counters: equal storage and equal version do not mean equal bytes.

GRU and LSTM cells cut their gates with ``unsafe_chunk`` and edit each part in place, so that every part is at version 1
of a counter of its own. A cache that shares by storage and version alone hands out bytes from before the later edits,
and nothing notices.
"""

import pytest
import torch
from torch import nn

from tests.support.helpers import DRAINED, Setup, assert_same, open_offloader

CELLS = {
    "gru_cell": lambda: nn.GRUCell(64, 96),
    "lstm_cell": lambda: nn.LSTMCell(64, 96),
    "gru": lambda: nn.GRU(64, 96, num_layers=2, batch_first=True),
    "lstm": lambda: nn.LSTM(64, 96, num_layers=2, batch_first=True),
    "lstm_float64": lambda: nn.LSTM(64, 96, batch_first=True).double(),
    "lstm_projection": lambda: nn.LSTM(64, 96, proj_size=32, batch_first=True),
    "rnn": lambda: nn.RNN(64, 96, batch_first=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells(name, spill_dir):
    def program(session):
        module, found = CELLS[name](), []
        dtype = next(module.parameters()).dtype
        x = torch.randn((512, 64) if name.endswith("cell") else (16, 12, 64), dtype=dtype)
        for _ in range(3):
            module.zero_grad()
            with session.saved():
                out = module(x)
                while isinstance(out, tuple):
                    out = out[0]
                loss = out.square().sum()
            session.backward(loss)
            found.append([parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
        return found

    # Fused LSTM kernels save little through hooks.
    assert_same(program, spill_dir, setups=[DRAINED, Setup(verify="full")], moves=not name.startswith("lstm"))


def parts_edited_between_saves(session):
    """The minimal form: the second part is edited when the storage is on disk already."""
    x = torch.linspace(-1, 1, 40_000).reshape(2, 20_000).requires_grad_()
    with session.saved():
        first, second = (x * 3).unsafe_chunk(2)
        first = first.sigmoid_()
        session.drain()
        second = second.tanh_()
        loss = (first * second).sum()
    loss.backward()
    return x.grad


def the_same_memory_through_data(session):
    """``h.data`` is at version 0 of its own counter, like ``h``, and has other bytes by then."""
    factor = torch.linspace(-1, 1, 20_000).requires_grad_()
    h = torch.linspace(1, 2, 20_000)
    with session.saved():
        loss = (factor * h.clone()).sum()
        second = h.clone()
        kept = factor * second
        session.drain()
        alias = second.data.mul_(3)
        loss = loss + (factor * alias).sum() + 0 * kept.detach().sum()
    loss.backward()
    return factor.grad


@pytest.mark.parametrize("program", [parts_edited_between_saves, the_same_memory_through_data])
def test_edits_between_saves(program, spill_dir):
    assert_same(program, spill_dir, setups=[DRAINED], moves=False)


def test_detached_and_viewed_tensors_are_shared(spill_dir):
    """What has the same counter is written once: detach, views, and the tensor itself."""
    with open_offloader(spill_dir) as offloader:
        x = torch.randn(300, 300, requires_grad=True)
        with offloader.saved_tensors():
            y = x * 2
            loss = (y.sin() + y.detach().cos() * y + y.view(-1).exp().view(300, 300) + y.t().t().tanh()).sum()
        offloader.flush()
        # y, y.detach().cos(), and the results of exp and tanh: four storages, whatever number of tensors over y.
        assert offloader.stats.num_saved == 4
        loss.backward()
