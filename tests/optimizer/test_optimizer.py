"""Offloaded optimizers give the very bits of plain ones, whatever happens between steps."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError, OffloaderClosedError
from tests.support.optimizer_pairs import (
    assert_same_parameters,
    assert_same_states,
    files_of,
    store_of,
    used_bytes,
    wrapped,
)

SHAPES = ((300, 40), (1000,), (64, 64), (7,), (2000, 100), (0, 4), (8, 3, 5, 5), (), *[(128, 150)] * 6)
"""Small ones stay in memory, (2000, 100) is cut, one is empty, one has no dimension."""

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_loop_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3),
}


class Lion(Optimizer):
    """As a third party would write it: plain step, no decorators, counts in its group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                p.add_(torch.sign(average * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                state["exp_avg"] = average * beta2 + p.grad * (1 - beta2)  # replaced, not updated in place


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made.append(
        nn.Parameter(torch.randn(8, 16, 9, 9, generator=generator).to(dtype, memory_format=torch.channels_last))
    )
    made.append(nn.Parameter(torch.randn(70, 30, generator=generator).to(dtype).t()))
    return made


def set_gradients(parameters: list[nn.Parameter], step: int, *, skip: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if number in skip else gradient


def grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.05}]


pytestmark = pytest.mark.usefixtures("small_subgroups")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_plain_optimizer(kind: str, dtype: torch.dtype, spill_dir: Path) -> None:
    mine, plain = make_parameters(dtype), make_parameters(dtype)
    reference = KINDS[kind](grouped(plain))
    with wrapped(KINDS[kind](grouped(mine)), spill_dir) as optimizer:
        for step in range(6):
            skip = (2,) if step == 1 else (4,) if step == 3 else ()
            set_gradients(mine, step, skip=skip)
            set_gradients(plain, step, skip=skip)
            optimizer.step()
            reference.step()
            assert_same_parameters(mine, plain)
        assert optimizer.stats.num_subgroups > store_of(optimizer).num_slots, "nothing would have to move"
        if optimizer.stats.state_bytes:
            assert optimizer.stats.written_bytes > optimizer.stats.state_bytes
            assert optimizer.stats.read_bytes > 0
        assert_same_states(optimizer.state_dict(), reference.state_dict())
    assert_same_states(optimizer.state_dict(), reference.state_dict())


def test_two_directories_share_the_states(spill_dir: Path) -> None:
    parameters, plain = make_parameters(), make_parameters()
    reference = torch.optim.AdamW(plain)
    first, second = spill_dir / "one", spill_dir / "two"
    with wrapped(torch.optim.AdamW(parameters), first, second) as optimizer:
        for step in range(5):
            set_gradients(parameters, step)
            set_gradients(plain, step)
            optimizer.step()
            reference.step()
        assert all(progress.written_bytes > 0 for progress in files_of(optimizer).progress())
    assert_same_parameters(parameters, plain)


def test_groups_schedulers_and_hooks_are_the_users(spill_dir: Path) -> None:
    mine, plain = make_parameters(), make_parameters()
    calls: list[str] = []
    inner, reference = torch.optim.AdamW(mine, lr=0.1), torch.optim.AdamW(plain, lr=0.1)
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    before = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    with wrapped(inner, spill_dir) as optimizer:
        after = torch.optim.lr_scheduler.LinearLR(optimizer)
        schedulers = [torch.optim.lr_scheduler.StepLR(reference, 1, 0.5), torch.optim.lr_scheduler.LinearLR(reference)]
        extra, extra_plain = nn.Parameter(torch.ones(50, 60)), nn.Parameter(torch.ones(50, 60))
        for step in range(4):
            set_gradients(mine, step)
            set_gradients(plain, step)
            extra.grad = extra_plain.grad = torch.full((50, 60), 0.5)
            if step == 2:
                optimizer.add_param_group({"params": [extra], "lr": 0.3})
                reference.add_param_group({"params": [extra_plain], "lr": 0.3})
                for scheduler in (before, after, *schedulers):
                    scheduler.base_lrs.append(0.3)
            optimizer.step()
            reference.step()
            if step < 2:
                for scheduler in (before, after, *schedulers):
                    scheduler.step()
        assert optimizer.param_groups is inner.param_groups
    assert calls == ["pre", "post"] * 4
    assert_same_parameters([*mine, extra], [*plain, extra_plain])


def test_a_closure_is_called_once_with_gradients_on(spill_dir: Path) -> None:
    parameters = [nn.Parameter(torch.ones(40, 40))]
    with wrapped(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), spill_dir) as optimizer:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameters[0] ** 2).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 1600.0
    assert torch.allclose(parameters[0], torch.tensor(0.8))


