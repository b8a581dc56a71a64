"""Odd states, parameters and gradients of offloaded optimizers: the bits of the plain ones."""

import copy

import pytest
import torch
from torch import nn

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step import elementwise
from tests.support.odd_pairs import OddPair
from tests.support.optimizer_pairs import (
    Nested,
    Pair,
    adamw,
    assert_same_parameters,
    assert_same_states,
    offloaded,
    offloaded_pair,
    opened,
    partition_of,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("small_subgroups")


# -- odd states, parameters and gradients ------------------------------------------------------------------------------


def _channels_last(p):
    return nn.Parameter(p.detach().view(10, 16, 10, 12).to(memory_format=torch.channels_last))


ODD = {
    "complex": lambda p: nn.Parameter(torch.view_as_complex(p.detach().view(-1, 2).clone())),
    "double": lambda p: nn.Parameter(p.detach().double()),
    "bfloat16": lambda p: nn.Parameter(p.detach().bfloat16()),
    "channels last": _channels_last,
    "transposed": lambda p: nn.Parameter(p.detach().t()),
    "view of a larger one": lambda p: nn.Parameter(torch.cat([p.detach(), p.detach()])[3:131]),
}


@pytest.mark.parametrize(
    ("odd", "large"), [*((odd, False) for odd in ODD), *((odd, True) for odd in ("double", "bfloat16", "complex"))]
)
def test_parameters_of_all_kinds(odd, large, spill_dir):

    def parameters():
        generator = torch.Generator().manual_seed(3)
        shapes = ((600, 200),) * 3 if large else ((128, 150),) * 4
        return [ODD[odd](nn.Parameter(torch.randn(shape, generator=generator))) for shape in shapes]

    pair = OddPair(adamw, parameters)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 4)
        pair.check(optimizer)
        assert (odd, large) != ("double", True) or len(partition_of(optimizer).places[0]) > 1, "it may be cut"
        optimizer.load_state_dict(copy.deepcopy(pair.twin.state_dict()))
        pair.check(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["sparse_adam", "adagrad", "sgd"])
def test_sparse_gradients(kind, spill_dir):
    """Of parameters that are not cut; those of sliced ones are refused by name."""
    makers = {
        "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=1e-2),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    with offloaded_pair(makers[kind], spill_dir, shapes=((40, 30),) * 9) as (pair, optimizer):
        for step in range(4):
            for mine, plain in zip(pair.mine, pair.plain, strict=True):
                rows = torch.tensor([[step, step + 5, step + 20]])
                gradient = torch.sparse_coo_tensor(
                    rows, torch.full((3, 30), 0.5 + step), (40, 30), check_invariants=True
                )
                mine.grad, plain.grad = gradient.coalesce(), gradient.clone().coalesce()
            optimizer.step()
            pair.twin.step()
        pair.check(optimizer)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has gradients of one type alone")
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_gradients_of_another_type_than_their_parameters(kind, dtype, spill_dir):
    """Of parameters that are cut, and of copies that are tried. ``None`` allows any type."""
    pair = Pair(lambda p: kind(p, lr=0.1), shapes=((300, 200), (7,), (128, 150)))
    for p in (*pair.mine, *pair.plain):
        p.grad_dtype = dtype
    with offloaded(pair.inner, spill_dir) as (optimizer, _):
        for _ in range(3):
            for mine, plain in zip(pair.mine, pair.plain, strict=True):
                mine.grad = torch.randn(mine.shape, generator=pair._generator).bfloat16()
                plain.grad = mine.grad.clone()
            optimizer.step()
            pair.twin.step()
        pair.check(optimizer)


@pytest.mark.parametrize("first", [(), (0,), (0, 4)])
def test_parameters_of_one_number_or_none_that_have_states_at_once(first, spill_dir):
    """How large the states of others will be is tried with the first one of a kind."""
    pair = Pair(lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5), shapes=(first, (300, 200)))
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 3)
        pair.check(optimizer)


def test_data_of_another_shape_is_refused(spill_dir):
    with offloaded_pair(adamw, spill_dir, ((300, 200), (128, 150)), steps=1) as (pair, optimizer):
        pair.mine[0].grad = None
        pair.mine[0].data = torch.ones(200, 300)
        pair.mine[0].grad = torch.ones(200, 300)
        with pytest.raises(RuntimeError, match="Make a new optimizer"):
            optimizer.step()


