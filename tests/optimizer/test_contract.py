"""Optimizers that are not PyTorch's own: refused unless declared, and declared ones checked once on small copies."""

import copy
import logging
import random
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ssd import OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.contract import elementwise_kind, is_known
from tests.support.declared_optimizers import MANY, Momentum, kind
from tests.support.optimizer_pairs import Pair, offloaded_pair, opened, wrapped

pytestmark = pytest.mark.usefixtures("small_subgroups")


def _count(optimizer):
    optimizer.t += 1


def _count_in_options(optimizer):
    for group in optimizer.param_groups:
        group["count"] += 1


def _count_in_state(optimizer):
    if "k" not in optimizer.state:
        optimizer.state["k"] = torch.tensor([0])
    optimizer.state["k"] += 1


EXACT = {
    "counts": kind("Counts", begin=_count, change=lambda self, p, u: u / (1 - 0.9**self.t)),
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
"""They keep the promise."""
SOMETIMES = (None, [0, 2, 6], None, [1], [], None)


def in_two(make):
    return lambda made: make([{"params": made[:-1]}, {"params": made[-1:]}])


def step_with_closure(optimizer, parameters, number):
    def closure():
        for p in parameters:
            p.grad = None
        loss = torch.stack([(p.sin() * (number + 1)).sum() for p in parameters]).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


@pytest.mark.parametrize("name", EXACT)
def test_a_declared_one_that_keeps_the_promise_is_exact(name, spill_dir):
    pair = Pair(in_two(EXACT[name]), MANY)
    for parameters in (pair.mine, pair.plain):
        parameters[2].mark = 3
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
        assert pair.inner.t == pair.twin.t
        assert optimizer.stats.num_subgroups > 5, "one call would be a plain step"


# -- programs that break the promise -----------------------------------------------------------------------------------


def _norm(optimizer):
    found = [p.grad for p in optimizer.own if p.grad is not None]
    return torch.stack([gradient.norm() for gradient in found]).norm() if found else torch.ones(())


def _count_each(self, p, update):
    self.t += 1
    return update / self.t


def _look_ahead(self):
    """Nesterov as it is written down: the gradient is that of where momentum leads to."""
    for p in self.own:
        if p.grad is not None and "m" in self.state[p]:
            p.sub_(self.state[p]["m"], alpha=0.05)


def _note_norm(self, p, update):
    self.state[p]["total"] = float(_norm(self))
    return update


def _coast(self, p, group):
    if "m" in self.state[p]:
        p.sub_(self.state[p]["m"].mul_(0.9), alpha=group["lr"])


HOSTILE = {
    "a norm": (kind("Clips", scale=_norm), "a (parameter|state) differed after a step with usual"),
    "a norm in a step that needs its closure": (
        kind("Needs", scale=_norm, step=lambda self, closure: Momentum.step(self, closure)),
        "differed after a step with usual",
    ),
    "a norm of large gradients": (
        kind("ClipsLarge", scale=lambda self: (_norm(self) / 1000).clamp(min=1)),
        "differed after a step with large",
    ),
    "a step left out": (
        kind("LeavesOut", scale=lambda self: 1.0 if _norm(self).isfinite() else torch.inf),
        "differed after a step with a gradient that is not finite",
    ),
    "a count of parameters": (kind("CountsEach", change=_count_each), "a parameter differed|attributes"),
    "a count in place": (
        kind("CountsInPlace", begin=lambda self: self.beta.mul_(0.9)),
        "its attribute 'beta' differed",
    ),
    "noise": (kind("Draws", change=lambda self, p, u: u + torch.randn_like(p)), "a parameter differed"),
    "Python's chance": (kind("DrawsInPython", change=lambda self, p, u: u * random.random()), "a parameter differed"),
    "NumPy's chance": (kind("DrawsInNumPy", change=lambda self, p, u: u * np.random.rand()), "a parameter differed"),
    "a norm for later": (kind("NotesNorm", change=_note_norm), "a state differed"),
    "positions": (
        kind("ByPosition", change=lambda self, p, u: u * (1 + [p is q for q in self.own].index(True))),
        "a parameter differed",
    ),
    "momentum without a gradient": (kind("Coasts", without=_coast), "differed after a step with a gradient missing"),
    "what is returned": (
        kind("Returns", step=lambda self, closure=None: (Momentum.step(self, closure), len(self.own))[1]),
        "what step returns differed|returns",
    ),
    "a rate of zero": (kind("Warms", scale=lambda self: _norm(self)), "differed"),
    "one parameter alone": (
        kind("Odd", scale=lambda self: 1.0 if len(self.own) > 1 else int("one")),
        "a step of one raised ValueError: invalid literal",
    ),
}
"""What they are, and what a declared one is told."""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_breaks_the_promise_is_refused_declared_or_not(name, spill_dir):
    made, text = HOSTILE[name]
    pair = Pair(made, MANY)
    if name == "a rate of zero":
        pair.inner.param_groups[0]["lr"] = 0.0  # as warm-ups begin
    before, states = torch.get_rng_state(), (random.getstate(), np.random.get_state()[2])
    own = copy.deepcopy(vars(pair.inner) | {"param_groups": [], "state": {}})
    undeclared = (
        rf"got {made.__module__}\.{made.__name__}\. .*declare it: .*per_parameter_optimizers=\['{made.__name__}'\]\)"
    )
    for names, expected in (
        ((), undeclared),
        ((made.__name__,), rf"names {made.__name__}, which does not update each .*({text}).*Nothing was updated"),
    ):
        with opened(spill_dir, declared=names) as offloader, pytest.raises(ConfigError, match=expected):
            offloader.offload_optimizer(pair.inner)
    pair.check()
    assert torch.equal(torch.get_rng_state(), before)
    assert (random.getstate(), np.random.get_state()[2]) == states
    assert own.keys() == vars(pair.inner).keys()
    assert (pair.inner.t, pair.inner.notes, pair.inner.beta) == (own["t"], own["notes"], own["beta"])
    assert not pair.inner.state


BEFORE_CLOSURE = {
    "a look ahead": (kind("LooksAhead", before=_look_ahead), "a (parameter|state) differed after a step with"),
    "evaluated twice": (
        kind("Twice", step=lambda self, closure=None: (Momentum.step(self, closure), closure and closure())[0]),
        "evaluates its closure 2 times",
    ),
    "not evaluated": (kind("Ignores", step=lambda self, closure=None: Momentum.step(self)), "did not evaluate the"),
}
"""Each keeps the promise where no closure is passed."""


@pytest.mark.parametrize("name", BEFORE_CLOSURE)
def test_what_goes_wrong_with_closures_alone_is_refused_there(name, spill_dir):
    made, text = BEFORE_CLOSURE[name]
    with offloaded_pair(made, spill_dir, MANY, steps=2) as (pair, optimizer):
        pair.check(optimizer)
        with pytest.raises(ConfigError, match=rf"in a step with a closure\. .*({text}).*Nothing was updated"):
            step_with_closure(optimizer, pair.mine, 0)
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda made, ps: made([{"params": [p]} for p in ps]), MANY),
        (lambda made, ps: made(ps), ((20000,), (128, 150), (4, 40, 125))),
        (lambda made, ps: made([{"params": ps[:1]}, {"params": ps[1:]}]), ((128, 150), (150,))),
        (lambda made, ps: made(ps), ((0, 3), (0, 3), (128, 150), (128, 150))),
    ],
)
def test_a_norm_is_seen_however_parameters_are_grouped(make, shapes, spill_dir):
    pair = Pair(lambda ps: make(HOSTILE["a norm"][0], ps), shapes)
    with pytest.raises(ConfigError, match="names Clips"), wrapped(pair.inner, spill_dir):
        pass


