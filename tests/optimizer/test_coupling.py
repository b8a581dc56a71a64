"""What an optimizer changes beside parameters, states and options: exact where all calls do the same, else refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.attribute_snapshot import AttributeSnapshot
from lightning_ssd.optimizer.step.coupling import refuse_coupling, refuse_own_parameters
from lightning_ssd.optimizer.step.dry_run import DryRun
from lightning_ssd.optimizer.step.step_effects import random_states
from lightning_ssd.optimizer.step.stepper import SubgroupStepper
from tests.support import optimizer_pairs

MANY = ((128, 150),) * 6 + ((7,),)
"""Large ones of one size, each a subgroup by itself where parameters are not cut."""


pytestmark = pytest.mark.usefixtures("small_subgroups")


class Custom(Optimizer):
    """Momentum by hand, with a hook for what a class adds to a whole step or to each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})
        self.t = 0
        self.beta = torch.ones(())
        self.notes: dict[str, Any] = {"past": [], "seen": {"steps": 0}}
        self.memory: dict[torch.Tensor, torch.Tensor] = {}
        self.buffer = torch.zeros(5_000)
        self.generator: torch.Generator | None = None

    def begin(self) -> None:
        """Once per call."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """For each parameter."""
        return update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(self.change(p, momentum), alpha=group["lr"])


class Counts(Custom):
    """A number, for bias correction."""

    def begin(self) -> None:
        self.t += 1

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update / (1 - 0.9**self.t)


class CountsInPlace(Custom):
    """A tensor that somebody else may hold."""

    def begin(self) -> None:
        self.beta.mul_(0.9)

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update / (1 - self.beta)


class TakesNotes(Custom):
    """Containers, and an attribute that is new."""

    def begin(self) -> None:
        self.notes["past"].append(torch.tensor(float(len(self.notes["past"]))))
        self.notes["seen"]["steps"] += 1
        self.late = self.notes["seen"]["steps"]

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update * (self.notes["past"][-1] + self.late)


class Caches(Custom):
    """What the first parameter of a step has worked out, the others take; groups without a gradient do nothing."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        state["n"] = state.get("n", 0) + 1
        slot = self.notes.setdefault("slots", {})
        slot.setdefault(state["n"], 1 - 0.9 ** state["n"])
        return update / slot[state["n"]]


class Remembers(Custom):
    """By parameter, in a dictionary of its own."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        if p.shape in [(128, 150), (7,)]:
            self.memory.setdefault(p, torch.zeros_like(p)).add_(update)
        return self.memory[p]


class Pair(optimizer_pairs.Pair):
    """The last parameter is a group of its own."""

    def __init__(self, kind: Callable[[Any], Optimizer], shapes: tuple[tuple[int, ...], ...] = MANY) -> None:
        super().__init__(lambda made: kind([{"params": made[:-1]}, {"params": made[-1:]}]), shapes)
        self.start = [p.detach().clone() for p in self.mine]

    def set_first_gradients(self, num: int | None) -> None:
        """Of so many parameters; ``None``: all."""
        self.set_gradients(None if num is None else list(range(num)))

    def are_untouched(self) -> bool:
        return all(map(torch.equal, self.mine, self.start))


CHANGING = (None, 6, None, 2, 1, 0, None)
"""How many parameters have a gradient in each step: all, all but the last group, none ..."""


@pytest.mark.parametrize(
    ("kind", "nums"),
    [
        (Counts, CHANGING),
        (CountsInPlace, CHANGING),
        (TakesNotes, CHANGING),
        (Remembers, CHANGING),
        (Caches, (6, 6, 0, 6)),  # as long as parameters have been updated equally often
    ],
)
def test_attributes_are_those_of_a_plain_step(
    kind: type[Custom], nums: tuple[int | None, ...], spill_dir: Path
) -> None:
    pair = Pair(kind)
    held = pair.inner.beta
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for num in nums:
            pair.set_first_gradients(num)
            optimizer.step()
            pair.twin.step()
            pair.check()
            assert pair.inner.t == pair.twin.t
            assert pair.inner.notes == pair.twin.notes
            assert torch.equal(held, pair.twin.beta)
        assert pair.inner.beta is held
        assert optimizer.stats.num_subgroups > 5, "one call would be a plain step"
    assert vars(pair.inner).keys() == vars(pair.twin).keys() | {"_opt_called"}


class CountsEach(Custom):
    """By parameter: subgroups of one parameter each would all count one."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        self.t += 1
        return update / self.t