def test_a_loaded_state_goes_on_as_the_plain_one(spill_dir: Path) -> None:
    """From plain to ours, to ours with another cut, and back to plain."""
    plain, mine, back = make_parameters(), make_parameters(), make_parameters()
    reference = torch.optim.AdamW(grouped(plain))
    for step in range(2):
        set_gradients(plain, step)
        reference.step()
    saved = copy.deepcopy(reference.state_dict())
    for p, q in zip(mine, plain, strict=True):
        p.data.copy_(q.data)
    with wrapped(torch.optim.AdamW(grouped(mine), lr=0.9), spill_dir) as optimizer:
        set_gradients(mine, 7)
        optimizer.step()  # what is loaded must replace this
        for p, q in zip(mine, plain, strict=True):
            p.data.copy_(q.data)
        optimizer.load_state_dict(saved)
        for step in range(2, 4):
            set_gradients(mine, step)
            set_gradients(plain, step)
            optimizer.step()
            reference.step()
        assert_same_parameters(mine, plain)
        assert_same_states(optimizer.state_dict(), reference.state_dict())
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    returned = torch.optim.AdamW(grouped(back))
    returned.load_state_dict(torch.load(buffer, weights_only=True))
    for p, q in zip(back, plain, strict=True):
        p.data.copy_(q.data)
    set_gradients(back, 4)
    set_gradients(plain, 4)
    returned.step()
    reference.step()
    assert_same_parameters(back, plain)


def test_a_state_dict_stays_what_it_was(spill_dir: Path) -> None:
    """Training goes on and writes; what was handed out does not change, and gives its extents back when it dies."""
    parameters = make_parameters()
    with wrapped(torch.optim.AdamW(parameters), spill_dir) as optimizer:
        for step in range(2):
            set_gradients(parameters, step)
            optimizer.step()
        held = optimizer.state_dict()
        expected = copy.deepcopy(held)
        for step in range(2, 8):
            set_gradients(parameters, step)
            optimizer.step()
        assert_same_states(held, expected)
        optimizer.flush()
        used = used_bytes(optimizer)
        del held
        gc.collect()
        left = used_bytes(optimizer)
        assert used == 2 * left
        assert left == pytest.approx(optimizer.stats.state_bytes, rel=0.01)


def test_disk_use_does_not_grow(spill_dir: Path) -> None:
    parameters = make_parameters()
    with wrapped(torch.optim.AdamW(parameters), spill_dir) as optimizer:
        sizes = []
        for step in range(12):
            set_gradients(parameters, step)
            optimizer.step()
            optimizer.flush()
            sizes.append(used_bytes(optimizer))
        assert len(set(sizes)) == 1


class Coupled(Optimizer):
    """Its learning rate depends on all gradients, as in D-Adaptation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = float(sum(p.grad.abs().sum() for p in group["params"]))
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["d"])


def test_what_couples_parameters_is_refused(spill_dir: Path) -> None:
    parameters = make_parameters()
    with pytest.raises(ConfigError, match="LBFGS"), wrapped(torch.optim.LBFGS(parameters), spill_dir):
        pass
    with (
        pytest.raises(ConfigError, match=r"names Coupled, which .* changes its param_groups\[0\] \['d'\] otherwise"),
        wrapped(Coupled(parameters), spill_dir),
    ):
        pass


def test_after_close_there_is_a_state_but_no_step(spill_dir: Path) -> None:
    parameters = make_parameters()
    with wrapped(torch.optim.AdamW(parameters), spill_dir) as optimizer:
        set_gradients(parameters, 0)
        optimizer.step()
        expected = copy.deepcopy(optimizer.state_dict())
    assert_same_states(optimizer.state_dict(), expected)
    assert optimizer.stats.num_steps == 1
    with pytest.raises(OffloaderClosedError):
        optimizer.step()


def test_a_policy_that_keeps_gives_the_optimizer_back(spill_dir: Path) -> None:
    inner = torch.optim.AdamW(make_parameters())
    with Offloader(policy=OffloadPolicy(activations="keep"), default_directory=spill_dir).open() as offloader:
        assert offloader.offload_optimizer(inner) is inner
