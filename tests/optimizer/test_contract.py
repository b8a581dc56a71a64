"""Optimizers that are not PyTorch's own: exact after one rehearsal on copies, or refused with what differed."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import queue
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step import rehearsal
from lightning_ssd.optimizer.step.contract import Contract
from tests.support import optimizer_pairs
from tests.support.optimizer_pairs import Pair, opened, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")

MANY = ((128, 150),) * 6 + ((7,),)
"""More than a subgroup holds."""


class Momentum(Optimizer):
    """By hand, with places for what a class adds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.t = 0
        self.notes: dict[str, Any] = {"past": []}
        self.beta = torch.ones(())
        self.prepare()

    def prepare(self) -> None:
        """What it has of its own."""

    def before(self) -> None:
        """Before the closure."""

    def begin(self) -> None:
        """Behind the closure."""

    def scale(self) -> Any:
        """Of all gradients."""
        return 1.0

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """For each parameter."""
        return update

    def without(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        """A parameter has no gradient."""

    @property
    def own(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.before()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    self.without(p, group)
                else:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad / scale)
                    p.sub_(self.change(p, momentum), alpha=group["lr"])
        return loss


def kind(name: str, base: type[Momentum] = Momentum, **methods: Any) -> type[Momentum]:
    return type(name, (base,), methods)


def _count(optimizer: Any) -> None:
    optimizer.t += 1


def _count_late(optimizer: Any) -> None:
    optimizer.late = getattr(optimizer, "late", 0) + 1


def _count_in_options(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["count"] += 1


def _count_in_state(optimizer: Any) -> None:
    """As MADGRAD does."""
    if "k" not in optimizer.state:
        optimizer.state["k"] = torch.tensor([0])
    optimizer.state["k"] += 1


EXACT: dict[str, type[Momentum]] = {
    "plain": Momentum,
    "counts": kind("Counts", begin=_count, change=lambda self, p, u: u / (1 - 0.9**self.t)),
    "counts late": kind("CountsLate", begin=_count_late, change=lambda self, p, u: u / self.late),
    "counts in options": kind(
        "InOptions", begin=_count_in_options, change=lambda self, p, u: u / self.param_groups[0]["count"]
    ),
    "counts in the state": kind("InState", begin=_count_in_state, change=lambda self, p, u: u / float(self.state["k"])),
    "keeps more by parameter": kind(
        "Remembers",
        prepare=lambda self: setattr(self, "memory", {}),
        change=lambda self, p, u: self.memory.setdefault(p, torch.zeros_like(p)).add_(u),
    ),
    "goes by marks": kind("Marks", change=lambda self, p, u: u * getattr(p, "mark", 1)),
    "begins with states": kind(
        "Begins",
        prepare=lambda self: [self.state[p].update(sum=torch.ones_like(p)) for p in self.own],
        change=lambda self, p, u: self.state[p]["sum"].add_(u),
    ),
}
SOMETIMES: tuple[list[int] | None, ...] = (None, [0, 2, 6], None, [1], [], None)


def in_two(make: Callable[[Any], Optimizer]) -> Callable[[Any], Optimizer]:
    return lambda made: make([{"params": made[:-1]}, {"params": made[-1:]}])


def step_with_closure(optimizer: Optimizer, parameters: list[nn.Parameter], number: int) -> None:
    def closure() -> float:
        for p in parameters:
            p.grad = None
        loss = torch.stack([(p.sin() * (number + 1)).sum() for p in parameters]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)


@pytest.mark.parametrize("name", EXACT)
def test_what_updates_each_parameter_by_itself_is_exact(name: str, spill_dir: Path) -> None:
    pair = Pair(in_two(EXACT[name]), MANY)
    for parameters in (pair.mine, pair.plain):
        parameters[2].mark = 3  # type: ignore[attr-defined]
    with wrapped(pair.inner, spill_dir) as optimizer:
        for number, active in enumerate(SOMETIMES):
            pair.step(optimizer, active)
            pair.check(optimizer)
            step_with_closure(optimizer, pair.mine, number)
            step_with_closure(pair.twin, pair.plain, number)
            pair.check(optimizer)
        saved = copy.deepcopy(pair.twin.state_dict())
        optimizer.load_state_dict(copy.deepcopy(saved))
        pair.twin.load_state_dict(saved)
        pair.step(optimizer)
        pair.check(optimizer)
        for attribute in ("t", "late"):
            assert getattr(pair.inner, attribute, None) == getattr(pair.twin, attribute, None)
        assert optimizer.stats.num_subgroups > 5, "one call would be a plain step"


# -- what differs ------------------------------------------------------------------------------------------------------


def _norm(optimizer: Any) -> Any:
    found = [p.grad for p in optimizer.own if p.grad is not None]
    return torch.stack([gradient.norm() for gradient in found]).norm() if found else torch.ones(())


def _norm_of_matrices(optimizer: Any) -> Any:
    return torch.stack([p.grad.norm() for p in optimizer.own if p.grad is not None and p.dim() > 1]).norm()


def _note_norm(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Used in later steps alone."""
    self.state[p]["total"] = float(_norm(self))
    return update


def _count_each(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    self.t += 1
    return update / self.t


def _count_each_in_options(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    group = next(group for group in self.param_groups if any(p is q for q in group["params"]))
    group["count"] += 1
    return update / group["count"]


def _if_any(method: str) -> Any:
    def change(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        is_rare = any(bool(getattr(q.grad, method)().any()) for q in self.own if q.grad is not None)
        return update * 0.5 if is_rare else update

    return change


def _if_all_zero(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    return update if any(bool(q.grad.any()) for q in self.own if q.grad is not None) else update * 0.5


class Box:
    num_steps = 0


def _make_box(optimizer: Any) -> None:
    optimizer.box = Box()


def _count_in_box(optimizer: Any) -> None:
    optimizer.box.num_steps += 1


DIFFERENT: dict[str, tuple[type[Momentum], str]] = {
    "a norm": (kind("Clips", scale=_norm), "parameters .* differ"),
    "a norm of matrices": (kind("ClipsMatrices", scale=_norm_of_matrices), "parameters .* differ|raise RuntimeError"),
    "a norm of large gradients": (
        kind("ClipsLarge", scale=lambda self: (_norm(self) / 1000).clamp(min=1)),
        "parameters .* differ",
    ),
    "a step left out": (
        kind("LeavesOut", scale=lambda self: 1.0 if _norm(self).isfinite() else torch.inf),
        "parameters .* differ",
    ),
    "a norm for later": (kind("NotesNorm", change=_note_norm), "states .* differ"),
    "a count of parameters": (kind("CountsEach", change=_count_each), r"attributes \['t'\]|parameters .* differ"),
    "such a count in options": (
        kind("CountsEachInOptions", change=_count_each_in_options),
        r"param_groups\[0\] \['count'\]|parameters .* differ",
    ),
    "a count in place": (kind("CountsInPlace", begin=lambda self: self.beta.mul_(0.9)), r"attributes \['beta'\]"),
    "a count in a list": (
        kind("TakesNotes", begin=lambda self: self.notes["past"].append(1)),
        r"attributes \['notes'\]",
    ),
    "a count in an object": (kind("Counter", prepare=_make_box, begin=_count_in_box), r"attributes \['box'\]"),
    "noise": (kind("Draws", change=lambda self, p, u: u + torch.randn_like(p)), "random numbers"),
    "Python's chance": (kind("DrawsInPython", change=lambda self, p, u: u * random.random()), "random numbers"),
    "NumPy's chance": (kind("DrawsInNumPy", change=lambda self, p, u: u * np.random.rand()), "random numbers"),
    "infinity": (kind("IfInfinite", change=_if_any("isinf")), "parameters .* differ"),
    "not a number": (kind("IfNoNumber", change=_if_any("isnan")), "parameters .* differ"),
    "all gradients zero": (kind("IfZero", change=_if_all_zero), "parameters .* differ"),
    "a small rate": (
        kind("AtSmallRates", scale=lambda self: _norm(self) if self.param_groups[0]["lr"] < 1e-4 else 1.0),
        "differ",
    ),
    "positions": (
        kind("ByPosition", change=lambda self, p, u: u * (1 + [p is q for q in self.own].index(True) // 5)),
        "parameters .* differ",
    ),
    "an iterator": (
        kind("Iterates", prepare=lambda self: setattr(self, "n", itertools.count()), begin=lambda self: next(self.n)),
        r"attributes \['n'\]",
    ),
    "a number of parameters": (kind("ByNumber", scale=lambda self: len(self.own)), "parameters .* differ"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_refused_when_it_is_wrapped(name: str, spill_dir: Path) -> None:
    made, text = DIFFERENT[name]
    pair = Pair(made, MANY)
    before, states = torch.get_rng_state(), (random.getstate(), np.random.get_state()[2])
    own = copy.deepcopy({k: v for k, v in vars(pair.inner).items() if not isinstance(v, torch.Generator)})
    for names in ((), (made.__name__,)):  # a promise does not hold against what is seen
        with (
            opened(spill_dir, declared=names) as offloader,
            pytest.raises(ConfigError, match=rf"does not update each by itself: .*({text}).*Nothing was updated"),
        ):
            offloader.offload_optimizer(pair.inner)
    pair.check()
    assert torch.equal(torch.get_rng_state(), before)
    assert (random.getstate(), np.random.get_state()[2]) == states
    assert own.keys() <= vars(pair.inner).keys()
    assert pair.inner.notes == own["notes"]
    assert pair.inner.beta == own["beta"]
    assert not pair.inner.state


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda made, ps: made([{"params": [p]} for p in ps]), MANY),
        (lambda made, ps: made(ps), ((20000,), (128, 150), (4, 40, 125))),
        (lambda made, ps: made([{"params": ps[:1]}, {"params": ps[1:]}]), ((128, 150), (150,))),
        (lambda made, ps: made(ps), ((0, 3), (0, 3), (128, 150), (128, 150))),
    ],
)
def test_a_coupling_is_seen_however_parameters_are_grouped(make: Any, shapes: Any, spill_dir: Path) -> None:
    pair = Pair(lambda ps: make(DIFFERENT["a norm"][0], ps), shapes)
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match="does not update each by itself"):
        offloader.offload_optimizer(pair.inner)


def test_a_coupling_with_one_that_comes_later_is_seen(spill_dir: Path, caplog: Any) -> None:
    pair = Pair(DIFFERENT["a norm"][0], MANY[:1])
    with caplog.at_level(logging.INFO, "lightning_ssd"), wrapped(pair.inner, spill_dir) as optimizer:
        assert "has one parameter" in caplog.text
        assert "equal bits" not in caplog.text
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(ConfigError, match="does not update each by itself"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def test_copies_are_as_large_as_it_takes_to_sum_in_other_ways() -> None:
    shapes = [(5000, 1024), *[(1024, 1024), (1024,)] * 200]
    sizes = rehearsal._sizes([nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes], has_large=True)
    numels = list(map(math.prod, sizes.values()))
    assert numels[0] >= 1 << 20
    assert numels[1] == numels[3] >= 4 * 32768
    assert numels[2] == 1024
    assert sum(numels) < 1 << 23


# -- before the closure ------------------------------------------------------------------------------------------------


def _look_ahead(self: Any) -> None:
    """Nesterov as it is written down: the gradient is that of where momentum leads to."""
    for p in self.own:
        if "m" in self.state[p]:
            p.sub_(self.state[p]["m"], alpha=0.05)


def _look_back(self: Any) -> None:
    self.last = [p.grad.clone() for p in self.own if p.grad is not None]


def _add_last(self: Any, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    fitting = [last for last in self.last if last.shape == p.shape]
    return update + fitting[0] if fitting else update


def _clear(self: Any) -> None:
    for p in self.own:
        p.grad = None


def _count_first(self: Any) -> None:
    for p in self.own:
        self.state[p]["t"] = self.state[p].get("t", 0) + 1


@pytest.mark.parametrize(
    "made",
    [
        kind("LooksAhead", before=_look_ahead),
        kind("LooksBack", before=_look_back, change=_add_last),
        kind("Clears", before=_clear),
    ],
)
def test_what_is_done_before_the_closure_is_refused(made: type[Momentum], spill_dir: Path) -> None:
    pair = Pair(made, MANY[:1])
    with wrapped(pair.inner, spill_dir) as optimizer:
        if made.__name__ == "LooksAhead":  # without a closure no model was evaluated where it was
            pair.step(optimizer)
            pair.step(optimizer)
            pair.check(optimizer)
        with pytest.raises(ConfigError, match=r"copies, with a closure.*Nothing was updated|with a closure"):
            step_with_closure(optimizer, pair.mine, 0)
        pair.check()


def test_what_a_closure_does_not_see_is_exact(spill_dir: Path) -> None:
    pair = Pair(kind("CountsFirst", before=_count_first), MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for number in range(3):
            step_with_closure(optimizer, pair.mine, number)
            step_with_closure(pair.twin, pair.plain, number)
            pair.check(optimizer)


# -- without a gradient ------------------------------------------------------------------------------------------------


def _coast(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
    if "m" in self.state[p]:
        p.sub_(self.state[p]["m"].mul_(0.9), alpha=group["lr"])


def _forget(self: Any, p: torch.Tensor, group: dict[str, Any]) -> None:
    if "m" in self.state[p]:
        self.state[p]["m"] = self.state[p]["m"] * 0.9


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        kind("Coasts", without=_coast),
        kind("Decays", without=lambda self, p, group: p.mul_(0.95)),
        kind("Forgets", without=_forget),
    ],
)
def test_updates_without_a_gradient_are_refused_when_one_is_missing(
    made: type[Momentum], has_groups: bool, spill_dir: Path
) -> None:
    pair = Pair(in_two(made) if has_groups else made, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(2):  # all gradients are there
            pair.step(optimizer)
            pair.check(optimizer)
        pair.set_gradients(list(range(1, len(MANY))))
        with pytest.raises(ConfigError, match=r"some of them without a gradient.*Nothing was updated"):
            optimizer.step()
        pair.check()


class CoastsInClosures(Momentum):
    """Decays what has no gradient, but in steps with a closure alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for p in self.own:
            if closure is not None and p.grad is None:
                p.mul_(0.5)
        return loss


def test_a_closure_that_leaves_a_gradient_out_is_tried_as_such(spill_dir: Path) -> None:
    pair = Pair(CoastsInClosures, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer, [0, 2])
        step_with_closure(optimizer, pair.mine, 0)
        step_with_closure(pair.twin, pair.plain, 0)
        pair.check(optimizer)
        pair.set_gradients([0, 2])
        with pytest.raises(ConfigError, match="with a closure, some of them without a gradient"):
            optimizer.step(lambda: 0.0)
        pair.check()


# -- what cannot be tried ----------------------------------------------------------------------------------------------


Locked = kind("Locked", prepare=lambda self: setattr(self, "lock", threading.Lock()))


def _refuse_small(optimizer: Any) -> Any:
    if any(bool((p.grad.abs() < 1).all()) for p in optimizer.own if p.grad is not None):
        raise ValueError("too small")
    return 1.0


num_steps = {"of all": 0}


def _count_for_all(optimizer: Any) -> None:
    num_steps["of all"] += 1


def _count_in_class(optimizer: Any) -> None:
    type(optimizer).num_steps += 1


def _counting_in_closure() -> type[Momentum]:
    past: list[int] = []
    return kind("Closes", begin=lambda self: past.append(1))


def _holding(name: str, make: Callable[[], Any]) -> type[Momentum]:
    return kind(name, prepare=lambda self: setattr(self, "held", make()))


NOT_SHOWN: dict[str, tuple[type[Momentum], str]] = {
    "a lock": (Locked, "cannot pickle"),
    "a queue": (_holding("Tells", queue.Queue), "cannot pickle"),
    "an error": (kind("Odd", scale=_refuse_small), "ValueError: too small"),
    "chance": (_holding("Draws", lambda: random.Random(3)), "held holds a Random"),
    "chance of NumPy": (_holding("DrawsInNumPy", lambda: [np.random.default_rng(3)]), "held holds a Generator"),
    "chance of PyTorch": (_holding("DrawsByItself", lambda: {"a": torch.Generator()}), "held holds a Generator"),
    "a model": (_holding("Looks", lambda: nn.Linear(2, 2)), "held holds a Linear"),
    "a class attribute": (kind("InClass", begin=_count_in_class, num_steps=0), r"its class.*\['num_steps'\]"),
    "a variable": (kind("Global", begin=_count_for_all), r"its module.*\['num_steps'\]"),
    "a closure": (_counting_in_closure(), r"a closure: \['past'\]"),
    "a default": (kind("Defaults", begin=lambda self, past=[]: past.append(1)), r"a closure: \['__defaults__'\]"),
    "ids": (
        kind("ById", prepare=lambda self: setattr(self, "held", {id(p): n for n, p in enumerate(self.own)})),
        r"held holds the id\(\) of a parameter",
    ),
    "scaled gradients": (kind("Unscales", _step_supports_amp_scaling=True), "unscales gradients itself"),
}


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_cannot_be_shown_may_be_declared(name: str, spill_dir: Path) -> None:
    made, text = NOT_SHOWN[name]
    pair = Pair(made, MANY[:-1])
    own = rf"got {made.__name__}, .* a trial on copies .* cannot show .*{text}.*optimizers=\['{made.__name__}'\]\)"
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match=own):
        offloader.offload_optimizer(pair.inner)
    pair.check()
    assert not num_steps["of all"]
    assert not getattr(made, "num_steps", 0)
    with opened(spill_dir, declared=[made.__name__]) as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        for active in (None, [0, 2], None):
            pair.step(optimizer, active)
            pair.check(optimizer)
    num_steps["of all"] = 0


def _norm_if_asked(optimizer: Any) -> Any:
    return _norm(optimizer) if optimizer.max_norm or optimizer.param_groups[0].get("clips") else 1.0


@pytest.mark.parametrize("how", ["attribute", "option", "load"])
def test_what_is_set_later_is_rehearsed_before_the_next_step(how: str, spill_dir: Path) -> None:
    pair = Pair(kind("ClipsLater", prepare=lambda self: setattr(self, "max_norm", 0), scale=_norm_if_asked), MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)
        if how == "attribute":
            optimizer.max_norm = 1  # type: ignore[attr-defined]
        elif how == "option":
            optimizer.param_groups[0]["clips"] = True
        else:
            state = pair.twin.state_dict()
            state["param_groups"][0]["clips"] = True
            optimizer.load_state_dict(state)
        pair.set_gradients()
        with pytest.raises(ConfigError, match=r"does not update each by itself: its parameters .* differ.*Nothing was"):
            optimizer.step()
        pair.check()


def test_a_promise_that_is_broken_ends_the_step(spill_dir: Path) -> None:
    pair = Pair(kind("Draws", Locked, change=lambda self, p, u: u + torch.randn_like(p)), MANY)
    with opened(spill_dir, declared="Draws") as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        pair.set_gradients()
        with pytest.raises(ConfigError, match=r"random numbers.* this step is incomplete"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()


class DrawsLater(Momentum):
    """After a warm-up that is longer than a rehearsal."""

    def begin(self) -> None:
        self.t += 1

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update if self.t < 9 else update + torch.randn_like(p)


def test_noise_that_comes_later_ends_training_there(spill_dir: Path) -> None:
    pair = Pair(DrawsLater, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(8):
            pair.step(optimizer)
        pair.check()
        pair.set_gradients()
        with pytest.raises(ConfigError, match=r"random numbers.* this step is incomplete"):
            optimizer.step()


def test_a_step_that_looks_at_the_model_itself_is_stopped_before(spill_dir: Path) -> None:
    pair = Pair(lambda p: kind("Closed", scale=lambda self: p[0].add_(1).sum())(p), MANY)
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match=r"touched a tensor of shape \(128, 150\)"):
        offloader.offload_optimizer(pair.inner)
    pair.check()


def test_parameters_that_come_later_are_rehearsed_then(spill_dir: Path) -> None:
    made = kind("ClipsVectors", scale=lambda self: _norm(self) if all(p.dim() == 1 for p in self.own) else 1.0)
    pair = Pair(kind("ByDims", made, scale=lambda self: len([p for p in self.own if p.dim() == 3]) or 1.0), MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(ConfigError, match="does not update each by itself"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 2)) for _ in range(2)]})