def test_parameters_over_the_same_memory_are_refused_before_a_step(spill_dir):
    with offloaded_pair(adamw, spill_dir, steps=1) as (pair, optimizer):
        for parameters in (pair.mine, pair.plain):
            parameters[7].data = parameters[0].data  # as weights are tied by mistake
        pair.set_gradients()
        with pytest.raises(ConfigError, match="lie within the same memory"):
            optimizer.step()
        pair.step(optimizer, [number for number in range(10) if number != 7])  # one of them is frozen
        for parameters in (pair.mine, pair.plain):
            parameters[7].data = parameters[7].data.clone()
        pair.step(optimizer)
        pair.check(optimizer)


class Ragged(torch.optim.SGD):
    """Rounds the last element of each tensor otherwise, as vectorised loops may."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                p[-1] -= group["lr"] / 16


@pytest.mark.parametrize("rate", [0.0, 0.1, torch.tensor(0.0)])
def test_a_rate_of_zero_does_not_hide_that_slices_differ(rate):
    """Warm-ups begin at 0, and trials are made before the first step."""
    optimizer = Ragged([nn.Parameter(torch.ones(300, 200))], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    trials = elementwise.UpdateProbe(optimizer, kind=Ragged, has_master=lambda p: False)
    assert not trials.may_slice(optimizer.param_groups[0]["params"][0], 0)
    assert optimizer.param_groups[0]["lr"] is rate


def test_steps_that_gradients_go_through_are_refused(spill_dir):
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match="differentiable"):
        offloader.offload_optimizer(torch.optim.Adam([nn.Parameter(torch.ones(3))], differentiable=True))
    with offloaded_pair(adamw, spill_dir, steps=1) as (pair, optimizer):
        optimizer.param_groups[0]["differentiable"] = True
        with pytest.raises(ConfigError, match="differentiable"):
            optimizer.step()
        optimizer.param_groups[0]["differentiable"] = False
        pair.step(optimizer)
        pair.check()


def _lazy():
    torch.manual_seed(3)
    return nn.Sequential(nn.LazyLinear(200), nn.Tanh(), nn.LazyLinear(300), nn.Linear(300, 8)), torch.randn(16, 150)


@pytest.mark.parametrize("make", [adamw, Nested])
@pytest.mark.parametrize("first", ["a step", "states that are read", "states that are loaded"])
def test_parameters_that_have_no_shape_before_the_first_batch(first, make, spill_dir):
    """Those of lazy modules. A state may be loaded before."""
    (mine, batch), (plain, _) = _lazy(), _lazy()
    twin = make(list(plain.parameters()))
    with offloaded(make(list(mine.parameters())), spill_dir) as (optimizer, _):
        if first == "states that are read":
            assert all(
                optimizer.state[p] == twin.state[q] for p, q in zip(mine.parameters(), plain.parameters(), strict=True)
            )
        if first == "states that are loaded":
            other, _ = _lazy()
            source = make(list(other.parameters()))
            _train(other, source, batch)
            optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
            twin.load_state_dict(copy.deepcopy(source.state_dict()))
            assert_same_states(optimizer.state_dict(), twin.state_dict())
        for _ in range(3):
            _train(mine, optimizer, batch)
            _train(plain, twin, batch)
        assert_same_parameters(list(mine.parameters()), list(plain.parameters()))
        assert_same_states(optimizer.state_dict(), twin.state_dict())
        assert len(partition_of(optimizer).parameters) == 6


def _train(model, optimizer, batch):
    torch.manual_seed(4)  # lazy modules draw their parameters
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def test_states_elsewhere_stay_there(spill_dir):
    """On another device, or none."""

    class Elsewhere(Nested):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["shape"] = torch.empty(p.shape, device="meta")
                state["m"] = state.get("m", torch.zeros_like(p)) + p.grad
                p.sub_(state["m"])

    with offloaded_pair(Elsewhere, spill_dir, steps=3) as (pair, optimizer):
        pair.check()
        assert optimizer.state_dict()["state"][3]["shape"].device.type == "meta"
