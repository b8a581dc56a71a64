"""Offloaded optimizers give the very bits of plain ones, whatever happens between steps."""

import copy
import gc
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, StepLR

from lightning_ssd import Offloader, OffloadPolicy
from tests.support.odd_pairs import OddPair
from tests.support.optimizer_pairs import assert_same_states, store_of, used_bytes, wrapped

SHAPES = ((300, 40), (1000,), (64, 64), (7,), (2000, 100), (0, 4), (8, 3, 5, 5), (), *[(128, 150)] * 6)
"""Small ones stay in memory, (2000, 100) is cut, one is empty, one has no dimension."""

KINDS = {
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

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
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


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made.append(
        nn.Parameter(torch.randn(8, 16, 9, 9, generator=generator).to(dtype, memory_format=torch.channels_last))
    )
    made.append(nn.Parameter(torch.randn(70, 30, generator=generator).to(dtype).t()))
    return made


class Odd(OddPair):
    def __init__(self, make, dtype=torch.float32):
        super().__init__(lambda parameters: make(grouped(parameters)), partial(make_parameters, dtype))

    def take(self, weights):
        for p, q in zip(self.mine, weights, strict=True):
            p.data.copy_(q.data)


def grouped(parameters):
    return [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.05}]


def adamw(groups, lr=1e-3):
    return torch.optim.AdamW(groups, lr=lr)


pytestmark = pytest.mark.usefixtures("small_subgroups")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_plain_optimizer(kind, dtype, spill_dir):
    pair = Odd(KINDS[kind], dtype)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(6):
            skipped = {1: 2, 3: 4}.get(step)
            pair.step(optimizer, [number for number in range(len(pair.mine)) if number != skipped])
            pair.check()
        assert optimizer.stats.num_subgroups > store_of(optimizer).num_slots, "nothing would have to move"
        if optimizer.stats.state_bytes:
            assert optimizer.stats.written_bytes > optimizer.stats.state_bytes
            assert optimizer.stats.read_bytes > 0
        pair.check(optimizer)
    pair.check(optimizer)


def test_groups_schedulers_and_hooks_are_the_users(spill_dir):
    pair, calls = Odd(partial(adamw, lr=0.1)), list[str]()
    pair.inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    pair.inner.register_step_post_hook(lambda *_: calls.append("post"))
    schedulers = [StepLR(each, 1, 0.5) for each in (pair.inner, pair.twin)]
    with wrapped(pair.inner, spill_dir) as optimizer:
        schedulers += [LinearLR(each) for each in (optimizer, pair.twin)]
        for step in range(4):
            if step == 2:
                for each, parameters in ((optimizer, pair.mine), (pair.twin, pair.plain)):
                    parameters.append(nn.Parameter(torch.ones(50, 60)))
                    each.add_param_group({"params": parameters[-1:], "lr": 0.3})
                for scheduler in schedulers:
                    scheduler.base_lrs.append(0.3)
            pair.step(optimizer)
            if step < 2:
                for scheduler in schedulers:
                    scheduler.step()
        assert optimizer.param_groups is pair.inner.param_groups
    assert calls == ["pre", "post"] * 4
    pair.check()


def test_a_loaded_state_goes_on_as_the_plain_one(spill_dir):
    """From plain to ours, to ours with another cut, and back to plain."""
    pair, back = Odd(adamw), Odd(adamw)
    pair.train(pair.inner, 2)
    saved, weights = copy.deepcopy(pair.twin.state_dict()), copy.deepcopy(pair.plain)
    pair.inner = adamw(grouped(pair.mine), lr=0.9)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.set_gradients()
        optimizer.step()  # what is loaded must replace this
        pair.take(weights)
        optimizer.load_state_dict(saved)
        pair.train(optimizer, 2)
        pair.check(optimizer)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    back.inner.load_state_dict(torch.load(buffer, weights_only=True))
    back.take(pair.plain)
    back.plain, back.twin = pair.plain, pair.twin
    back.step(back.inner)
    back.check()


def test_a_state_dict_stays_what_it_was(spill_dir):
    """Training goes on and writes; what was handed out does not change, and gives its extents back when it dies."""
    pair = Odd(adamw)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 2)
        held = optimizer.state_dict()
        expected = copy.deepcopy(held)
        pair.train(optimizer, 6)
        assert_same_states(held, expected)
        optimizer.flush()
        used = used_bytes(optimizer)
        del held
        gc.collect()
        left = used_bytes(optimizer)
        assert used == 2 * left
        assert left == pytest.approx(optimizer.stats.state_bytes, rel=0.01)


def test_a_policy_that_keeps_gives_the_optimizer_back(spill_dir):
    inner = torch.optim.AdamW(make_parameters())
    with Offloader(policy=OffloadPolicy(activations="keep"), default_directory=spill_dir).open() as offloader:
        assert offloader.offload_optimizer(inner) is inner