class Raises(Momentum):
    """At a gradient that is not finite."""

    def scale(self) -> Any:
        if not all(bool(p.grad.isfinite().all()) for p in self.own if p.grad is not None):
            raise ValueError("not finite")
        return 1.0


class Warns(Momentum):
    """Of a large gradient."""

    def scale(self) -> Any:
        if any(bool((p.grad.abs() > 100).any()) for p in self.own if p.grad is not None):
            warnings.warn("a large gradient", stacklevel=2)
        return 1.0


@pytest.mark.parametrize("made", [Raises, Warns])
def test_what_is_said_of_other_gradients_than_there_are_is_not_heard(made: type[Momentum], spill_dir: Path) -> None:
    pair = Pair(made, MANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with wrapped(pair.inner, spill_dir) as optimizer:
            for _ in range(3):
                pair.step(optimizer)
            pair.check(optimizer)


# -- known ones --------------------------------------------------------------------------------------------------------


class Named(torch.optim.AdamW):
    """Overrides nothing that updates."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=True)


class Stepping(torch.optim.AdamW):
    """Has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Initial(torch.optim.AdamW):
    """Overrides what a step calls."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]


class Helped(torch.optim.AdamW):
    """Overrides what PyTorch's code may call."""

    def _cuda_graph_capture_health_check(self) -> None:
        super()._cuda_graph_capture_health_check()  # type: ignore[no-untyped-call]


KNOWN: list[tuple[Callable[[Any], Optimizer], bool, bool]] = [
    (torch.optim.AdamW, True, True),
    (Helped, False, False),
    (Named, True, True),
    (torch.optim.Adafactor, True, False),
    (torch.optim.SparseAdam, True, False),
    (Stepping, False, False),
    (Initial, False, False),
    (Momentum, False, False),
]


@pytest.mark.parametrize(("make", "is_known", "is_elementwise"), KNOWN)
def test_pytorchs_own_and_what_inherits_their_step_are_known(
    make: Callable[[Any], Optimizer], is_known: bool, is_elementwise: bool, spill_dir: Path, caplog: Any
) -> None:
    pair = Pair(make, MANY)
    contract = Contract(pair.inner)
    assert (contract.is_known, contract.is_elementwise) == (is_known, is_elementwise)
    if make is torch.optim.SparseAdam:
        return  # takes no dense gradients
    with caplog.at_level(logging.INFO, "lightning_ssd"), wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)
    assert len([record for record in caplog.records if "rehearsed on copies" in record.message]) == (not is_known)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_is_known(spill_dir: Path) -> None:
    pair = Pair(torch.optim.Muon, MANY[:-1])
    assert Contract(pair.inner).is_known
    with wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(3):
            pair.step(optimizer)
        pair.check(optimizer)