class Later(Momentum):
    def begin(self):
        self.t += 1
        if self.t >= 9:
            self.late()

    def late(self):
        """What it does then."""


def _norm_later(optimizer):
    optimizer.norm = float(_norm(optimizer))


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (_norm_later, r"changes its attributes \['norm', 't'\] otherwise for other parameters"),
        (lambda self: self.param_groups[0].update(norm=float(_norm(self))), r"changes its param_groups\[0\] \['norm'"),
        (lambda self: self.state[pair_of[0].mine[0]].update(m=torch.zeros(128, 150)), "keeps states for more than its"),
        (lambda self: pair_of[0].mine[0].mul_(2), "changes parameters that its step was not given"),
        (lambda self: [self.state[p].update(n=self.state[p]["m"]) for p in self.own], "states share memory"),
    ],
)
def test_a_promise_that_is_seen_broken_later_ends_the_step(late, text, spill_dir):
    pair = Pair(kind("Late", Later, late=late), MANY)
    pair_of[:] = [pair]
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.train(optimizer, 8)
        pair.check()
        pair.set_gradients()
        with pytest.raises(ConfigError, match=rf"{text}.*this step is incomplete"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="incomplete"):
            optimizer.step()


pair_of = []


# -- what cannot be tried ----------------------------------------------------------------------------------------------