class CountsEachInItsGroup(Custom):
    """The same in an option."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        group = next(group for group in self.param_groups if any(p is q for q in group["params"]))
        group["count"] += 1
        return update / group["count"]


class Adds(Custom):
    """The sum of all gradients, one after the other."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        self.notes["sum"] = self.notes.get("sum", 0.0) + float(update.sum())
        return update / self.notes["sum"]


class EditsLarge(Custom):
    """More than is copied before each call."""

    def begin(self) -> None:
        self.buffer.add_(1)


class Draws(Custom):
    """SGLD, or stochastic rounding."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update + torch.randn_like(p)


class DrawsInPython(Custom):
    """Whether to leave a parameter out."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update * random.random()


class DrawsInNumPy(Custom):
    """The same."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update * float(np.random.rand())


class DrawsByItself(Custom):
    """From a generator of its own."""

    def begin(self) -> None:
        self.generator = self.generator or torch.Generator().manual_seed(3)

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update + torch.randn(p.shape, generator=self.generator)


COUPLED: dict[type[Custom], str] = {
    CountsEach: r"attributes \['t'\]",
    CountsEachInItsGroup: r"options \['count'\]",
    Adds: r"attributes \['notes'\]",
    EditsLarge: r"a tensor of shape \(5000,\) in an attribute",
    Draws: "random numbers",
    DrawsInPython: "random numbers",
    DrawsInNumPy: "random numbers",
}


@pytest.mark.parametrize("kind", COUPLED)
def test_what_differs_between_parameters_is_refused_before_they_are_touched(
    kind: type[Custom], spill_dir: Path
) -> None:
    pair = Pair(kind)
    pair.set_gradients()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        before = random_states(pair.inner, [])
        with pytest.raises(ConfigError, match=rf"{COUPLED[kind]}.*Nothing was updated"):
            optimizer.step()
        assert pair.are_untouched()
        assert not before.are_used()
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()


def test_a_generator_of_its_own_is_no_way_out(spill_dir: Path) -> None:
    pair = Pair(DrawsByItself)
    pair.inner.generator = torch.Generator().manual_seed(3)
    before = pair.inner.generator.get_state()
    pair.set_gradients()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        with pytest.raises(ConfigError, match="random numbers"):
            optimizer.step()
        assert pair.are_untouched()
        assert torch.equal(pair.inner.generator.get_state(), before)


class Disturbed(Custom):
    """While it runs, another thread (a loader of data, say) draws from the random numbers that all share."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        if p.numel() > 1 and self.is_disturbed:
            random.random()
            np.random.rand()
        return update

    is_disturbed = False


