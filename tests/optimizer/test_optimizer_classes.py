"""Which classes of optimizers are known, which are declared, and which are refused whatever is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.contract import is_elementwise, is_known
from tests.support.declared_optimizers import MANY, Momentum, kind
from tests.support.optimizer_pairs import Pair, adamw, offloaded_pair, opened, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")


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


class Grouped(torch.optim.AdamW):
    """Shows other groups than it has."""

    @property
    def param_groups(self) -> Any:
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self._groups = groups


KNOWN: list[tuple[Callable[[Any], Optimizer], bool, bool]] = [
    (torch.optim.AdamW, True, True),
    (Named, True, True),
    (torch.optim.Adafactor, True, False),
    (torch.optim.SparseAdam, True, False),
    *([(torch.optim.Muon, True, False)] if hasattr(torch.optim, "Muon") else []),
    (Stepping, False, False),
    (Initial, False, False),
    (Grouped, False, False),
    (Momentum, False, False),
]


@pytest.mark.parametrize(("make", "known", "elementwise"), KNOWN)
def test_pytorchs_own_and_what_inherits_all_that_a_step_calls_are_known(
    make: Callable[[Any], Optimizer], known: bool, elementwise: bool, spill_dir: Path, monkeypatch: Any
) -> None:
    pair = Pair(make, MANY[:-1])
    assert (is_known(pair.inner), is_elementwise(pair.inner)) == (known, elementwise)
    with opened(spill_dir) as offloader:
        if not known:
            with pytest.raises(ConfigError, match=r"known to be exact for Adam, AdamW, .*got .*declare it"):
                offloader.offload_optimizer(pair.inner)
        elif make is not torch.optim.SparseAdam:  # which takes no dense gradients
            monkeypatch.setattr("lightning_ssd.optimizer.offloaded_optimizer.rehearse", None)
            optimizer = offloader.offload_optimizer(pair.inner)
            pair.train(optimizer, 3)
            pair.check(optimizer)


@pytest.mark.parametrize("declared", ["Momentum", f"{Momentum.__module__}.Momentum"])
def test_a_class_is_declared_by_its_name_or_with_its_module(declared: str, spill_dir: Path) -> None:
    pair = Pair(Momentum, MANY)
    with opened(spill_dir, declared=declared) as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(ConfigError, match=r"got .*\.Counts\. .*declare it"):
            offloader.offload_optimizer(kind("Counts")([nn.Parameter(torch.ones(3))]))


class SwapsWeights(Momentum):
    """As schedule-free optimizers do."""

    def train(self) -> None:
        """Weights of training."""

    def eval(self) -> None:
        """Weights of evaluation."""


def _with_method(name: str, method: Any) -> Callable[[Any], Optimizer]:
    def make(parameters: Any) -> Optimizer:
        optimizer = torch.optim.Adam(parameters)
        setattr(optimizer, name, method)
        return optimizer

    return make


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
            "got Scaled, whose step takes a grad_scaler.*Take that argument out",
        ),
        (_with_method("_init_group", lambda *_: None), "expects the _init_group of the class Adam; got another one"),
        (_with_method("step", lambda *_: None), "expects the step of the class Adam; got another one"),
    ],
)
def test_what_is_more_than_an_update_of_each_parameter_is_refused(
    make: Callable[[Any], Optimizer], text: str, spill_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=text), wrapped(make([nn.Parameter(torch.ones(3))]), spill_dir):
        pass


def test_methods_that_no_step_calls_may_be_set(spill_dir: Path) -> None:
    with wrapped(_with_method("zero_grad", lambda *_: None)([nn.Parameter(torch.ones(3))]), spill_dir):
        pass


def test_hooks_of_a_step_that_calls_another_are_refused(spill_dir: Path) -> None:
    with offloaded_pair(Stepping, spill_dir, MANY, steps=1) as (pair, optimizer):
        pair.check(optimizer)
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        pair.set_gradients()
        with pytest.raises(ConfigError, match="calls the step of a base class, which would run its step hooks again"):
            optimizer.step()
        handle.remove()


def test_names_that_are_no_classes_are_refused() -> None:
    for names in ("Lion", "package.optimizers.Lion"):
        assert OffloadPolicy(optimizer_states="offload", per_parameter_optimizers=names).per_parameter_optimizers == (
            names,
        )
    with pytest.raises(ConfigError, match=r"per_parameter_optimizers contains 'a b', .*\. Write names of classes"):
        OffloadPolicy(optimizer_states="offload", per_parameter_optimizers=["a b"])
    with pytest.raises(ConfigError, match=r"per_parameter_optimizers=.* with optimizer_states='keep' would be ignored"):
        OffloadPolicy(per_parameter_optimizers=["Lion"])


class Fused(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_a_scaler_sets_is_no_counter(spill_dir: Path) -> None:
    """After ``unscale_`` it sets ``grad_scale=None``, a plain value."""
    with offloaded_pair(lambda parameters: Fused(parameters, fused=True), spill_dir, MANY) as (pair, optimizer):
        for each in (pair.twin, optimizer):
            each.grad_scale, each.found_inf = None, torch.zeros(())  # type: ignore[attr-defined]
        for _ in range(2):
            pair.step(optimizer)
            pair.check()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        assert vars(pair.inner).keys().isdisjoint({"grad_scale", "found_inf"})


def test_a_step_that_needs_its_closure_is_tried_with_one(spill_dir: Path) -> None:
    def step(self: Any, closure: Any) -> Any:
        return Momentum.step(self, closure)

    pair = Pair(kind("Needs", begin=_norm_of_all, step=step), MANY)
    with pytest.raises(ConfigError, match="names Needs, which does not update"), wrapped(pair.inner, spill_dir):
        pass


def _norm_of_all(optimizer: Any) -> None:
    norm = torch.stack(
        [p.grad.norm() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    ).norm()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(norm)


def test_a_trial_that_reaches_the_optimizer_itself_leaves_no_mark(spill_dir: Path) -> None:
    def made(parameters: Any) -> Any:
        optimizer: Any = kind("Ticks", begin=lambda self: self.tick())(parameters)
        optimizer.k = 0
        optimizer.tick = lambda: setattr(optimizer, "k", optimizer.k + 1)
        return optimizer

    pair = Pair(made, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        assert pair.inner.k == 0  # type: ignore[attr-defined]
        for number in (1, 2):
            pair.step(optimizer)
            pair.check(optimizer)
            assert pair.inner.k == number  # type: ignore[attr-defined]


def test_a_trial_that_reaches_the_options_themselves_leaves_no_mark(spill_dir: Path) -> None:
    def made(parameters: Any) -> Any:
        optimizer: Any = kind("CountsPast", begin=lambda self: self.tick())(parameters)
        [group] = optimizer.param_groups
        optimizer.tick = lambda: group.update(count=group["count"] + 1)
        return optimizer

    pair = Pair(made, MANY)
    with pytest.raises(ConfigError, match="changed options of the optimizer itself"), wrapped(pair.inner, spill_dir):
        pass
    assert pair.inner.param_groups[0]["count"] == 0


def test_counters_in_slots_are_refused(spill_dir: Path) -> None:
    pair = Pair(kind("Slots", __slots__=("k",)), MANY)
    with pytest.raises(ConfigError, match=r"which has 'k' in __slots__ or"), wrapped(pair.inner, spill_dir):
        pass


class Health(torch.optim.Optimizer):
    def _accelerator_graph_capture_health_check(self) -> None:
        _norm_of_all(self)


class Behind(torch.optim.Adam, Health):
    """What a step calls is found behind Adam, and before PyTorch's."""


def test_a_base_behind_a_known_one_is_looked_at(spill_dir: Path) -> None:
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match="declare it"):
        offloader.offload_optimizer(Behind(Pair(adamw).mine))


def test_a_class_of_pytorch_that_was_patched_is_not_known(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_group = torch.optim.SGD._init_group  # type: ignore[attr-defined]
    pair = Pair(lambda parameters: torch.optim.SGD(parameters, lr=0.1), MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 1)
        monkeypatch.setattr(torch.optim.SGD, "_init_group", lambda *args: init_group(*args))
        pair.set_gradients()
        with pytest.raises(ConfigError, match=r"the class SGD was changed after offload_optimizer\(\)"):
            optimizer.step()
        monkeypatch.undo()
        pair.step(optimizer)
        pair.check(optimizer)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", lambda *args: init_group(*args))
    with opened(spill_dir) as offloader, pytest.raises(ConfigError, match="declare it"):
        offloader.offload_optimizer(torch.optim.SGD(pair.mine))