class SwapsWeights(Momentum):
    """As schedule-free optimizers do."""

    def train(self) -> None:
        """Weights of training."""

    def eval(self) -> None:
        """Weights of evaluation."""


def _with_init_group(parameters: Any) -> Optimizer:
    optimizer = torch.optim.Adam(parameters)
    optimizer._init_group = lambda *args: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.LBFGS, "got LBFGS, whose update of one parameter depends on the others"),
        (lambda p: type("SAM", (Momentum,), {})(p), "got SAM, whose update"),
        (SwapsWeights, r"got SwapsWeights, whose train\(\) and eval\(\) exchange all weights"),
        (lambda p: kind("Owns", prepare=lambda self: setattr(self, "base", torch.optim.SGD(p)))(p), "owns another"),
        (
            lambda p: kind("OwnsDeeper", prepare=lambda self: setattr(self, "bases", {"a": [torch.optim.SGD(p)]}))(p),
            r"owns another one, SGD, in bases",
        ),
        (lambda p: kind("OwnList", prepare=lambda self: setattr(self, "mine", list(p)))(p), "holds one in mine"),
        (
            lambda p: kind("Scaled", step=lambda self, closure=None, grad_scaler=None: None)(p),
            "got Scaled, whose step takes a grad_scaler",
        ),
        (_with_init_group, "expects the _init_group of the class Adam; got another one"),
    ],
)
def test_what_is_more_than_an_update_of_each_parameter_is_refused(
    make: Callable[[Any], Optimizer], text: str, spill_dir: Path
) -> None:
    inner = make([nn.Parameter(torch.ones(3))])
    name = type(inner).__name__
    with opened(spill_dir, declared=name) as offloader, pytest.raises(ConfigError, match=text):
        offloader.offload_optimizer(inner)