def _refuse_small(optimizer):
    if any(p.numel() == 25 for p in optimizer.own):
        raise ValueError("too small")
    return 1.0


def _holding(name, make):
    return kind(name, prepare=lambda self: setattr(self, "held", make()))


UNTRIED = {
    "a lock": (_holding("Locked", threading.Lock), "cannot pickle"),
    "an error": (kind("Small", scale=_refuse_small), "ValueError: too small"),
    "a model": (_holding("Looks", lambda: nn.Linear(2, 2)), "a module in its attribute 'held'"),
    "gradients that are not finite": (
        kind("Finite", scale=lambda self: 1.0 if bool(_norm(self).isfinite()) else int("finite")),
        "ValueError: invalid literal",
    ),
}


@pytest.mark.parametrize("name", UNTRIED)
def test_the_user_s_word_is_taken_for_what_cannot_be_tried(name, spill_dir, caplog):
    made, text = UNTRIED[name]
    pair = Pair(made, MANY[:-1])
    with caplog.at_level(logging.INFO, "lightning_ssd"), wrapped(pair.inner, spill_dir) as optimizer:
        told = [record.getMessage() for record in caplog.records if "on your word" in record.getMessage()]
        assert len(told) == 1
        assert f"{made.__name__} cannot be tried on copies" in told[0]
        assert text in told[0]
        for active in (None, [0, 2], None):
            pair.step(optimizer, active)
            pair.check(optimizer)


@pytest.mark.parametrize("edit", [lambda p: p.add_(1), lambda p: p.detach().mul_(2), lambda p: p.grad.zero_()])
def test_a_rehearsal_does_not_reach_the_model(edit, spill_dir):
    pair = Pair(lambda parameters: kind("Closed", begin=lambda self: edit(parameters[0]))(parameters), MANY)
    pair.set_gradients()
    before = [p.grad.clone() for p in pair.mine if p.grad is not None]
    text = r"names Closed, .* touched a tensor of the model that it was not given, by aten"
    with pytest.raises(ConfigError, match=text), wrapped(pair.inner, spill_dir):
        pass
    pair.check()
    assert all(map(torch.equal, before, [p.grad for p in pair.mine]))


class Named(torch.optim.AdamW):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)


