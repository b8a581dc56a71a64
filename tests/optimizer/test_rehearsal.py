"""What an optimizer of others does beside its update is found on copies: before its closure, without a gradient, in
parameters of each kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step import twins
from lightning_ssd.optimizer.step.dry_run import DryRun
from lightning_ssd.optimizer.step.stepper import SubgroupStepper
from lightning_ssd.optimizer.step.twins import Sample
from tests.support import optimizer_pairs

pytestmark = pytest.mark.usefixtures("small_subgroups")

MANY = ((128, 150),) * 6 + ((7,),)
"""More than a subgroup holds."""
FEW = ((30, 4), (5,), (7,))
"""One subgroup, in which a step is one call."""


class Momentum(Optimizer):
    """By hand, with places for what a class adds. Lion and plain copies of AdamW are built like this."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "decay": 0.5, "is_clipped": False})
        self.prepare()

    def prepare(self) -> None:
        """What it has of its own."""

    def before(self) -> None:
        """Before the closure."""

    def scale(self) -> Any:
        """Of all gradients."""
        return 1.0

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if p.grad is not None:
            momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad / scale)
            p.sub_(momentum, alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.before()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group, scale)
        return loss

    @property
    def own(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


# -- before the closure ---------------------------------------------------------------------------------------------


class LooksAhead(Momentum):
    """Nesterov as it is written down: the gradient is that of where momentum leads to."""

    def before(self) -> None:
        for p in self.own:
            if "m" in self.state[p]:
                p.sub_(self.state[p]["m"], alpha=0.05)


class LooksBack(Momentum):
    """Adds the gradient of before."""

    def before(self) -> None:
        self.last = {p: p.grad.clone() for p in self.own if p.grad is not None}

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if p in self.last:
            p.sub_(self.last[p], alpha=group["lr"])
        super().update(p, group, scale)


class KnowsWhichFirst(Momentum):
    """Updates what has a gradient before the closure."""

    def before(self) -> None:
        self.known = {id(p) for p in self.own if p.grad is not None}

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if id(p) in self.known:
            super().update(p, group, scale)


class Clears(Momentum):
    """Forgets gradients, so that a closure need not."""

    def before(self) -> None:
        for p in self.own:
            p.grad = None


class CountsFirst(Momentum):
    """A state that no closure sees."""

    def before(self) -> None:
        for p in self.own:
            self.state[p]["t"] = self.state[p].get("t", 0) + 1


def step_with_closure(optimizer: Optimizer, parameters: list[torch.nn.Parameter], number: int) -> None:
    def closure() -> float:
        for p in parameters:
            p.grad = None
        loss = torch.stack([(p.sin() * (number + 1)).sum() for p in parameters]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)


@pytest.mark.parametrize("shapes", [MANY, FEW])
@pytest.mark.parametrize("kind", [LooksAhead, LooksBack, KnowsWhichFirst, Clears])
def test_what_is_done_before_the_closure_is_refused(
    kind: type[Momentum], shapes: tuple[tuple[int, ...], ...], spill_dir: Path
) -> None:
    pair = optimizer_pairs.Pair(kind, shapes)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        with pytest.raises(ConfigError, match=r"closure|differently"):
            step_with_closure(optimizer, pair.mine, 0)
        pair.check()


@pytest.mark.parametrize("shapes", [MANY, FEW])
@pytest.mark.parametrize("kind", [Momentum, CountsFirst, LooksAhead])
def test_what_a_closure_does_not_see_is_exact(
    kind: type[Momentum], shapes: tuple[tuple[int, ...], ...], spill_dir: Path
) -> None:
    """Without a closure nobody has looked at the model where it was."""
    pair = optimizer_pairs.Pair(kind, shapes)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for number in range(3):
            if kind is LooksAhead:
                pair.step(optimizer)
            else:
                step_with_closure(optimizer, pair.mine, number)
                step_with_closure(pair.twin, pair.plain, number)
            pair.check(optimizer)


class Draws(Momentum):
    """Noise, which one call may draw."""

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        super().update(p, group, scale)
        p.add_(torch.randn_like(p))


def test_noise_of_one_call_is_not_taken_for_a_gradient_of_before(spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(Draws, FEW)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        state = torch.get_rng_state()
        step_with_closure(optimizer, pair.mine, 0)
        torch.set_rng_state(state)
        step_with_closure(pair.twin, pair.plain, 0)
        pair.check()


# -- without a gradient ---------------------------------------------------------------------------------------------


class Coasts(Momentum):
    """Momentum goes on."""

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        super().update(p, group, scale)
        if p.grad is None and "m" in self.state[p]:
            p.sub_(self.state[p]["m"].mul_(0.9), alpha=group["lr"])


class Decays(Momentum):
    """All parameters, whether or not they have ever had a gradient."""

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        p.mul_(1 - group["lr"] * group["decay"])
        super().update(p, group, scale)


class ForgetsAnew(Momentum):
    """The state alone, by another tensor."""

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        super().update(p, group, scale)
        if p.grad is None and "m" in self.state[p]:
            self.state[p]["m"] = self.state[p]["m"] * 0.9


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("shapes", [MANY, FEW])
@pytest.mark.parametrize("kind", [Coasts, Decays, ForgetsAnew])
def test_updates_without_a_gradient_are_refused_when_one_is_missing(
    kind: type[Momentum], shapes: tuple[tuple[int, ...], ...], has_groups: bool, spill_dir: Path
) -> None:
    def make(parameters: Any) -> Optimizer:
        return kind([{"params": parameters[:1]}, {"params": parameters[1:]}] if has_groups else parameters)

    pair = optimizer_pairs.Pair(make, shapes)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(2):  # all gradients are there
            pair.step(optimizer)
            pair.check(optimizer)
        pair.set_gradients(list(range(1, len(shapes))))
        with pytest.raises(ConfigError, match="without a gradient"):
            optimizer.step()
        pair.check()


def test_a_step_without_any_gradient_is_no_exception(spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(Decays, MANY)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        with pytest.raises(ConfigError, match="without a gradient"):
            optimizer.step()
        pair.check()


@pytest.mark.parametrize("shapes", [MANY, FEW])
def test_gradients_may_be_missing_where_nothing_is_done_then(
    shapes: tuple[tuple[int, ...], ...], spill_dir: Path
) -> None:
    pair = optimizer_pairs.Pair(Momentum, shapes)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for active in ([0, 2], None, [1], [], None):
            pair.step(optimizer, active)
            pair.check(optimizer)


# -- parameters of each kind ----------------------------------------------------------------------------------------


class Clips(Momentum):
    """By the norm of some gradients."""

    def is_meant(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        return True

    def scale(self) -> Any:
        found = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None and self.is_meant(p, g)]
        return torch.stack([gradient.norm() for gradient in found]).norm() if found else 1.0

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        super().update(p, group, scale if self.is_meant(p, group) else 1.0)


class ClipsLargeOnes(Clips):
    """Not those of the first steps, nor of the smallest parameter."""

    def scale(self) -> Any:
        return (torch.as_tensor(super().scale()) / 1000).clamp(min=1)


class LeavesOut(Clips):
    """A whole step, for one gradient that is not finite."""

    def scale(self) -> Any:
        return 1.0 if torch.as_tensor(super().scale()).isfinite() else torch.inf


class ClipsMatrices(Clips):
    """The smallest parameter is none."""

    def is_meant(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        return p.dim() > 1


class ClipsOneGroup(Clips):
    """The smallest parameter is in the other."""

    def is_meant(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        return bool(group["is_clipped"])


class BeginsWithStates(Momentum):
    """Made with the optimizer, as Adagrad's: a copy without one raises a KeyError."""

    def prepare(self) -> None:
        for p in self.own:
            self.state[p]["sum"] = torch.ones_like(p)

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if p.grad is not None:
            self.state[p]["sum"].add_(p.grad / scale)
            p.sub_(self.state[p]["sum"], alpha=group["lr"])


class ClipsWithStates(BeginsWithStates, Clips):
    """Both."""


class KnowsNames(Momentum):
    """By parameter, and by its identity."""

    def prepare(self) -> None:
        self.names = {p: str(number) for number, p in enumerate(self.own)}
        self.factors = {id(p): torch.tensor(1.0 + number) for number, p in enumerate(self.own)}

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        super().update(p, group, scale * (2 if self.names[p] == "1" else self.factors[id(p)]))


class ClipsNamed(KnowsNames, Clips):
    """Both."""


def _in_groups(kind: type[Momentum]) -> Callable[[Any], Optimizer]:
    return lambda made: kind([{"params": made[:-1], "is_clipped": True}, {"params": made[-1:]}])


@pytest.mark.parametrize(
    "make",
    [
        Clips,
        ClipsLargeOnes,
        LeavesOut,
        ClipsMatrices,
        _in_groups(ClipsOneGroup),
        ClipsWithStates,
        ClipsNamed,
        _in_groups(ClipsMatrices),
    ],
)
def test_norms_of_some_gradients_are_refused(make: Callable[[Any], Optimizer], spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(make, MANY)
    pair.set_gradients()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        with pytest.raises(ConfigError, match="couples"):
            optimizer.step()
        pair.check()


class Raises(Momentum):
    """At a gradient that is not finite."""

    limit = torch.inf

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if p.grad is not None and not bool((p.grad.abs() < self.limit).all()):
            raise ValueError("too large")
        super().update(p, group, scale)


class RaisesEarlier(Raises):
    """At a large gradient."""

    limit = 100.0


class Warns(Momentum):
    """Of a large gradient."""

    def update(self, p: torch.Tensor, group: dict[str, Any], scale: Any) -> None:
        if p.grad is not None and not bool((p.grad.abs() < 100).all()):
            warnings.warn("a large gradient", stacklevel=2)
        super().update(p, group, scale)


@pytest.mark.parametrize("make", [Raises, RaisesEarlier, Warns])
def test_what_is_said_of_other_gradients_than_there_are_is_not_heard(make: type[Momentum], spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(make, MANY)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)


def test_a_kind_that_gets_gradients_later_is_tried_then(spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(_in_groups(ClipsOneGroup), ((7,), (128, 150), (128, 150), (128, 150), (9,)))
    pair.inner.param_groups[0]["is_clipped"] = pair.twin.param_groups[0]["is_clipped"] = False
    pair.inner.param_groups[1]["is_clipped"] = pair.twin.param_groups[1]["is_clipped"] = True
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer, [0, 1, 2, 3])
        pair.check()
        pair.set_gradients()
        with pytest.raises(ConfigError, match="couples"):
            optimizer.step()
        pair.check()


def test_a_gradient_of_zeros_does_not_hide_a_norm(spill_dir: Path) -> None:
    """LoRA's first factor has none but these in the first step."""
    pair = optimizer_pairs.Pair(Clips, MANY)
    pair.set_gradients()
    gradient = pair.mine[-1].grad
    assert gradient is not None
    gradient.zero_()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer, pytest.raises(ConfigError, match="couples"):
        optimizer.step()


@pytest.mark.parametrize("kind", [BeginsWithStates, KnowsNames])
def test_what_is_known_of_each_parameter_is_known_of_its_copies(kind: type[Momentum], spill_dir: Path) -> None:
    pair = optimizer_pairs.Pair(kind, MANY)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for active in (None, [0, 2], None):
            pair.step(optimizer, active)
            pair.check(optimizer)
        step_with_closure(optimizer, pair.mine, 1)
        step_with_closure(pair.twin, pair.plain, 1)
        pair.check(optimizer)
    if isinstance(pair.inner, KnowsNames):
        assert len(pair.inner.names) == len(pair.inner.factors) == len(MANY), "no copy is left in them"


# -- copies ---------------------------------------------------------------------------------------------------------


def test_copies_of_large_parameters_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "_MAX_NUMEL", 100)
    parameter = torch.nn.Parameter(torch.arange(6_000.0).reshape(60, 100))
    parameter.grad = torch.ones_like(parameter)
    parameter.mark = torch.zeros(60, 100)  # type: ignore[attr-defined]
    sample = Sample(parameter, {"m": torch.ones(60, 100), "t": torch.ones(())})
    twin = sample.twin()
    state = sample.state_for(twin)
    assert twin.grad is not None
    assert state is not None
    assert twin.numel() <= 100
    assert twin.shape == twin.grad.shape == twin.mark.shape == state["m"].shape  # type: ignore[attr-defined]
    assert torch.equal(twin, parameter[: twin.shape[0], : twin.shape[1]])
    assert Sample(parameter, {"row": torch.ones(60)}).state_for(twin) is None
    optimizer = Clips([parameter])
    with pytest.raises(ConfigError, match="couples"):
        DryRun(SubgroupStepper(optimizer), optimizer).play(parameter, 0, None, num_calls=2)


def test_a_copy_of_a_state_is_built_like_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    momentum = torch.ones(4)
    sample = Sample(parameter, {"m": momentum, "again": [momentum], "of": parameter})
    twin = sample.twin()
    state = sample.state_for(twin)
    assert state is not None
    assert state["m"] is state["again"][0]
    assert state["m"] is not momentum
    assert state["of"] is twin
