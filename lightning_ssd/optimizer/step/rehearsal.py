"""Try a declared optimizer: step small copies of its parameters together, and one by one, and compare.

Equal results prove nothing. But the trial finds a norm of all gradients, a count per parameter, noise and the like
before training does. The optimizer itself steps the copies, with copies of its attributes in the place of its own. It
gets these back. The model and random numbers do not change.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.compiler import uncompiled
from lightning_ssd.common.dtensor import address_of, has_shape, local_of
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.rng import RandomStates, default_sources, shared_sources
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import SHARE_MEMORY, are_own, tensors_in
from lightning_ssd.optimizer.step.copies import copied, same
from lightning_ssd.optimizer.step.elementwise import rate_of_trial
from lightning_ssd.optimizer.step.layout import is_bare
from lightning_ssd.optimizer.step.master_weights import has_master
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, WholeStep
from lightning_ssd.optimizer.step.types import CoupledError

__all__ = ["rehearse"]

_log = logging.getLogger(__name__)
_STEPS: dict[str, tuple[float | None, float | None]] = {
    "usual gradients": (1.0, 1.0),
    "large gradients": (1024.0, 1024.0),
    "a gradient missing": (None, 1.0),
    "a gradient that is not finite": (1.0, math.nan),
}
"""Steps of a trial: factors of the gradients of even and of odd copies; ``None``: no gradient, NaN: not finite."""
_MAX_NUM, _MAX_NUM_OF_A_KIND, _MAX_SIZE = 8, 2, 5
_OTHER = 77


def rehearse(optimizer: Optimizer, *, master_weights: bool) -> str:
    """Compare steps of small copies together with steps of one at a time.

    Returns:
        The refusal of steps with a closure, if only these differ; else an empty text.
    """
    name, found, untried = type(optimizer).__name__, ["", ""], ""
    closure = [*inspect.signature(type(optimizer).step).parameters.values()][1:2]
    needs_closure = any(one.default is one.empty and one.kind is not one.VAR_POSITIONAL for one in closure)
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    random = RandomStates([*shared_sources(), *default_sources(devices)])
    options = [dict(group) for group in optimizer.param_groups]
    for has_closure in (False, True)[needs_closure : 1 + bool(closure)]:
        try:
            with warnings.catch_warnings(), uncompiled():
                warnings.simplefilter("ignore")
                copies = [_Copy(optimizer, master_weights, has_closure) for _ in range(2)]
                with _Untouched(optimizer):
                    found[has_closure] = _difference(*copies)
        except Exception as error:  # whatever the user's optimizer raises on copies
            untried = untried or f"{type(error).__name__}: {error}"
        finally:
            random.restore()
            if not same(options, optimizer.param_groups):
                for group, before in zip(optimizer.param_groups, options, strict=True):
                    group.update(before)
                found[has_closure] = "its step changed options of the optimizer itself, past the copies"
    if needs_closure:
        found[0] = found[1]
    if untried:
        _log.info(
            "%s cannot be tried on copies (%s). Its states are offloaded on your word that it updates each parameter "
            "by itself.",
            name,
            untried,
        )
    if found[0]:
        raise ConfigError(_refusal(name, "", found[0]))
    return _refusal(name, " in a step with a closure", found[1]) if found[1] else ""


def _refusal(name: str, way: str, what: str) -> str:
    return (
        f"OffloadPolicy.per_parameter_optimizers names {name}, which does not update each parameter by itself{way}. In "
        f"a trial on small copies, one by one against all together, {what}. Nothing was updated: use "
        "OffloadPolicy.optimizer_states='keep'"
    )


def _difference(together: _Copy, apart: _Copy) -> str:
    """Return the first difference as a clause; empty if there is none."""
    if not together.small:
        raise ValueError("no parameter has a shape yet")
    for number, (what, factors) in enumerate(_STEPS.items()):
        try:
            found = together.step(together.step_together, number, factors)
        except CoupledError as error:
            return error.finding
        if together.has_closure and not together.num_evaluated:
            return "its step did not evaluate the closure"
        if not are_own(found["a state"], together.small):
            return f"its states {SHARE_MEMORY}, after a step with {what}"
        try:
            others = apart.step(apart.step_apart, number, factors)
        except CoupledError as error:
            return error.finding
        except Exception as error:  # whatever the user's optimizer raises where it gets one parameter alone
            return f"a step of one raised {type(error).__name__}: {error}"
        for place in {**found, **others}:
            if place not in found or place not in others or not same(found[place], others[place]):
                return f"{place} differed after a step with {what}"
    return ""


class _Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before an operation on the model's own parameters or gradients is executed."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._own = {address_of(t) for p in parameters for t in (p, p.grad) if isinstance(t, torch.Tensor)} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and address_of(value) in self._own:
                raise CoupledError(f"its step touched a tensor of the model that it was not given, by {func}")
        return func(*args, **(kwargs or {}))


class _Copy:
    """Small random parameters, and copies of an optimizer's attributes. All copies of an optimizer are equal."""

    def __init__(self, optimizer: Optimizer, master_weights: bool, has_closure: bool) -> None:
        self._optimizer = optimizer
        self.small: list[nn.Parameter] = []
        self._groups: list[int] = []
        self.has_closure, self.num_evaluated = has_closure, 0
        attributes = _attributes(vars(optimizer))
        for key, value in attributes.items():
            if any(isinstance(leaf, nn.Module) for leaf in tree_leaves(value)):
                raise TypeError(f"a module in its attribute {key!r}")  # its copy may be large, and would share hooks
        memo: dict[int, Any] = {id(optimizer): optimizer}
        originals, kinds = [], defaultdict[Any, list[nn.Parameter]](list)
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                kind = kinds[number, p.dim()] if has_shape(p) and p.numel() else None
                is_number = p.is_floating_point() or p.is_complex()
                if kind is not None and is_number and len(kind) < _MAX_NUM_OF_A_KIND and len(self.small) < _MAX_NUM:
                    dtype = torch.float32 if master_weights and has_master(p) else p.dtype
                    kind.append(nn.Parameter(self._numbers(p, dtype)))
                    self.small.append(kind[-1])
                    self._groups.append(number)
                    originals.append(p)
                memo[id(p)] = kind[-1] if kind else torch.empty(0)
        own: dict[str, Any] = {key: OrderedDict() for key in vars(optimizer) if key.startswith("_optimizer_")}
        self._own = own
        own["state"], states = defaultdict(dict), dict[Any, Any](optimizer.state)
        for p, small in zip(originals, self.small, strict=True):
            vars(small).update(self._cropped(vars(p), p, memo))  # attributes that an optimizer may read
            if states.get(p):
                own["state"][small] = self._cropped(states[p], p, memo)
        own["state"].update(copy.deepcopy({k: v for k, v in states.items() if not torch.is_tensor(k)}, memo))
        own.update((key, copy.deepcopy(value, memo)) for key, value in attributes.items())
        own["param_groups"] = [
            {key: [] if key == "params" else copy.deepcopy(value, memo) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        for number, group in enumerate(own["param_groups"]):
            group["params"] = self._in_group(number)
            if "param_names" in group:
                group["param_names"] = [str(index) for index, its in enumerate(self._groups) if its == number]
            if "lr" in group:
                group["lr"] = rate_of_trial(group["lr"])
        self._stepper = SubgroupStepper(optimizer)

    def _in_group(self, number: int) -> list[nn.Parameter]:
        return [small for small, its in zip(self.small, self._groups, strict=True) if its == number]

    def _numbers(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = [min(size, _MAX_SIZE) for size in local_of(like).shape]
        generator = torch.Generator().manual_seed(len(self.small))
        return torch.randn(shape, generator=generator, device="cpu").to(like.device, dtype)

    @staticmethod
    def _cropped(values: Any, parameter: torch.Tensor, memo: dict[int, Any]) -> Any:
        crop = tuple(slice(0, _MAX_SIZE) for _ in parameter.shape)
        of_its_shape = [t for t in tensors_in(values) if t.shape == parameter.shape and id(t) not in memo]
        return copy.deepcopy(values, memo | {id(t): local_of(t).detach()[crop].clone() for t in of_its_shape})

    def _give_gradients(self, number: int, factors: tuple[float | None, float | None]) -> None:
        for index, small in enumerate(self.small):
            generator, factor = torch.Generator().manual_seed(100 * (number + 1) + index), factors[index % 2]
            noise = torch.randn(small.shape, generator=generator, device="cpu").to(small)
            gradient = noise + 0.1 * small.detach()  # so that it depends on the weights of the evaluation
            if factor is not None and math.isnan(factor):
                gradient.view(-1)[:1], gradient.view(-1)[1:2] = math.inf, math.nan
            small.grad = None if factor is None else gradient if math.isnan(factor) else gradient * factor

    def step(self, way: Callable[..., Any], number: int, factors: tuple[float | None, float | None]) -> dict[str, Any]:
        """Step with the copies in the optimizer; return what a step may change, by the names that errors use."""
        own = vars(self._optimizer)
        before = dict(own)
        with deferring_interrupts():
            try:
                own.clear()
                own.update(self._own)
                result = way(number, factors)
            finally:
                self._own = dict(own)
                own.clear()
                own.update(before)
        return {"what step returns": result, **self._found()}

    def step_together(self, number: int, factors: tuple[float | None, float | None]) -> Any:
        """Step as plain training does; return what the step returns."""

        def closure() -> torch.Tensor:
            self.num_evaluated += 1
            self._give_gradients(number, factors)
            return torch.ones(())

        if self.has_closure:
            return self._stepper.call(closure)
        closure()
        return self._stepper.call()

    def step_apart(self, number: int, factors: tuple[float | None, float | None]) -> Any:
        """Step as with offloaded states: first the closure, then each parameter, with states moved to other memory."""
        self._give_gradients(number, factors)
        state: dict[Any, Any] = self._optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        whole = WholeStep(self._optimizer, (lambda: torch.ones(())) if self.has_closure else None, shared)
        active = [(p, group) for p, group in zip(self.small, self._groups, strict=True) if p.grad is not None]
        idle = set(range(len(self._optimizer.param_groups))).difference(group for _, group in active)
        unused = {number: self._in_group(number) for number in idle}
        if not active:
            self._stepper.run([], [], [], whole, idle=unused)
        for p, group in reversed(active):
            lent = [value for value in state.get(p, {}).values() if is_bare(value)]
            [after] = self._stepper.run([p], [group], [state.get(p)], whole, idle=unused)
            unused = {}
            if after is not None:
                state[p] = {key: copied(value, {}) for key, value in after.items()}
            for tensor in lent:
                tensor.fill_(_OTHER)  # as if other states had reused the memory
        whole.apply()
        state.update(whole.shared)
        return whole.returned[0]

    def _found(self) -> dict[str, Any]:
        numbers = {id(small): number for number, small in enumerate(self.small)}  # keys that are parameters differ
        attributes = {
            key: {numbers.get(id(k), k): v for k, v in value.items()} if isinstance(value, dict) else value
            for key, value in _attributes(self._own).items()
        }
        return {
            "a parameter": list(self.small),
            "a state": [self._own["state"].get(small) or {} for small in self.small],
            "a state that all parameters share": dict(self._own["state"]),
            **{
                f"param_groups[{number}][{key!r}]": value
                for number, group in enumerate(self._own["param_groups"])
                for key, value in group.items()
                if key != "params"
            },
            **{f"its attribute {key!r}": value for key, value in attributes.items()},
        }


def _attributes(own: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer besides its parameters, states and hooks."""
    without = ("state", "param_groups", "step")
    return {key: value for key, value in own.items() if key not in without and not key.startswith("_optimizer_")}