def test_hooks_of_a_step_that_calls_another_are_refused(spill_dir: Path) -> None:
    pair = Pair(Stepping, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        optimizer.register_step_pre_hook(lambda *_: None)
        pair.set_gradients()
        with pytest.raises(ConfigError, match=r"Stepping, whose step calls that of a base class.*Nothing was updated"):
            optimizer.step()
        pair.check()


def test_names_that_are_no_classes_are_refused() -> None:
    assert OffloadPolicy(optimizer_states="offload", per_parameter_optimizers="Lion").per_parameter_optimizers == (
        "Lion",
    )
    with pytest.raises(ConfigError, match=r"per_parameter_optimizers contains 'a b'; allowed: names of classes"):
        OffloadPolicy(optimizer_states="offload", per_parameter_optimizers=["a b"])
    with pytest.raises(ConfigError, match=r"per_parameter_optimizers=.* with optimizer_states='keep' would be ignored"):
        OffloadPolicy(per_parameter_optimizers=["Lion"])


def test_a_rate_of_zero_hides_nothing(spill_dir: Path) -> None:
    """Warm-ups begin at 0."""
    pair = Pair(DIFFERENT["a norm"][0], MANY)
    pair.inner.param_groups[0]["lr"] = 0.0
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match="does not update each by itself"):
        offloader.offload_optimizer(pair.inner)
    assert optimizer_pairs.same(pair.inner.param_groups[0]["lr"], 0.0)
