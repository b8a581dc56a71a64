"""Whole trainings, bit for bit: the ways in which people train."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.models import (
    Perceptrons,
    adapted_perceptrons,
    floats,
    gpt2_training,
    mean_square,
)
from tests.support.helpers import DRAINED, SETUPS, Batch, Session, Training, assert_parity, assert_same, open_offloader


def inputs(step: int) -> Batch:
    return {"x": floats(step, 6, 17, 40)}


def perceptrons(**settings: Any) -> Training:
    return Training(lambda: Perceptrons(**settings), inputs, mean_square)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "alternate"])
def test_checkpointed_blocks(mode: str, tmp_path: Path) -> None:
    def with_gradient(step: int) -> Batch:
        # Re-entrant checkpointing trains nothing unless an input of the block requires gradients.
        return {"x": floats(step, 6, 17, 40).requires_grad_()}

    assert_parity(replace(perceptrons(mode=mode, dropout=0.2), make_batch=with_gradient), tmp_path)


def test_autocast_bfloat16(tmp_path: Path) -> None:
    assert_parity(gpt2_training(autocast=torch.bfloat16), tmp_path)


def test_accumulation_over_micro_batches(tmp_path: Path) -> None:
    assert_parity(gpt2_training(num_micro_batches=3, dropout=0.1, layers=1), tmp_path)


def test_dropout(tmp_path: Path) -> None:
    assert_parity(perceptrons(dropout=0.3), tmp_path)


def test_frozen_backbone(tmp_path: Path) -> None:
    def freeze(model: nn.Module) -> nn.Module:
        assert isinstance(model, Perceptrons)
        model.blocks[:2].requires_grad_(False)
        return model

    assert_parity(replace(perceptrons(), prepare=freeze), tmp_path)


def test_low_rank_adapters(tmp_path: Path) -> None:
    assert_parity(Training(adapted_perceptrons, inputs, mean_square), tmp_path)


def test_tied_weights(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(311, 40)
            self.body = Perceptrons(num_blocks=2)
            self.head = nn.Linear(40, 311, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.body(self.embedding(x))
            # The same weight once more, through views that are not the parameter object.
            return self.head(hidden) + hidden @ self.embedding.weight.t()[:, :311]

    def batch(step: int) -> Batch:
        return {"x": torch.randint(0, 311, (4, 21), generator=torch.Generator().manual_seed(step))}

    assert_parity(Training(Tied, batch, mean_square), tmp_path)


def test_depth_and_length_change_from_step_to_step(tmp_path: Path) -> None:
    """What earlier steps taught the prefetcher is wrong in every step."""

    class Jumping(Perceptrons):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = itertools.islice(itertools.cycle(range(4)), x.shape[1] % 4, x.shape[1] % 4 + x.shape[0] % 4 + 1)
            for number in order:
                x = x + self.blocks[number](x)
            return x

    def batch(step: int) -> Batch:
        return {"x": floats(step, 1 + step % 5, 9 + 7 * (step % 3), 40)}

    assert_parity(Training(Jumping, batch, mean_square, steps=12), tmp_path)


def test_in_place_activations_and_views(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(40, 120)
            self.last = nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, value, rest = self.first(x).relu_().chunk(3, dim=-1)
            mixed = gate.sigmoid() * value + rest.transpose(0, 1).contiguous().transpose(0, 1)
            mixed[..., :5] *= 2
            return self.last(mixed.masked_fill(mixed > 1, 0.5))

    assert_parity(Training(InPlace, inputs, mean_square), tmp_path)


def test_worker_processes_of_a_data_loader(tmp_path: Path) -> None:
    """Forked children copy our threads' locks and file descriptors, and exit while the parent trains."""

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return floats(index, 17, 40)

    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=2)
        session.register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
            for batch in loader:
                with session.saved():
                    loss = model(batch).square().mean()
                session.drain()
                loss.backward()
                session.end()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return losses, [parameter.detach() for parameter in model.parameters()]

    assert_same(program, tmp_path, setups=SETUPS[:2])


def test_two_models_in_turns(tmp_path: Path) -> None:
    """As in adversarial training: two graphs of different shape, each with its own backward."""

    def program(session: Session) -> Any:
        one, two = Perceptrons(num_blocks=2), Perceptrons(num_blocks=3, width=24)
        shrink = nn.Linear(40, 24)
        modules = nn.ModuleList([one, two, shrink])
        session.register(modules)
        optimizers = [
            torch.optim.Adam([*one.parameters()]),
            torch.optim.Adam([*two.parameters(), *shrink.parameters()]),
        ]
        for step in range(4):
            with session.saved():
                made = one(floats(step, 90, 40))
                judged = two(shrink(made.detach())).square().mean()
            session.drain()
            judged.backward()
            session.end()
            optimizers[1].step()
            with session.saved():
                fooled = two(shrink(made)).square().mean()
            session.drain()
            fooled.backward()
            session.end()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [parameter.detach() for parameter in modules.parameters()]

    assert_same(program, tmp_path)


def test_optimizer_that_calls_the_model_several_times(tmp_path: Path) -> None:
    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=2)
        session.register(model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with session.saved():
                loss = model(floats(0, 90, 40)).square().mean()
            session.drain()
            loss.backward()
            session.end()
            losses.append(loss.detach())
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return losses, [parameter.detach() for parameter in model.parameters()]

    assert_same(program, tmp_path)


def test_optimizer_inside_backward(tmp_path: Path) -> None:
    """Each weight is updated as soon as its gradient is there, while backward goes on."""

    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=3)
        session.register(model)

        def update(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for step in range(3):
            with session.saved():
                loss = model(floats(step, 60, 40)).square().mean()
            session.drain()
            loss.backward()
            session.end()
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(program, tmp_path)


def test_two_offloaders_side_by_side(tmp_path: Path) -> None:
    """Each with its own directory; the innermost one acts."""

    def program(session: Session) -> Any:
        model = Perceptrons(num_blocks=3)
        x = floats(0, 60, 40).requires_grad_()
        with open_offloader(tmp_path / "other") as other:
            with session.saved():
                y = model(x)
                with other.saved_tensors():
                    z = y.sin() * y
                loss = z.exp().sum()
            other.flush()
            session.drain()
            loss.backward()
            assert other.stats.bytes_read > 0
        session.end()
        return x.grad, [parameter.grad for parameter in model.parameters()]

    assert_same(program, tmp_path)


def test_two_threads_of_torch(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_parity(gpt2_training(layers=1, steps=2), tmp_path, setups=[DRAINED])
    finally:
        torch.set_num_threads(before)
