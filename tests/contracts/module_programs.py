"""Small random trainings in which something that a block depends on is not the same in backward as it was in forward.

A :class:`Change` says what, and when. Each undoes itself, so that a step that was refused can be repeated.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils import parametrize

from lightning_ssd.errors import RecomputeError

WIDTH = 8
MAX_ERRORS = 12
FACTOR = ContextVar("FACTOR", default=1.0)
ELSEWHERE = {"factor": 1.0}
"""Out of reach of every block."""


class Settings:
    """Something that blocks share."""

    def __init__(self):
        self.adapter = "one"


class Exponential(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x.exp()


class Block(nn.Module):
    """Depends on all sorts of things, and saves products with them."""

    def __init__(self, settings):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(0.5, 1.5, WIDTH))
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("one", "two")})
        self.gain = 1.0
        self.factors = [2.0]
        self.mask = None
        self.settings = settings
        parametrize.register_parametrization(self.linear, "bias", Exponential())

    def forward(self, x, function=None):
        y = self.dropout(self.linear(self.norm(x) * self.scale + self.shift) * self.gain * self.factors[0]).sin()
        y = (y * FACTOR.get() * ELSEWHERE["factor"]).sin()
        y = self.adapters[self.settings.adapter](y) if self.mask is None else y + self.mask
        y = (y * torch.full((WIDTH,), 1 / 3)).exp().to(x.dtype)
        heads = y.view(len(y), -1, 2, WIDTH // 2).transpose(1, 2)
        y = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(y.shape)
        return y.sin() if function is None else function(y.sin()).sin()


class Net(nn.Module):
    """A list of blocks."""

    def __init__(self, num_blocks):
        super().__init__()
        self.settings = Settings()
        self.blocks = nn.ModuleList(Block(self.settings) for _ in range(num_blocks))
        self.gives_functions = False

    def forward(self, x):
        x = x + 1
        for number, block in enumerate(self.blocks):
            functions = [lambda y: y * (number + 1)] if self.gives_functions else []  # noqa: B023 (which is the point)
            x = x + block(x, *functions)
        return x.square().mean()


@dataclass(frozen=True)
class Change:
    """Of what is there in forward, and no longer in backward; or the other way round."""

    around: Callable[[Net], AbstractContextManager[Any]] = lambda net: nullcontext()
    """Around all forwards of a step."""
    prepare: Callable[[Net, int], None] = lambda net, number: None
    """Before each forward of a step."""
    later: Callable[[Net], AbstractContextManager[Any]] = lambda net: nullcontext()
    """Around backward."""
    call: Callable[[Net, torch.Tensor], torch.Tensor] | None = None
    """Instead of ``net(x)``."""
    refused: bool = False
    """Whether an error is expected where blocks must be recomputed; else all is put back."""


def _between(before, after):
    """Something that is done, and undone."""

    @contextmanager
    def scope(net):
        before(net)
        try:
            yield
        finally:
            after(net)

    return scope


def _set(target, name, value):
    """An attribute of something that all blocks have."""

    @contextmanager
    def scope(net):
        with ExitStack() as stack:
            for block in net.blocks:
                owner = target(block)
                kept = vars(owner)
                had = name in (*kept, *kept.get("_buffers", ()), *kept.get("_parameters", ()))
                before = getattr(owner, name)
                setattr(owner, name, value(block) if callable(value) else value)
                stack.callback(setattr if had else lambda o, n, _: delattr(o, n), owner, name, before)
            yield

    return scope


def _item(place, key, value):
    """Of a container, where there was the same item before."""

    def scope(net):
        before = place(net)[key]
        put = operator.setitem
        return _between(lambda _: put(place(net), key, value), lambda _: put(place(net), key, before))(net)

    return scope


@contextmanager
def _hooked(net):
    with ExitStack() as stack:
        for block in net.blocks:
            stack.enter_context(block.linear.register_forward_hook(lambda module, inputs, output: output * 2))
        yield


def _hooked_everywhere(net):
    return nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 2 if isinstance(module, nn.LayerNorm) else None
    )


def _edited(tensor, *, by_data=False):
    """In place, where its version shows it; ``by_data``: unseen by any version."""

    @contextmanager
    def scope(net):
        edited = [tensor(block).data if by_data else tensor(block) for block in net.blocks]
        before = [each.detach().clone() for each in edited]
        with torch.no_grad():
            for each in edited:
                each.mul_(3)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, value in zip(edited, before, strict=True):
                    each.copy_(value)

    return scope


def _other_data(tensor):
    """In the place of the tensor's own."""

    @contextmanager
    def scope(net):
        before = [(tensor(block), tensor(block).data) for block in net.blocks]
        for owner, data in before:
            owner.data = data * 3
        try:
            yield
        finally:
            for owner, data in before:
                owner.data = data

    return scope


def _other_weights(net, x):
    weights = {name: (p * 1.5).detach().requires_grad_() for name, p in net.named_parameters() if "norm" in name}
    return torch.func.functional_call(net, weights, (x,))


def _by_number(net, number, name):
    for block in net.blocks:
        if name == "p":
            block.dropout.p = 0.1 + 0.2 * number
        else:
            setattr(block, name, 1.0 + number)


_bias = lambda block: block.adapters["one"].bias  # noqa: E731
_scale = lambda block: block.scale  # noqa: E731
_deterministic = torch.use_deterministic_algorithms
_train_adapters = lambda net, on: [  # noqa: E731
    block.adapters.requires_grad_(on) for block in net.blocks
]


