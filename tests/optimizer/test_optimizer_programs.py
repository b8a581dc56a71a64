"""What programs do to an optimizer, its states and its parameters between steps: the bits of the plain one."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.elementwise import UpdateProbe
from tests.support.declared_optimizers import Momentum
from tests.support.odd_pairs import OddPair
from tests.support.opened import offloader_in
from tests.support.optimizer_pairs import (
    TEN,
    Nested,
    Shapes,
    adamw,
    assert_same_parameters,
    offloaded,
    offloaded_pair,
    partition_of,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("small_subgroups")

CUT = ((300, 200), (7,), (300, 200))
"""Two of these are cut into slices."""
SIX = ((128, 150),) * 6
Parameters = list[nn.Parameter]


@dataclass(frozen=True)
class Program:
    """What is optimized, and what is done to each of the two optimizers before each step."""

    act: Callable[[Any, Parameters, int], object] = lambda each, parameters, step: None
    make: Callable[[Any], Optimizer] = adamw
    shapes: Shapes = TEN
    active: tuple[list[int] | None, ...] = (None,) * 4
    """Parameters that have a gradient in each step; ``None``: all."""
    tells_states: bool = True


# -- optimizers --------------------------------------------------------------------------------------------------------


class KeepsElsewhere(Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.momenta = None

    @torch.no_grad()
    def step(self, closure=None):
        self.momenta = self.momenta or type("Momenta", (), {"of": {}})()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.momenta.of.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)


class WithoutInit(Optimizer):
    """Makes by hand what its step needs, and no places for hooks of its ``state_dict``."""

    def __init__(self, params):
        self.defaults, self.state = {"lr": 0.1}, defaultdict(dict)
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class ByPlace(Optimizer):
    def __init__(self, params, **options):
        super().__init__(params, {"lr": 0.1, "betas": [0.9, 0.5], **options})
        self.base_rates = [group["lr"] for group in self.param_groups]

    def rates(self):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["betas"] == [0.9, 0.5]
        for p, rate in self.rates():
            if p.grad is not None:
                momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=rate)


class ZipsGroups(ByPlace):
    def rates(self):
        pairs = zip(self.param_groups, self.base_rates, strict=True)
        return [(p, rate) for group, rate in pairs for p in group["params"]]


class ZipsNames(ByPlace):
    def rates(self):
        pairs = [pair for g in self.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
        return [(p, 0.01 * int(name)) for name, p in pairs]


class NotesInGroups(ByPlace):
    """Counts deep within the options of each group, in place."""

    def rates(self):
        for group in self.param_groups:
            group["notes"]["past"].append(1)
        return [(p, 0.1 / len(g["notes"]["past"])) for g in self.param_groups for p in g["params"]]


class Eager(torch.optim.SGD):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for p in param_group["params"]:
            self.state[p]["momentum_buffer"] = torch.ones_like(p)


# -- what is done to them ----------------------------------------------------------------------------------------------


def load_own(each, parameters, step):
    if step == 7:
        each.load_state_dict(copy.deepcopy(each.state_dict()))


def toggle_amsgrad(each, parameters, step):
    """It makes new states in the middle. One that it finds without its maximum is a KeyError in the plain one, too."""
    if step == 3:
        saved = copy.deepcopy(each.state_dict())
        for state in saved["state"].values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        each.load_state_dict(saved)
    each.param_groups[0]["amsgrad"] = step in (3, 4)


def add_group(each, parameters, step):
    if step == 1:
        parameters.append(nn.Parameter(torch.ones(128, 150)))
        each.add_param_group({"params": parameters[-1:]})


def double_data(each, parameters, step):
    for p in parameters:
        p.data = p.data * 2


def zero_and_step(each, parameters, step):
    held = [p.grad for p in parameters]
    each.zero_grad(set_to_none=False)
    each.step()
    assert all(p.grad is gradient for p, gradient in zip(parameters, held, strict=True))


def replace_method(each, parameters, step):
    each.scale = lambda: 2.0


def regroup(each, parameters, step):
    """Into a group whose slices were not tried yet, and that has another number, since one before it has gone."""
    if step == 1:
        first = each.param_groups.pop(0)
        each.param_groups[0]["params"].extend(first["params"])


def count_rounds(each, parameters, step):
    """In a state that all parameters share."""
    if step == 3:
        each.load_state_dict(copy.deepcopy(each.state_dict()))
    elif step == 4:
        del each.state["rounds"]
        assert "rounds" not in each.state
    else:
        each.state["rounds"] = {"n": each.state["rounds"].get("n", 0) + 1}


def replace_small(each, parameters, step):
    """By an equal one. Whoever has put it there may edit it later."""
    for p in (parameters[2], parameters[9]):
        if step == 2:
            each.state[p]["step"] = p.held = each.state[p]["step"].clone()
            each.state[p]["mark"] = torch.zeros(3)
        if step == 3:
            p.held.add_(5)


def mark_zero(each, parameters, step):
    """A number is replaced by one that is only equal."""
    if step in (1, 2):
        each.state[parameters[2]]["mark"] = (0.0, -0.0)[step - 1]
    assert step < 3 or str(each.state[parameters[2]]["mark"]) == "-0.0"


def clear_state(each, parameters, step):
    if step == 1:
        each.state[parameters[2]].clear()


def look_and_load(each, parameters, step):
    """A state that somebody has looked at before there was one is saved as an empty one, in its order."""
    if step == 1:
        assert not each.state[parameters[0]]
        assert list(each.state_dict()["state"]) == [2, 0]
        each.load_state_dict(copy.deepcopy(each.state_dict()))


def load_fewer(each, parameters, step):
    """As in PyTorch's tutorial: a hook takes a checkpoint with fewer parameters into an optimizer with more of them."""

    def into_all(optimizer, saved):
        adapted = copy.deepcopy(optimizer.state_dict())
        adapted["state"] |= {2 - number: state for number, state in saved["state"].items()}
        return adapted

    if step == 1:
        saved = copy.deepcopy(each.state_dict())
        del saved["state"][2]
        each.register_load_state_dict_pre_hook(into_all)
        each.load_state_dict(saved)


