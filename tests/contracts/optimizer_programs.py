"""Small random trainings with optimizers that are more than a step, played plainly and with offloaded states."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from lightning_ssd.errors import ConfigError
from tests.contracts.optimizer_kinds import KINDS
from tests.support import optimizer_pairs

SHAPES = ((40, 60),) * 6 + ((7,), (90, 70))
"""Each of the first ones more than a subgroup holds, a small one, and one that is cut where that is exact."""
NUM_STEPS = 5


class Training:
    """One run of a program.

    Args:
        kind: name of the optimizer.
        offload: makes an offloaded optimizer of a plain one, or gives it back.
    """

    def __init__(self, kind, offload):
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = KINDS[kind](self.parameters, offload)
        self.generator = torch.Generator().manual_seed(2)
        self.held = {}
        self.values = []
        self.skipped = set()
        self.has_closure = False

    @property
    def first(self):
        """A parameter that is always trained."""
        return self.optimizer.param_groups[0]["params"][0]

    def set_gradients(self):
        for number, parameter in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            gradient = torch.randn(parameter.shape, generator=self.generator)
            if number in self.skipped or not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)

    def step(self):
        self.set_gradients()
        closure = (lambda: torch.tensor(3.0)) if self.has_closure else None
        self.values.append(self.optimizer.step(*(() if closure is None else (closure,))))

    def trace(self):
        """All that training has come to."""
        groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [[p.detach().clone() for p in (*self.parameters, *groups)], copy.copy(self.values)]

    def states(self):
        """The states at the end, as the optimizer saves them."""
        saved = self.optimizer.state_dict()
        return [sorted(saved["state"]), *(list(state.items()) for _, state in sorted(saved["state"].items()))]


def _state(training):
    return training.optimizer.state[training.first]


def _tensor(training):
    """The first large tensor of the first parameter's state."""
    state = _state(training)
    return next(((k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() > 1), None)


# -- what may happen between two steps ---------------------------------------------------------------------------------


def zero(training):
    """As ReLoRA's resets do."""
    if found := _tensor(training):
        found[1].zero_()


def prune(training):
    for state in training.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                value[::2] = 0


def replace(training):
    if found := _tensor(training):
        _state(training)[found[0]] = torch.full_like(found[1], 0.25)


def delete(training):
    training.optimizer.state.pop(training.first, None)


def delete_item(training):
    if training.first in training.optimizer.state:
        del training.optimizer.state[training.first]


def clear(training):
    training.optimizer.state.clear()


def assign(training):
    training.optimizer.state = defaultdict(dict)


def hold(training):
    """For :func:`zero_held`, steps later."""
    if found := _tensor(training):
        training.held["tensor"] = found[1]


def zero_held(training):
    if "tensor" in training.held:
        training.held["tensor"].mul_(0.5)


def let_go(training):
    training.held.clear()


def read(training):
    training.values.append(
        [float(v.sum()) for s in training.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    )


def densify(training):
    """Surgery as in Gaussian splatting: a longer parameter in the place of another, and its states with it."""
    group, optimizer = training.optimizer.param_groups[0], training.optimizer
    old = group["params"][0]
    new = nn.Parameter(torch.cat([old.detach(), old.detach()[:3]]))
    state = optimizer.state.get(old)
    if state is not None:
        del optimizer.state[old]
        optimizer.state[new] = {
            key: torch.cat([value, torch.zeros_like(value[:3])])
            if isinstance(value, torch.Tensor) and value.shape == old.shape
            else value
            for key, value in state.items()
        }
    group["params"][0] = new


def share(training):
    """One state for two parameters."""
    one, other = training.optimizer.param_groups[0]["params"][:2]
    if training.optimizer.state.get(one) and training.optimizer.state.get(other) and one.shape == other.shape:
        training.optimizer.state[other] = training.optimizer.state[one]


def alias(training):
    """One tensor under another name."""
    if found := _tensor(training):
        _state(training)["again"] = found[1]


def edit_alias(training):
    if "again" in _state(training):
        _state(training)["again"].add_(0.125)


def add_group(training):
    extra = nn.Parameter(torch.ones(40, 60))
    training.parameters.append(extra)
    training.optimizer.add_param_group({"params": [extra]})


def freeze(training):
    training.optimizer.param_groups[0]["params"][2].requires_grad_(False)


def schedule(training):
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5


def scheduler(training):
    """It sets a step that counts."""
    training.held["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)


def skip(training):
    training.skipped ^= {1, 3}


def use_closure(training):
    training.has_closure = not training.has_closure


def edit_in_hooks(training):
    def halve(optimizer, *_):
        state = optimizer.state.get(training.first, {})
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() == 2:
                value.mul_(0.5)

    if hasattr(training.optimizer, "_optimizer_step_pre_hooks"):
        training.optimizer.register_step_pre_hook(halve)
        training.optimizer.register_step_post_hook(halve)
        training.optimizer.register_state_dict_pre_hook(halve)


def checkpoint(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def own_step(training):
    """A step of the user's on the instance, as a counting or clipping wrapper is."""
    optimizer = getattr(training.optimizer, "inner", training.optimizer)
    original = type(optimizer).step

    def step(self, *args, **kwargs):
        with torch.no_grad():
            training.first.mul_(0.5)
        return original(self, *args, **kwargs)

    optimizer.step = MethodType(step, optimizer)  # a scheduler refuses a plain function in plain training, too


ACTIONS = {
    action.__name__: action
    for action in (
        *(zero, prune, replace, delete, delete_item, clear, assign, hold, zero_held, let_go, read, densify, share),
        *(alias, edit_alias, add_group, freeze, schedule, scheduler, skip, use_closure),
        *(edit_in_hooks, checkpoint, own_step),
    )
}
_ENDING = ("share", "own_step")
"""These are refused most of the time: they come late."""


@dataclass(frozen=True)
class Program:
    """An optimizer, and what happens before each of its steps."""

    kind: str
    actions: tuple[tuple[str, ...], ...]

    @classmethod
    def random(cls, seed, *, kind=None, action=None):
        """One of many.

        Args:
            seed: which.
            kind: of this optimizer.
            action: with this action in the middle.
        """
        chosen = random.Random(seed)
        steps = []
        for step in range(NUM_STEPS):
            names = [name for name in ACTIONS if step == NUM_STEPS - 1 or name not in _ENDING]
            steps.append(chosen.sample(names, chosen.choice((0, 0, 1, 1, 2))))
        if action is not None:
            steps[2].append(action)
        return cls(kind or chosen.choice(list(KINDS)), tuple(map(tuple, steps)))


def same(one, other):
    """Whether two traces are the same, bit for bit."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and optimizer_pairs.same(one, other)


def play(program, offload):
    """Train twice, side by side.

    Returns:
        ``"equal"``, ``"refused"`` (with a reason, before the step in question touched anything), or what differed.
    """
    plain = Training(program.kind, lambda optimizer: optimizer)
    try:
        mine = Training(program.kind, offload)
    except ConfigError:
        return "refused"
    for number, actions in enumerate(program.actions):
        for name in actions:
            try:
                ACTIONS[name](plain)
            except Exception as error:  # what plain training does not do, nobody has to do
                return _raised(mine, ACTIONS[name], error, f"{name} before step {number}")
            ACTIONS[name](mine)
        before = plain.trace()
        try:
            plain.step()
        except Exception as error:
            return _raised(mine, Training.step, error, f"step {number}")
        try:
            mine.step()
        except ConfigError as error:
            # Its gradients are set, nothing else.
            return "refused" if same(mine.trace(), before) else f"step {number} was refused too late: {error}"
        if not same(mine.trace(), plain.trace()):
            return f"parameters or values differ after step {number}"
    try:
        states = plain.states()
    except Exception as error:
        return _raised(mine, Training.states, error, "state_dict")
    return "equal" if same(mine.states(), states) else "states differ"


def _raised(mine, call, error, place):
    """What plain training raised has to come here, too, unless it is refused before it touches anything."""
    before = mine.trace()
    try:
        call(mine)
    except ConfigError as refusal:
        return "refused" if same(mine.trace(), before) else f"{place} was refused too late: {refusal}"
    except Exception as mine_error:
        if type(mine_error) is type(error):
            return "equal"
        return f"{place} raised {mine_error!r} instead of {error!r}"
    return f"{place} raised plainly only: {error!r}"
