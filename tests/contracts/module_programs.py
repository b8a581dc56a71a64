"""Small random trainings in which something that a block depends on is not the same in backward as it was in forward.

A :class:`Change` says what, and when. Each undoes itself, so that a step that was refused can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
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
from tests.support.helpers import Session

WIDTH = 8
MAX_ERRORS = 12
FACTOR = ContextVar("FACTOR", default=1.0)
ELSEWHERE = {"factor": 1.0}
"""Out of reach of every block."""


class Settings:
    """Something that blocks share."""

    def __init__(self) -> None:
        self.adapter = "one"


class Exponential(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Block(nn.Module):
    """Depends on all sorts of things, and saves products with them."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(0.5, 1.5, WIDTH))
        self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("one", "two")})
        self.gain = 1.0
        self.factors = [2.0]
        self.mask: torch.Tensor | None = None
        self.settings = settings
        parametrize.register_parametrization(self.linear, "bias", Exponential())

    def forward(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        y = self.dropout(self.linear(self.norm(x) * self.scale + self.shift) * self.gain * self.factors[0]).sin()
        y = (y * FACTOR.get() * ELSEWHERE["factor"]).sin()
        y = self.adapters[self.settings.adapter](y) if self.mask is None else y + self.mask
        y = (y * torch.full((WIDTH,), 1 / 3)).exp().to(x.dtype)
        heads = y.view(len(y), -1, 2, WIDTH // 2).transpose(1, 2)
        y = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(y.shape)
        return y.sin() if function is None else function(y.sin()).sin()


class Net(nn.Module):
    """A list of blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.settings = Settings()
        self.blocks = nn.ModuleList(Block(self.settings) for _ in range(num_blocks))
        self.gives_functions = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for number, block in enumerate(self.blocks):
            functions = [lambda y: y * (number + 1)] if self.gives_functions else []  # noqa: B023 (which is the point)
            x = x + block(x, *functions)
        return x.square().mean()


Scope = Callable[[Net], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Change:
    """Of what is there in forward, and no longer in backward; or the other way round."""

    around: Scope = lambda net: nullcontext()
    """Around all forwards of a step."""
    prepare: Callable[[Net, int], None] = lambda net, number: None
    """Before each forward of a step."""
    later: Scope = lambda net: nullcontext()
    """Around backward."""
    call: Callable[[Net, torch.Tensor], torch.Tensor] | None = None
    """Instead of ``net(x)``."""
    refused: bool = False
    """Whether an error is expected where blocks must be recomputed; else all is put back."""


def _set(target: Callable[[Net], Any], name: str, value: Any) -> Scope:
    """An attribute of something that all blocks have."""

    @contextmanager
    def scope(net: Net) -> Iterator[None]:
        with ExitStack() as stack:
            for block in net.blocks:
                owner = target(block)  # type: ignore[arg-type]
                had, before = name in (*vars(owner), *vars(owner).get("_buffers", ())), getattr(owner, name)
                setattr(owner, name, value(block) if callable(value) else value)
                stack.callback(setattr if had else lambda o, n, _: delattr(o, n), owner, name, before)
            yield

    return scope


@contextmanager
def _hooked(net: Net) -> Iterator[None]:
    with ExitStack() as stack:
        for block in net.blocks:
            handle = block.linear.register_forward_hook(lambda module, inputs, output: output * 2)
            stack.callback(handle.remove)
        yield


@contextmanager
def _hooked_everywhere(net: Net) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: output * 2 if isinstance(module, nn.LayerNorm) else None
    )
    with handle:
        yield


@contextmanager
def _in_context(net: Net) -> Iterator[None]:
    token = FACTOR.set(1.7)
    try:
        yield
    finally:
        FACTOR.reset(token)


@contextmanager
def _default_dtype(net: Net) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _item(place: Callable[[Net], Any], key: Any, value: Any, net: Net) -> Iterator[None]:
    before = place(net)[key]
    place(net)[key] = value
    try:
        yield
    finally:
        place(net)[key] = before


def _edited(tensor: Callable[[Block], torch.Tensor]) -> Scope:
    @contextmanager
    def scope(net: Net) -> Iterator[None]:
        with torch.no_grad(), ExitStack() as stack:
            for block in net.blocks:
                edited = tensor(block)  # type: ignore[arg-type]
                stack.callback(edited.copy_, edited.clone())
                edited.mul_(3)
            with torch.enable_grad():
                yield

    return scope


def _other_data(tensor: Callable[[Block], torch.Tensor], *, swap: bool) -> Scope:
    """Unseen by any version."""

    @contextmanager
    def scope(net: Net) -> Iterator[None]:
        pairs = [(tensor(block), tensor(block).data, tensor(block).data.clone()) for block in net.blocks]  # type: ignore[arg-type]
        for owner, _, copy in pairs:
            if swap:
                owner.data = copy * 3
            else:
                owner.data.mul_(3)
        try:
            yield
        finally:
            for owner, before, copy in pairs:
                if swap:
                    owner.data = before
                else:
                    owner.data.copy_(copy)

    return scope


def _frozen(net: Net) -> AbstractContextManager[Any]:
    @contextmanager
    def scope() -> Iterator[None]:
        for block in net.blocks:
            block.adapters.requires_grad_(False)
        try:
            yield
        finally:
            for block in net.blocks:
                block.adapters.requires_grad_(True)

    return scope()


@contextmanager
def _evaluating(net: Net) -> Iterator[None]:
    net.eval()
    try:
        yield
    finally:
        net.train()


@contextmanager
def _other_parameter(net: Net) -> Iterator[None]:
    before = [block.norm.weight for block in net.blocks]
    for block in net.blocks:
        block.norm.weight = nn.Parameter(block.norm.weight.detach() * 3)
    try:
        yield
    finally:
        for block, weight in zip(net.blocks, before, strict=True):
            block.norm.weight = weight


def _other_weights(net: Net, x: torch.Tensor) -> torch.Tensor:
    weights = {name: (p * 1.5).detach().requires_grad_() for name, p in net.named_parameters() if "norm" in name}
    result = torch.func.functional_call(net, weights, (x,))
    assert isinstance(result, torch.Tensor)
    return result


def _by_number(net: Net, number: int, name: str) -> None:
    for block in net.blocks:
        if name == "p":
            block.dropout.p = 0.1 + 0.2 * number
        else:
            setattr(block, name, 1.0 + number)


@contextmanager
def _gives_functions(net: Net) -> Iterator[None]:
    net.gives_functions = True
    try:
        yield
    finally:
        net.gives_functions = False


CHANGES: dict[str, Change] = {
    "nothing": Change(),
    "functional_call": Change(call=_other_weights),
    "dropout's p for each forward": Change(prepare=lambda net, number: _by_number(net, number, "p")),
    "attribute for each forward": Change(prepare=lambda net, number: _by_number(net, number, "gain")),
    "hook in forward": Change(around=_hooked),
    "hook in backward": Change(later=_hooked),
    "hook of all modules in forward": Change(around=_hooked_everywhere, refused=True),
    "forward patched on an instance": Change(
        around=_set(lambda block: block.norm, "forward", lambda block: lambda x: x * 2)  # type: ignore[attr-defined]
    ),
    "forward of a class patched in backward": Change(
        later=_set(lambda block: Exponential, "forward", lambda block: lambda self, x: x.sin() * 2), refused=True
    ),
    "context variable in forward": Change(around=_in_context),
    "default dtype in backward": Change(later=_default_dtype, refused=True),
    "default device in backward": Change(later=lambda net: torch.device("meta")),
    "adapter name in forward": Change(
        around=lambda net: _set(lambda _: net.settings, "adapter", "two")(net), refused=True
    ),
    "list in backward": Change(later=lambda net: _item(lambda net: net.blocks[0].factors, 0, 3.0, net)),  # type: ignore[attr-defined]
    "closure over a loop variable": Change(around=_gives_functions, refused=True),
    "buffer replaced": Change(later=_set(lambda block: block, "scale", lambda block: block.scale * 3)),
    "parameter replaced": Change(later=_other_parameter),
    "data of a buffer swapped": Change(later=_other_data(lambda block: block.scale, swap=True), refused=True),
    "data of a parameter swapped": Change(
        later=_other_data(lambda block: block.adapters["one"].bias, swap=True), refused=True
    ),
    "data of a buffer edited": Change(later=_other_data(lambda block: block.scale, swap=False), refused=True),
    "buffer edited": Change(later=_edited(lambda block: block.shift), refused=True),
    "bias edited": Change(later=_edited(lambda block: block.adapters["one"].bias), refused=True),
    "sdpa_kernel in forward": Change(around=lambda net: sdpa_kernel(SDPBackend.MATH), refused=True),
    "unfrozen before backward": Change(around=_frozen, refused=True),
    "attribute reset to None": Change(around=_set(lambda block: block, "mask", lambda block: torch.ones(WIDTH))),
    "parametrize.cached": Change(around=lambda net: parametrize.cached(), refused=True),
    "training mode": Change(around=_evaluating),
    "autocast in forward": Change(around=lambda net: torch.autocast("cpu", dtype=torch.bfloat16)),
    "autocast in backward": Change(later=lambda net: torch.autocast("cpu", dtype=torch.bfloat16)),
    "deterministic algorithms in backward": Change(later=lambda net: _deterministic()),
    "out of reach": Change(later=lambda net: _item(lambda net: ELSEWHERE, "factor", 3.0, net), refused=True),
}
"""What may change; what lies outside of the contract, or was edited in place, is ``refused``."""


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    def of_seed(cls, seed: int) -> ModuleProgram:
        """A random one."""
        dice = random.Random(seed)
        names = dice.sample(sorted(CHANGES), dice.choice((1, 1, 2, 3)))
        calls = [name for name in names if CHANGES[name].call is not None]
        names = [name for name in names if name not in calls[1:]]
        return cls(names, num_forwards=dice.choice((1, 2)), num_blocks=dice.choice((2, 3)), steps=dice.choice((2, 3)))

    def __call__(self, session: Session) -> Any:
        torch.manual_seed(3)
        net = Net(self.num_blocks)
        session.register(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen: list[Any] = []
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

    def _forward_and_backward(self, session: Session, net: Net, x: torch.Tensor) -> torch.Tensor:
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