class Stepping(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class Initial(torch.optim.AdamW):
    def _init_group(self, *args, **kwargs):
        return super()._init_group(*args, **kwargs)


class Grouped(torch.optim.AdamW):
    @property
    def param_groups(self):
        return self._groups

    @param_groups.setter
    def param_groups(self, groups):
        self._groups = groups


KNOWN = [
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
    make, known, elementwise, spill_dir, monkeypatch
):
    pair = Pair(make, MANY[:-1])
    assert (is_known(pair.inner), elementwise_kind(pair.inner) is not None) == (known, elementwise)
    with opened(spill_dir) as offloader:
        if not known:
            with pytest.raises(ConfigError, match=r"known to be exact for Adam, AdamW, .*got .*declare it") as refusal:
                offloader.offload_optimizer(pair.inner)
            line = re.search(r"OffloadPolicy\(.*?\)", str(refusal.value))[0]
            assert eval(line).per_parameter_optimizers == (type(pair.inner).__name__,)  # accepted as it is written
        elif make is not torch.optim.SparseAdam:  # which takes no dense gradients
            monkeypatch.setattr("lightning_ssd.optimizer.offloaded_optimizer.rehearse", None)
            optimizer = offloader.offload_optimizer(pair.inner)
            pair.train(optimizer, 3)
            pair.check(optimizer)


@pytest.mark.parametrize("declared", ["Momentum", f"{Momentum.__module__}.Momentum"])
def test_a_class_is_declared_by_its_name_or_with_its_module(declared, spill_dir):
    pair = Pair(Momentum, MANY)
    with opened(spill_dir, declared=declared) as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(ConfigError, match=r"got .*\.Counts\. .*declare it"):
            offloader.offload_optimizer(kind("Counts")([nn.Parameter(torch.ones(3))]))


class SwapsWeights(Momentum):
    """As schedule-free optimizers do."""

    def train(self):
        """Weights of training."""

    def eval(self):
        """Weights of evaluation."""


def _with_method(name, method):
    def make(parameters):
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
        (kind("Slots", __slots__=("k",)), r"which has 'k' in __slots__ or"),
        (_with_method("_init_group", lambda *_: None), "expects the _init_group of the class Adam; got another one"),
        (_with_method("step", lambda *_: None), "expects the step of the class Adam; got another one"),
    ],
)
def test_what_is_more_than_an_update_of_each_parameter_is_refused(make, text, spill_dir):
    with pytest.raises(ConfigError, match=text), wrapped(make([nn.Parameter(torch.ones(3))]), spill_dir):
        pass


def test_methods_that_no_step_calls_may_be_set(spill_dir):
    with wrapped(_with_method("zero_grad", lambda *_: None)([nn.Parameter(torch.ones(3))]), spill_dir):
        pass


def test_hooks_of_a_step_that_calls_another_are_refused(spill_dir):
    with offloaded_pair(Stepping, spill_dir, MANY, steps=1) as (pair, optimizer):
        pair.check(optimizer)
        handle = optimizer.register_step_pre_hook(lambda *_: None)
        pair.set_gradients()
        with pytest.raises(ConfigError, match="calls the step of a base class, which would run its step hooks again"):
            optimizer.step()
        handle.remove()


def test_names_that_are_no_classes_are_refused():
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
    def step(self, closure=None):
        return super().step(closure)


def test_what_a_scaler_sets_is_no_counter(spill_dir):
    """After ``unscale_`` it sets ``grad_scale=None``, a plain value."""
    with offloaded_pair(lambda parameters: Fused(parameters, fused=True), spill_dir, MANY) as (pair, optimizer):
        for each in (pair.twin, optimizer):
            each.grad_scale, each.found_inf = None, torch.zeros(())
        for _ in range(2):
            pair.step(optimizer)
            pair.check()
        del optimizer.grad_scale, optimizer.found_inf
        assert vars(pair.inner).keys().isdisjoint({"grad_scale", "found_inf"})


def test_a_trial_that_reaches_the_optimizer_itself_leaves_no_mark(spill_dir):
    def made(parameters):
        optimizer = kind("Ticks", begin=lambda self: self.tick())(parameters)
        optimizer.k = 0
        optimizer.tick = lambda: setattr(optimizer, "k", optimizer.k + 1)
        return optimizer

    pair = Pair(made, MANY)
    with wrapped(pair.inner, spill_dir) as optimizer:
        assert pair.inner.k == 0
        for number in (1, 2):
            pair.step(optimizer)
            pair.check(optimizer)
            assert pair.inner.k == number


def test_a_class_of_pytorch_that_was_patched_is_not_known(spill_dir, monkeypatch):
    init_group = torch.optim.SGD._init_group
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


def test_a_trial_that_reaches_the_options_themselves_leaves_no_mark(spill_dir):
    def made(parameters):
        optimizer = kind("CountsPast", begin=lambda self: self.tick())(parameters)
        [group] = optimizer.param_groups
        optimizer.tick = lambda: group.update(count=group["count"] + 1)
        return optimizer

    pair = Pair(made, MANY)
    with pytest.raises(ConfigError, match="changed options of the optimizer itself"), wrapped(pair.inner, spill_dir):
        pass
    assert pair.inner.param_groups[0]["count"] == 0
