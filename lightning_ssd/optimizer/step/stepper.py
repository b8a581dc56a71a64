"""Call the user's optimizer on some of its parameters, or on slices of them, with given states.

An elementwise optimizer (Adam, say) gives each element the same bits in one call and in many. So it can be called
subgroup by subgroup. The optimizer's own code runs. Only its ``param_groups`` and ``state`` are replaced for the call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_ssd.optimizer.step.copies import PLAIN, copied, same
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = ["SubgroupStepper", "WholeStep", "with_attributes", "without_hooks"]

T = TypeVar("T")
_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
_PRE_HOOKS = "_optimizer_step_pre_hooks"
_DELETED = object()
"""Marks an attribute that a step has deleted."""


class WholeStep:
    """One step of a declared optimizer, in several calls whose common changes are made once.

    Each call begins with the plain attributes, options and shared states from before the step. All calls have to change
    them in the same way.

    Args:
        optimizer: the user's optimizer.
        closure: returns the result of the user's closure to each call; ``None``: the step has no closure.
        shared: the optimizer's states under keys that are no parameters, such as a count of steps.
    """

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any] | None, shared: Mapping[Any, Any]) -> None:
        self.shared = dict(shared)
        self._optimizer = optimizer
        self._closure = closure
        self._before = _plain_attributes(optimizer)
        self._changes: dict[Any, dict[Any, Any]] = {}
        self.returned: list[Any] = []
        """The equal results of the calls."""

    def call(self, step: Callable[..., Any]) -> None:
        """Call the optimizer's step.

        Raises:
            ConfigError: it does not evaluate the closure exactly once, or has other effects than earlier calls.
        """
        self._put_back()
        num_evaluated, closure = 0, self._closure

        def evaluated() -> Any:
            nonlocal num_evaluated
            num_evaluated += 1
            return None if closure is None else closure()

        value = step() if closure is None else step(evaluated)
        if closure is not None and num_evaluated != 1:
            raise CoupledError(f"this optimizer's step evaluates its closure {num_evaluated} times; expected once")
        if self.returned and not same(self.returned[0], value):
            other = self.returned[0]
            raise CoupledError(f"this optimizer's step returns {value!r} for some parameters and {other!r} for others")
        self.returned.append(value)
        after = _plain_attributes(self._optimizer)
        deleted = dict.fromkeys(self._before.keys() - vars(self._optimizer).keys(), _DELETED)
        self.note("attributes", self._before, after | deleted)

    def note(self, place: Any, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
        """Note the changes of one call.

        Args:
            place: "attributes", "shared states", or the number of a parameter group.
            before: values before the call.
            after: values after the call.
        """
        own = {k: v for k, v in after.items() if k not in ("params", "param_names")}
        changed = {k: v for k, v in own.items() if k not in before or not same(before[k], v)}
        known = self._changes.setdefault(place, changed)
        if not same(known, changed):
            names = sorted(map(str, known.keys() | changed.keys()))
            where = f"param_groups[{place}]" if isinstance(place, int) else place
            raise CoupledError(f"this optimizer changes its {where} {names} otherwise for other parameters")

    def apply(self) -> None:
        """Make the noted changes, once."""
        self._put_back()
        own, changed = vars(self._optimizer), self._changes.pop("attributes", {})
        own.update(changed)
        for name in [name for name, value in changed.items() if value is _DELETED]:
            del own[name]
        for place, changed in self._changes.items():
            target = self._optimizer.param_groups[place] if isinstance(place, int) else self.shared
            for key, value in changed.items():
                old = target.get(key)
                if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
                    with torch.no_grad():
                        old.copy_(value)  # the user may hold it
                else:
                    target[key] = value

    def _put_back(self) -> None:
        """Restore the plain attributes of the optimizer, and delete new ones.

        An attribute that is now an object stays, because it may hold values by parameter.
        """
        own = vars(self._optimizer)
        for name in _plain_attributes(self._optimizer).keys() - self._before.keys():
            del own[name]
        own.update((k, v) for k, v in self._before.items() if k not in own or isinstance(own[k], PLAIN))


def _plain_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes that are numbers, texts or flags, except those that ``GradScaler`` sets."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, PLAIN) and name not in ("grad_scale", "found_inf")
    }


def without_hooks(method: Any) -> Any:
    """Return a method as its author wrote it, because PyTorch wraps the ``step`` of each class that has instances."""
    return method.__wrapped__ if getattr(method, "__code__", None) is _WRAPPER else method


def with_attributes(owner: Any, values: Mapping[str, Any], call: Callable[[], T]) -> T:
    """Replace attributes of an object's instance for a call. One that it does not have is ``None`` if interrupted.

    This is no context manager, because an interrupt while one is entered or left would leave them replaced.
    """
    own = vars(owner)
    before = {name: getattr(owner, name, None) for name in values}
    of_class = values.keys() - own.keys()
    try:
        own.update(values)
        return call()
    finally:
        own.update(before)  # one call into C: an interrupt comes behind it
        for name in of_class:
            own.pop(name, None)


class SubgroupStepper:
    """Calls an optimizer's ``step`` without its hooks, which run once per step, not per call."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.is_lending = False
        self._step: Callable[..., Any] = without_hooks(type(optimizer).step)

    def is_of(self, kind: type[Optimizer]) -> bool:
        """Return whether ``kind`` still has the step that this object calls."""
        return without_hooks(kind.step) is self._step

    def call(self, *closure: Callable[[], Any]) -> Any:
        own = vars(self._optimizer)
        has_hooks = own.get(_PRE_HOOKS) or own.get("_optimizer_step_post_hooks")
        if _PRE_HOOKS not in own or not (has_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks):
            return self._step(self._optimizer, *closure)
        nested = {_PRE_HOOKS: _NestedHooks()}
        return with_attributes(self._optimizer, nested, lambda: self._step(self._optimizer, *closure))

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        groups: Sequence[int],
        states: Sequence[State | None],
        whole: WholeStep | None = None,
        *,
        owners: Sequence[torch.Tensor] | None = None,
        idle: Mapping[int, Sequence[torch.Tensor]] | None = None,
    ) -> list[State | None]:
        """Update tensors in place.

        A declared optimizer gets all its groups, because it may use their numbers. Groups of none of the tensors have
        no parameters in the call, and changes of their options are dropped.

        Args:
            tensors: parameters or slices of them, with their ``grad``.
            groups: number of each tensor's group in the optimizer's ``param_groups``, ascending.
            states: state of each tensor; ``None``: it has none. Tensors in them are updated in place or replaced.
            whole: the step that the call belongs to; ``None``: the optimizer changes only parameters and states.
            owners: the parameters that the tensors are slices or copies of; ``None``: the tensors are the parameters.
            idle: parameters of the groups without any gradient, by the group's number. A plain step sees them, too, and
                may count in their groups' options. One call of a step gets them.

        Returns:
            The states afterwards.
        """
        originals, owners = self._optimizer.param_groups, tensors if owners is None else owners
        given: dict[int, list[tuple[torch.Tensor, int]]]
        given = {index: [] for index in (groups if whole is None else range(len(originals)))}
        for tensor, index, owner in zip(tensors, groups, owners, strict=True):
            given[index].append((tensor, id(owner)))
        for index, parameters in (idle or {}).items():
            given[index] += [(parameter, id(parameter)) for parameter in parameters]
        mine = [self._lent(originals[index], theirs, whole) for index, theirs in given.items()]
        state: defaultdict[Any, Any] = defaultdict(dict)
        state.update((t, s) for t, s in zip(tensors, states, strict=True) if s is not None)
        if whole is None:
            self.lend(mine, state, self.call)
            return [state.get(tensor) for tensor in tensors]
        state.update((key, copied(value, {})) for key, value in whole.shared.items())
        self.lend(mine, state, lambda: whole.call(self.call))
        for index in dict.fromkeys([*groups, *(idle or ())]):
            whole.note(index, originals[index], mine[index])
        result = [state.pop(tensor, None) for tensor in tensors]
        seen = {id(parameter) for parameters in (idle or {}).values() for parameter in parameters}
        if others := [key for key in state if isinstance(key, torch.Tensor) and id(key) not in seen]:
            found = sorted(map(repr, others))[:3]
            raise CoupledError(f"this optimizer keeps states for more than its parameters ({found}): it couples them")
        kept = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        whole.note("shared states", whole.shared, kept)
        return result

    def _lent(
        self, group: dict[str, Any], given: list[tuple[torch.Tensor, int]], whole: WholeStep | None
    ) -> dict[str, Any]:
        """Return a parameter group of some tensors, with the options in the order of the original group.

        A declared optimizer gets copies of the options, which it may edit.
        """
        lent = dict(group) if whole is None else {k: copied(v, {}) if k != "params" else v for k, v in group.items()}
        lent["params"] = [tensor for tensor, _ in given]
        if "param_names" in group:  # PyTorch's own option with one entry per parameter
            names = dict(zip(map(id, group["params"]), group["param_names"], strict=False))
            lent["param_names"] = [names[owner] for _, owner in given if owner in names]
        return lent

    def lend(self, groups: list[dict[str, Any]] | None, state: Any, call: Callable[[], T]) -> T:
        """Replace the optimizer's groups (``None``: keep its own) and states for a call."""
        try:
            self.is_lending = True
            own_groups = {} if groups is None else {"param_groups": groups}
            return with_attributes(self._optimizer, {"state": state, **own_groups}, call)
        finally:
            self.is_lending = False


class _NestedHooks(OrderedDict[int, Any]):
    """Replaces an optimizer's step hooks while its step is called."""

    def values(self) -> Any:
        """Raise, because only the step of a base class reads the hooks here."""
        raise CoupledError(
            "this optimizer calls the step of a base class, which would run its step hooks again, in each call for "
            "some of its parameters"
        )