def test_random_numbers_of_others_are_not_blamed_on_the_optimizer(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(Disturbed)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(3):
            pair.step(optimizer)
            monkeypatch.setattr(Disturbed, "is_disturbed", True)  # not in the rehearsal
        pair.check()


def test_pytorchs_own_are_trusted(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may draw from PyTorch's random numbers, too, while Adam runs."""
    pair = Pair(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    monkeypatch.setattr("lightning_ssd.optimizer.step.stepper.StepEffects.noted", None)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        pair.check()


class DrawsLater(Custom):
    """After a warm-up that is longer than a rehearsal."""

    def begin(self) -> None:
        self.t += 1

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return update if self.t < 6 else update + torch.randn_like(p)


def test_noise_that_comes_later_ends_training_there(spill_dir: Path) -> None:
    pair = Pair(DrawsLater)
    pair.set_gradients()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for _ in range(5):
            optimizer.step()
            pair.twin.step()
        pair.check()
        with pytest.raises(ConfigError, match=r"random numbers.* this step is incomplete"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()


@pytest.mark.parametrize("kind", [Draws, CountsEach, Adds])
def test_one_call_is_a_plain_step(kind: type[Custom], spill_dir: Path) -> None:
    """Small models fit into one subgroup: there is nothing to refuse."""
    pair = Pair(kind, ((30, 4), (5,), (7,)))
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        for num in (None, 2, None):  # the last group has no gradient
            pair.set_first_gradients(num)
            state = torch.get_rng_state()
            optimizer.step()
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            pair.twin.step()
            assert torch.equal(torch.get_rng_state(), after)
            pair.check()
            assert pair.inner.notes == pair.twin.notes
        assert optimizer.stats.num_subgroups == 1


def test_a_call_that_does_not_count_leaves_nothing() -> None:
    pair = Pair(TakesNotes)
    pair.set_gradients()
    before, keys = AttributeSnapshot(pair.inner), vars(pair.inner).keys() | set()
    DryRun(SubgroupStepper(pair.inner), pair.inner).play(pair.mine[0], 0, None, num_calls=2)
    assert before.changed(AttributeSnapshot(pair.inner)) == []
    assert vars(pair.inner).keys() == keys
    assert pair.are_untouched()
    pair.inner.notes["past"].append(None)
    assert before.changed(AttributeSnapshot(pair.inner)) == ["notes"]


class Odd(Counts):
    """Does not take small parameters alone."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        if sum(q.numel() for group in self.param_groups for q in group["params"]) == 21:
            raise ValueError("too few")
        return super().change(p, update)


def test_what_cannot_be_rehearsed_is_refused(spill_dir: Path) -> None:
    """An error of the copies' alone says nothing of what the optimizer does with others."""
    pair = Pair(Odd, ((128, 150),) * 4 + ((3, 7),) * 2)
    pair.set_gradients()
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        with pytest.raises(ConfigError, match="raised ValueError: too few"):
            optimizer.step()
        assert pair.are_untouched()


def test_one_call_needs_no_rehearsal(spill_dir: Path) -> None:
    pair = Pair(Odd, ((3, 7),) * 2)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        pair.check()


class ScalesMark(Custom):
    """Keeps a gradient of its own beside each parameter, as Megatron does, and edits it."""

    def change(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return p.main_grad.mul_(0.5) + update  # type: ignore[attr-defined,no-any-return]


def test_a_rehearsal_does_not_touch_what_is_marked_on_a_parameter(spill_dir: Path) -> None:
    pair = Pair(ScalesMark)
    for parameter in (*pair.mine, *pair.plain):
        parameter.main_grad = torch.ones_like(parameter)
    with optimizer_pairs.wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)
        pair.check()
        assert all(torch.equal(a.main_grad, b.main_grad) for a, b in zip(pair.mine, pair.plain, strict=True))


def test_a_parameter_of_a_subclass_is_found_in_another_place() -> None:
    class Marked(torch.Tensor):
        """With a storage of its own, as any tensor."""

    parameter = torch.nn.Parameter(torch.ones(4).as_subclass(Marked))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.mine = [parameter]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="holds one in mine"):
        refuse_own_parameters(optimizer)


def test_a_method_set_on_the_instance_is_refused() -> None:
    def once_per_call(self: Any, *args: Any) -> Any:
        raise AssertionError("not to be called")

    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(9))])
    optimizer._init_group = once_per_call  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"expects the _init_group of the class Adam; got another one, .* on the"):
        refuse_coupling(optimizer)
    harmless = torch.optim.Adam([torch.nn.Parameter(torch.ones(9))])
    harmless.zero_grad = once_per_call  # type: ignore[method-assign]
    refuse_coupling(harmless)


def test_a_step_that_takes_a_scaler_is_refused() -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(ConfigError, match=r"Scaled, whose step takes a grad_scaler.*Take that argument out"):
        refuse_coupling(Scaled([torch.nn.Parameter(torch.ones(9))]))
