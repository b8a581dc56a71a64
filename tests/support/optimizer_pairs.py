"""An offloaded optimizer and its plain twin, side by side."""

from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.faults import FaultyBackend
from tests.support.state_stores import used_bytes as store_bytes

Shapes = tuple[tuple[int, ...], ...]
TEN = ((128, 150),) * 10


class Pair:
    """The same parameters twice: one for an offloaded optimizer, one for a plain twin."""

    def __init__(self, make, shapes=TEN):
        generator = torch.Generator().manual_seed(1)
        self.mine = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.plain = [nn.Parameter(p.detach().clone()) for p in self.mine]
        self.inner, self.twin = make(self.mine), make(self.plain)
        self._generator = generator

    def set_gradients(self, active=None):
        for number, (mine, plain) in enumerate(zip(self.mine, self.plain, strict=True)):
            mine.grad = plain.grad = None
            if active is None or number in active:
                gradient = torch.randn(mine.shape, generator=self._generator).to(mine.dtype)
                mine.grad, plain.grad = gradient, gradient.clone()

    def step(self, optimizer, active=None):
        self.set_gradients(active)
        optimizer.step()
        self.twin.step()

    def train(self, optimizer, steps):
        for _ in range(steps):
            self.step(optimizer)

    def check(self, optimizer=None):
        assert_same_parameters(self.mine, self.plain)
        if optimizer is not None:
            assert_same_states(optimizer.state_dict(), self.twin.state_dict())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def assert_same_parameters(mine, plain):
    for number, (one, other) in enumerate(zip(mine, plain, strict=True)):
        assert torch.equal(one, other), f"parameter {number} of shape {tuple(one.shape)}"


def assert_same_states(mine, plain):
    assert mine["param_groups"] == plain["param_groups"]
    assert mine["state"].keys() == plain["state"].keys()
    for number, state in plain["state"].items():
        if not isinstance(state, dict):  # what all parameters share
            assert same(mine["state"][number], state)
            continue
        assert list(mine["state"][number]) == list(state)
        for key, value in state.items():
            assert same(mine["state"][number][key], value), (number, key)


def equal(one, other):
    """Where both are not a number they are equal."""
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def same(one, other):
    if isinstance(one, torch.Tensor) is not isinstance(other, torch.Tensor):
        return False
    if isinstance(other, torch.Tensor):
        if other.layout != torch.strided:
            return bool(one.layout == other.layout) and same(one.to_dense(), other.to_dense())
        is_alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return is_alike and equal(one, other)
    if isinstance(other, list):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@contextmanager
def opened(*directories, faults=None, **kwargs):
    """An offloader whose optimizers' backends are put into ``faults``."""

    def wrap(backend):
        if faults is None:
            return backend
        faults.append(FaultyBackend(backend))
        return faults[-1]

    policy = OffloadPolicy(
        activations="keep",
        optimizer_states="offload",
        verify=kwargs.pop("verify", "full"),
        per_parameter_optimizers=kwargs.pop("declared", ()),
    )
    hardware = HardwareProfile(paths=[str(directory) for directory in directories], **kwargs)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap).open() as offloader:
        yield offloader


@contextmanager
def wrapped(inner, *directories, **kwargs):
    """Declared, whatever it is."""
    with opened(*directories, declared=type(inner).__name__, **kwargs) as offloader:
        optimizer = offloader.offload_optimizer(inner)
        assert isinstance(optimizer, OffloadedOptimizer)
        yield optimizer


@contextmanager
def offloaded_pair(make, directory, shapes=TEN, *, steps=0):
    """A pair, one of which is wrapped, after so many steps."""
    pair = Pair(make, shapes)
    with wrapped(pair.inner, directory) as optimizer:
        pair.train(optimizer, steps)
        yield pair, optimizer


@contextmanager
def offloaded(inner, *directories, **kwargs):
    """Wrapped, on drives that fail as the test says."""
    faults = []
    with wrapped(inner, *directories, faults=faults, **kwargs) as optimizer:
        yield optimizer, faults[-1]


def store_of(optimizer):
    return optimizer._states.store


def files_of(optimizer):
    return optimizer._states.files


def partition_of(optimizer):
    return optimizer._states.partition


def lent_of(optimizer):
    """By parameter, what is in memory because somebody holds it."""
    return optimizer._states.lent


def used_bytes(optimizer):
    """Of all directories."""
    return store_bytes(store_of(optimizer))


class Nested(Optimizer):
    """Keeps a list of tensors, a dictionary, a late state, and swaps two buffers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, past=[], a=torch.zeros_like(p), b=torch.ones_like(p), notes={"sum": p.sum()})
                state["count"] += 1
                state["past"] = [*state["past"][-1:], p.grad.clone()]
                state["a"].add_(p.grad)
                state["a"], state["b"] = state["b"], state["a"]
                if state["count"] == 3:
                    state["late"] = p.clone()
                if state["count"] == 5:
                    del state["late"]
                    state["a"] = state["a"].double()
                p.sub_(state["a"].to(p.dtype), alpha=group["lr"] / group["calls"])
                p.sub_(state["past"][0], alpha=group["lr"])