SOMETIMES = (None, [0, 3, 7], [7, 8], None)
PROGRAMS = {
    "states come late, go, swap, nest and change their type": Program(
        load_own, Nested, active=(*([0, 1, 2, 8], None) * 3, [0, 1, 2, 8], None)
    ),
    "options change": Program(toggle_amsgrad, lambda p: torch.optim.Adam(p, lr=1e-2), active=(None,) * 8),
    "a new group brings states": Program(add_group, lambda p: Eager(p, lr=0.1, momentum=0.9)),
    "data is replaced": Program(double_data, shapes=((300, 200), (128, 150), (7,), *SIX)),
    "gradients stay and are zeroed": Program(zero_and_step, shapes=((300, 200), (128, 150), (7,), *SIX)),
    "no hooks of a state dict": Program(make=WithoutInit, shapes=SIX, tells_states=False),
    "an object keeps momenta by parameter": Program(make=KeepsElsewhere, shapes=SIX, active=(None, [0, 5], None)),
    "a method is replaced": Program(replace_method, Momentum),
    "groups are zipped, one of them empty": Program(
        make=lambda p: ZipsGroups([{"params": []}, {"params": p[:6]}, {"params": p[6:], "lr": 0.01}]), active=SOMETIMES
    ),
    "names are zipped": Program(make=lambda p: ZipsNames([(str(n), q) for n, q in enumerate(p)]), active=SOMETIMES),
    "notes in groups": Program(
        make=lambda p: NotesInGroups([{"params": [q], "notes": {"past": []}} for q in p]), active=SOMETIMES
    ),
    "parameters get another group": Program(
        regroup, lambda p: adamw([{"params": p[:1]}, {"params": p[1:]}]), ((5,), (2049, 70), (2049, 70))
    ),
    "a state that all share": Program(count_rounds, active=(None,) * 5),
    "a small state is replaced": Program(replace_small, shapes=((128, 150),) * 9 + ((7,),), active=(None,) * 5),
    "a number is replaced": Program(mark_zero),
    "an empty state": Program(clear_state, active=(None, None)),
    "loaded states are empty": Program(look_and_load, shapes=CUT, active=([2], None, [1, 2], None)),
    "a checkpoint of fewer parameters": Program(load_fewer, shapes=CUT),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_bits_of_the_plain_optimizer(name, spill_dir):
    program = PROGRAMS[name]
    with offloaded_pair(program.make, spill_dir, program.shapes) as (pair, optimizer):
        for step, active in enumerate(program.active):
            for each, parameters in ((optimizer, pair.mine), (pair.twin, pair.plain)):
                program.act(each, parameters, step)
            pair.step(optimizer, active)
            pair.check(optimizer if program.tells_states else None)


def test_loaded_states_that_slices_cannot_share_come_back_as_they_were(spill_dir):
    with offloaded_pair(adamw, spill_dir, CUT, steps=1) as (pair, optimizer):
        saved = pair.twin.state_dict()
        saved["state"][0]["past"] = [torch.ones(3), 2]
        saved["state"][2]["row"] = torch.ones(partition_of(optimizer).subgroups[0].parts[0].num_elements)
        for each in (optimizer, pair.twin):
            each.load_state_dict(copy.deepcopy(saved))
        pair.check(optimizer)
        pair.train(optimizer, 2)
        pair.check(optimizer)


@pytest.mark.parametrize("masters", [False, True])
def test_places_of_half_precision_parameters(masters, spill_dir):
    """What is updated is not the parameter, but its float32 copy; with numbers that both hold exactly."""
    start = [torch.full((128, 150), float(n)) for n in range(6)]
    names = ["0", "100", "200", "400", "800", "1600"]
    mine, plain = ([nn.Parameter(p.clone().bfloat16()) for p in start] for _ in range(2))
    twin = ZipsNames(list(zip(names, plain, strict=True)))
    inner = ZipsNames(list(zip(names, mine, strict=True)))
    declared = {"master_weights": masters, "per_parameter_optimizers": "ZipsNames"}
    with offloader_in(spill_dir, activations="keep", optimizer_states="offload", **declared) as offloader:
        optimizer = offloader.offload_optimizer(inner)
        for p, q in zip(mine, plain, strict=True):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        twin.step()
        assert_same_parameters(mine, plain)


SHAPE = (2049, 70)
"""Its halves, one for each thread, and its slices end within a vector."""


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


CHANGES = {
    "rate of SGD": (lambda p: optim.SGD(p, lr=1.0), {"lr": 0.0123}),
    "decay of Adam": (lambda p: optim.Adam(p, lr=1e-2), {"weight_decay": 0.1}),
}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("change", CHANGES)
def test_options_that_change_later_give_the_same_bits(change, dtype, spill_dir):
    make, edit = CHANGES[change]
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    pair = OddPair(make, lambda: [nn.Parameter(start.clone())])
    with wrapped(pair.inner, spill_dir) as optimizer:
        for step in range(6):
            for each in (optimizer, pair.twin) if step == 1 else ():
                each.param_groups[0].update(edit)
            pair.step(optimizer)
        pair.check(optimizer)


@pytest.mark.parametrize(
    ("dtype", "has_master", "fused", "may"),
    [
        (torch.float32, False, False, True),
        (torch.float64, False, False, True),
        (torch.bfloat16, False, False, False),
        (torch.float16, False, False, False),
        (torch.bfloat16, True, False, True),
        (torch.float32, False, True, False),
    ],
)
def test_what_is_cut(dtype, has_master, fused, may):
    """SGD with a rate of 1 multiplies by nothing else: no trial with these options tells slices from the whole."""
    parameter = nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = optim.SGD([parameter], lr=1.0, fused=fused)
    probe = UpdateProbe(optimizer, kind=optim.SGD, has_master=lambda p: has_master)
    assert probe.may_slice(parameter, 0) is may


def test_fused_steps_that_begin_later_are_refused_where_parameters_are_cut(spill_dir):
    """As a checkpoint of a fused optimizer makes them begin."""
    mine = nn.Parameter(torch.randn(SHAPE))
    before = mine.detach().clone()
    with offloaded(optim.AdamW([mine]), spill_dir) as (optimizer, _):
        assert len(partition_of(optimizer).places[0]) > 1
        optimizer.param_groups[0]["fused"] = True
        mine.grad = torch.ones(SHAPE)
        with pytest.raises(ConfigError, match="fused"):
            optimizer.step()
        assert torch.equal(mine, before)
        optimizer.param_groups[0]["fused"] = False
        optimizer.step()
        assert not torch.equal(mine, before)
