"""One storage under several version counters: equal storage and equal version do not mean equal bytes.

GRU and LSTM cells cut their gates with ``unsafe_chunk`` and edit each part in place, so that every part is at version 1
of a counter of its own. A cache that shares by storage and version alone hands out bytes from before the later edits,
and nothing notices.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy

Program = Callable[[Offloader], Tensor]
Makers = dict[str, Callable[[], nn.Module]]

CELLS: Makers = {
    "gru_cell": lambda: nn.GRUCell(64, 96),
    "lstm_cell": lambda: nn.LSTMCell(64, 96),
    "gru": lambda: nn.GRU(64, 96, num_layers=2, batch_first=True),
    "lstm": lambda: nn.LSTM(64, 96, num_layers=2, batch_first=True),
    "lstm_float64": lambda: nn.LSTM(64, 96, batch_first=True).double(),
    "lstm_projection": lambda: nn.LSTM(64, 96, proj_size=32, batch_first=True),
    "rnn": lambda: nn.RNN(64, 96, batch_first=True),
}


def offloader(directory: Path, *, verify: str = "off") -> Offloader:
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0, verify=verify)  # type: ignore[arg-type]
    return Offloader(policy=policy, hardware=HardwareProfile(paths=directory))


def gradients(module: nn.Module, x: Tensor, hooks: Offloader | None) -> list[Tensor]:
    module.zero_grad()

    def forward() -> Tensor:
        out = module(x)
        while isinstance(out, tuple):
            out = out[0]
        return out.square().sum()

    if hooks is None:
        forward().backward()
    else:
        with hooks.saved_tensors():
            loss = forward()
        hooks.flush()
        loss.backward()
        hooks.end_backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells(spill_dir: Path, name: str, verify: str) -> None:
    torch.manual_seed(0)
    module = CELLS[name]()
    dtype = next(module.parameters()).dtype
    shape = (512, 64) if name.endswith("cell") else (16, 12, 64)
    x = torch.randn(shape, dtype=dtype)
    expected = gradients(module, x, None)
    with offloader(spill_dir, verify=verify) as hooks:
        for _ in range(3):
            got = gradients(module, x, hooks)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        if not name.startswith("lstm"):  # fused LSTM kernels save little through hooks
            assert hooks.stats.bytes_saved > 0


def both(program: Callable[[Offloader | None], Tensor], directory: Path) -> None:
    with offloader(directory) as hooks:
        assert torch.equal(program(hooks), program(None))


def test_parts_edited_between_saves(spill_dir: Path) -> None:
    """The minimal form: the second part is edited when the storage is on disk already."""

    def program(hooks: Offloader | None) -> Tensor:
        x = torch.linspace(-1, 1, 40_000).reshape(2, 20_000).requires_grad_()
        with hooks.saved_tensors() if hooks else torch.enable_grad():
            first, second = (x * 3).unsafe_chunk(2)
            first = first.sigmoid_()
            if hooks:
                hooks.flush()
            second = second.tanh_()
            loss = (first * second).sum()
        loss.backward()
        assert x.grad is not None
        return x.grad

    both(program, spill_dir)


def test_the_same_memory_through_data(spill_dir: Path) -> None:
    """``h.data`` is at version 0 of its own counter, like ``h``, and has other bytes by then."""

    def program(hooks: Offloader | None) -> Tensor:
        factor = torch.linspace(-1, 1, 20_000).requires_grad_()
        h = torch.linspace(1, 2, 20_000)
        with hooks.saved_tensors() if hooks else torch.enable_grad():
            first = factor * h.clone()
            loss = first.sum()
            second = h.clone()
            kept = factor * second
            if hooks:
                hooks.flush()
            alias = second.data.mul_(3)
            loss = loss + (factor * alias).sum() + 0 * kept.detach().sum()
        loss.backward()
        assert factor.grad is not None
        return factor.grad

    both(program, spill_dir)


def test_detached_and_viewed_tensors_are_shared(spill_dir: Path) -> None:
    """What has the same counter is written once: detach, views, and the tensor itself."""
    with offloader(spill_dir) as hooks:
        x = torch.randn(300, 300, requires_grad=True)
        with hooks.saved_tensors():
            y = x * 2
            loss = (y.sin() + y.detach().cos() * y + y.view(-1).exp().view(300, 300) + y.t().t().tanh()).sum()
        hooks.flush()
        # y, y.detach().cos(), and the results of exp and tanh: four storages, whatever number of tensors over y.
        assert hooks.stats.num_saved == 4
        loss.backward()