CHANGES = {
    "nothing": Change(),
    "functional_call": Change(call=_other_weights),
    "dropout's p for each forward": Change(prepare=lambda net, number: _by_number(net, number, "p")),
    "attribute for each forward": Change(prepare=lambda net, number: _by_number(net, number, "gain")),
    "hook in forward": Change(around=_hooked),
    "hook in backward": Change(later=_hooked),
    "hook of all modules in forward": Change(around=_hooked_everywhere, refused=True),
    "forward patched on an instance": Change(
        around=_set(lambda block: block.norm, "forward", lambda block: lambda x: x * 2)
    ),
    "forward of a class patched in backward": Change(
        later=_set(lambda block: Exponential, "forward", lambda block: lambda self, x: x.sin() * 2), refused=True
    ),
    "context variable in forward": Change(
        around=_between(lambda net: FACTOR.set(1.7), lambda net: FACTOR.set(1.0)), refused=True
    ),
    "default dtype in backward": Change(
        later=_between(
            lambda net: torch.set_default_dtype(torch.float64), lambda net: torch.set_default_dtype(torch.float32)
        ),
        refused=True,
    ),
    "default device in backward": Change(later=lambda net: torch.device("meta")),
    "adapter name in forward": Change(
        around=lambda net: _set(lambda _: net.settings, "adapter", "two")(net), refused=True
    ),
    "list in backward": Change(
        later=_item(lambda net: net.blocks[0].factors, 0, 3.0),
        refused=True,
    ),
    "closure over a loop variable": Change(
        around=_between(
            lambda net: setattr(net, "gives_functions", True), lambda net: setattr(net, "gives_functions", False)
        ),
        refused=True,
    ),
    "buffer replaced": Change(later=_set(lambda block: block, "scale", lambda block: block.scale * 3)),
    "parameter replaced": Change(
        later=_set(lambda block: block.norm, "weight", lambda block: nn.Parameter(block.norm.weight.detach() * 3))
    ),
    "data of a buffer swapped": Change(later=_other_data(_scale), refused=True),
    "data of a parameter swapped": Change(later=_other_data(_bias), refused=True),
    "data of a buffer edited": Change(later=_edited(_scale, by_data=True), refused=True),
    "buffer edited": Change(later=_edited(lambda block: block.shift), refused=True),
    "bias edited": Change(later=_edited(_bias), refused=True),
    "sdpa_kernel in forward": Change(around=lambda net: sdpa_kernel(SDPBackend.MATH), refused=True),
    "unfrozen before backward": Change(
        around=_between(lambda net: _train_adapters(net, False), lambda net: _train_adapters(net, True)), refused=True
    ),
    "attribute reset to None": Change(around=_set(lambda block: block, "mask", lambda block: torch.ones(WIDTH))),
    "parametrize.cached": Change(around=lambda net: parametrize.cached(), refused=True),
    "training mode": Change(around=_between(Net.eval, Net.train)),
    "autocast in forward": Change(around=lambda net: torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast in backward": Change(later=lambda net: torch.autocast("cpu", dtype=torch.bfloat16)),
    "deterministic algorithms in backward": Change(
        later=_between(lambda net: _deterministic(True), lambda net: _deterministic(False))
    ),
    "out of reach": Change(later=_item(lambda net: ELSEWHERE, "factor", 3.0), refused=True),
}
"""What may change; what lies outside of the contract, or was edited in place, is ``refused``."""


@dataclass
class ModuleProgram:
    """A training of a few steps, the same in every session; a refused step is repeated.

    Args:
        changes: names of what changes, all at once.
        num_forwards: per step, with one backward.
    """

    changes: Sequence[str]
    num_forwards: int = 2
    num_blocks: int = 2
    steps: int = 3
    errors: list[int] | None = None
    """After a run: how often each step was refused."""

    @classmethod
    def of_seed(cls, seed):
        """A random one."""
        dice = random.Random(seed)
        names = dice.sample(sorted(CHANGES), dice.choice((1, 1, 2, 3)))
        calls = [name for name in names if CHANGES[name].call is not None]
        names = [name for name in names if name not in calls[1:]]
        return cls(names, num_forwards=dice.choice((1, 2)), num_blocks=dice.choice((2, 3)), steps=dice.choice((2, 3)))

    def __call__(self, session):
        torch.manual_seed(3)
        net = Net(self.num_blocks)
        session.register(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen = []
        self.errors = []
        for step in range(self.steps):
            self.errors.append(0)
            while True:
                torch.manual_seed(step)
                try:
                    loss = self._forward_and_backward(session, net, torch.randn(3, 4, WIDTH))
                    break
                except RecomputeError:
                    self.errors[-1] += 1
                    assert self.errors[-1] <= MAX_ERRORS, "a block that was refused is recomputed again"
                    optimizer.zero_grad()
            session.end()
            seen.append([loss, *(None if p.grad is None else p.grad.clone() for p in net.parameters()), torch.rand(2)])
            optimizer.step()
            optimizer.zero_grad()
        return seen, [p.detach().clone() for p in net.parameters()]

    def _forward_and_backward(self, session, net, x):
        changes = [CHANGES[name] for name in self.changes]
        call = next((change.call for change in changes if change.call is not None), None) or (lambda net, x: net(x))
        losses = []
        with ExitStack() as scopes:
            for change in changes:
                scopes.enter_context(change.around(net))
            with session.saved():
                for number in range(self.num_forwards):
                    for change in changes:
                        change.prepare(net, number)
                    losses.append(call(net, x))
        loss = torch.stack(losses).sum()
        with ExitStack() as scopes:
            for change in changes:
                scopes.enter_context(change.later(net))
            loss.backward()
        return loss.detach()
