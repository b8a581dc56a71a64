"""One call of the user's optimizer on some of its parameters, or on slices of them, with states that we hand to it.

An elementwise optimizer (Adam, say) does not care how many elements it gets in one call, so that calling it subgroup by
subgroup does what one call does, bit for bit. The optimizer's own code runs; only what it finds in ``param_groups`` and
``state`` is ours for the time of the call.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_ssd.optimizer.step.attribute_snapshot import same
from lightning_ssd.optimizer.step.copies import copied
from lightning_ssd.optimizer.step.step_effects import StepEffects, preserving_effects
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = ["GroupChanges", "SubgroupStepper", "own_copy"]

T = TypeVar("T")
_CONTAINERS = (list, tuple, dict, set)
_MAX_DEPTH = 8
_MAX_FOR_GROUP = 4
"""Numbers in an option for a whole group: two or three betas, two bounds."""


class GroupChanges:
    """What an optimizer changed in its groups' options (a step count, say) during the calls of one step.

    All calls begin with the same options, so that they have to change them in the same way.

    Args:
        byproducts: what the calls change elsewhere; ``None``: nothing, as is known of PyTorch's own.
        closure: gives each call what the model's own closure has given; ``None``: there is none.
    """

    def __init__(self, byproducts: StepEffects | None = None, closure: Callable[[], Any] | None = None) -> None:
        self.byproducts = byproducts
        self.closure = closure
        self._changes: dict[int, dict[str, Any]] = {}
        self._returned: list[Any] = []

    def call(self, step: Callable[..., Any], optimizer: Optimizer) -> None:
        """One call of a step that is not known to be PyTorch's own.

        Raises:
            ConfigError: it does not evaluate the model once, or returns something else than earlier calls did.
        """
        num_evaluated = 0

        def closure() -> Any:
            nonlocal num_evaluated
            num_evaluated += 1
            return None if self.closure is None else self.closure()

        value = step(optimizer) if self.closure is None else step(optimizer, closure)
        if self.closure is not None and num_evaluated != 1:
            raise CoupledError(
                f"this optimizer's step evaluates its closure {num_evaluated} times; expected once, since it is called "
                "for some of its parameters at a time"
            )
        if self._returned and not _is_same(self._returned[0], value):
            raise CoupledError(
                f"this optimizer's step returns {value!r} for some parameters and {self._returned[0]!r} for others, "
                "which a plain step would not"
            )
        self._returned.append(value)

    def result(self, default: Any) -> Any:
        """What the calls have returned; ``default`` if nothing was called."""
        return self._returned[0] if self._returned else default

    def add(self, index: int, before: dict[str, Any], after: dict[str, Any], cut: Collection[str] = ()) -> None:
        """Take note of one call.

        Args:
            index: number of the group.
            before: its options as the call found them.
            after: what the call has left.
            cut: those of which the call has seen only some entries.

        Raises:
            ConfigError: it is not what earlier calls did: the optimizer couples its parameters. Or it edits an option
                with an entry per parameter.
        """
        changed = {k: v for k, v in after.items() if k != "params" and not (k in before and same(before[k], v))}
        if names := sorted(changed.keys() & set(cut)):
            raise CoupledError(
                f"this optimizer edits the options {names} of parameter group {index}, which have an entry for each "
                "parameter, and it is called for some of these at a time"
            )
        known = self._changes.setdefault(index, changed)
        if known.keys() != changed.keys() or not all(same(known[k], v) for k, v in changed.items()):
            names = sorted(map(str, known.keys() | changed.keys()))
            raise CoupledError(
                f"this optimizer changed the options {names} of parameter group {index} differently for different "
                "parameters: it couples them"
            )

    def apply(self, groups: Sequence[dict[str, Any]]) -> None:
        """Make them in the user's groups, once."""
        for index, changed in self._changes.items():
            for key, value in changed.items():
                old = groups[index].get(key)
                if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
                    old.copy_(value)  # somebody may hold it
                else:
                    groups[index][key] = value


class SubgroupStepper:
    """Calls an optimizer's ``step`` without its hooks, which belong to the whole step.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.is_lending = False
        step: Callable[..., Any] = type(optimizer).step
        # PyTorch wraps each class' step once, to run the hooks around it.
        self._step: Callable[..., Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step

    @property
    def has_hooks(self) -> bool:
        """Whether hooks run around a step, of this optimizer or of all."""
        own = (vars(self._optimizer).get(f"_optimizer_step_{side}_hooks") for side in ("pre", "post"))
        return any(own) or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _call(self, changes: GroupChanges | None) -> None:
        """Hooks belong to the whole step, and so do those that a base class' step would run once more."""
        if changes is None or changes.byproducts is None:
            self._step(self._optimizer)
            return
        own, name = vars(self._optimizer), "_optimizer_step_pre_hooks"
        if not self.has_hooks or name not in own:
            changes.call(self._step, self._optimizer)
            return
        hooks, nested = own[name], _NestedHooks()
        try:
            own[name] = nested
            changes.call(self._step, self._optimizer)
        finally:
            own[name] = hooks  # without a call, at which an interrupt could come

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        groups: Sequence[int],
        states: Sequence[State | None],
        changes: GroupChanges | None = None,
        *,
        is_idle: bool = False,
        owners: Sequence[torch.Tensor] | None = None,
    ) -> list[State | None]:
        """Update tensors in place.

        An optimizer that is not PyTorch's own finds all groups at their places, because it may go by these; those that
        no tensor is of are without parameters, and what happens to their options is thrown away.

        Args:
            tensors: parameters or slices of them, with their ``grad``.
            groups: of each tensor, the number of its group in the optimizer's ``param_groups``, ascending.
            states: of each tensor, ``None``: it has none; the tensors in them are updated in place or replaced.
            changes: where to note what happens to the groups' options and elsewhere; ``None`` undoes it.
            is_idle: no tensor has a gradient.
            owners: the parameters of which the tensors are slices or copies; ``None``: they are these themselves.

        Returns:
            The states afterwards.

        Raises:
            ConfigError: the optimizer turns out to couple its parameters.
        """
        originals = self._optimizer.param_groups
        places = groups if changes is None or changes.byproducts is None else range(len(originals))
        given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {index: [] for index in places}
        for tensor, index, owner in zip(tensors, groups, tensors if owners is None else owners, strict=True):
            given[index].append((tensor, owner))
        mine = {index: self._options(originals[index], pairs) for index, pairs in given.items()}
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        state.update((t, s) for t, s in zip(tensors, states, strict=True) if s is not None)
        with self._around({tensor.device for tensor in tensors}, changes, is_idle):
            self.lend(list(mine.values()), state, lambda: self._call(changes))
        if changes is not None:
            for index in dict.fromkeys(groups):
                # Cut anew: the call may have edited in place what it was lent.
                cut = self._cut(originals[index], [owner for _, owner in given[index]])
                changes.add(index, {**originals[index], **cut}, mine[index], cut)
        others = state.keys() - set(tensors)
        if others:
            found = sorted(map(repr, others))[:3]
            raise CoupledError(f"this optimizer keeps states for more than its parameters ({found}): it couples them")
        return [state.get(tensor) for tensor in tensors]

    def _options(self, group: dict[str, Any], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        """A group of some tensors, given with their owners. Options are copies: an optimizer may count in place."""
        cut = self._cut(group, [owner for _, owner in pairs])
        whole = {k: v for k, v in group.items() if k != "params" and k not in cut}
        lent = {k: own_copy(v) for k, v in whole.items()} if pairs else {k: _scratch(v) for k, v in whole.items()}
        # In the order of the original.
        return {k: [t for t, _ in pairs] if k == "params" else cut[k] if k in cut else lent[k] for k in group}

    def _cut(self, group: dict[str, Any], owners: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Of options with one entry per parameter (PyTorch's ``param_names``), the entries of these.

        A short one that the optimizer has defaults for is for the group as a whole (``betas``).
        """
        num = len(group["params"])
        defaults = self._optimizer.defaults
        found = [
            key
            for key, value in group.items()
            if key != "params" and type(value) in (list, tuple) and len(value) == num
            if not (key in defaults and num <= _MAX_FOR_GROUP)
        ]
        if not found:
            return {}
        if len(owners) == num and all(map(operator.is_, owners, group["params"])):
            return {}
        numbers = {id(p): number for number, p in enumerate(group["params"])}
        kept = [numbers[id(owner)] for owner in owners if id(owner) in numbers]
        return {key: type(group[key])(group[key][number] for number in kept) for key in found}

    def _around(
        self, devices: set[torch.device], changes: GroupChanges | None, is_idle: bool
    ) -> AbstractContextManager[None]:
        if changes is None:
            return preserving_effects(self._optimizer, devices)
        return nullcontext() if changes.byproducts is None else changes.byproducts.noted(devices, is_idle=is_idle)

    def run_idle(self, groups: Iterable[int], changes: GroupChanges) -> None:
        """As the plain step, which sees groups without a gradient too: it may count the step in their options."""
        numbers = sorted(groups)
        originals = self._optimizer.param_groups
        parameters = [(p, number) for number in numbers for p in originals[number]["params"]]
        if parameters:
            tensors, theirs = [p for p, _ in parameters], [n for _, n in parameters]
            self.run(tensors, theirs, [None for _ in parameters], changes, is_idle=True)

    def lend(self, groups: list[dict[str, Any]] | None, state: Any, call: Callable[[], T]) -> T:
        """Let the optimizer have other groups (``None``: its own) and states for a call.

        No context manager: an interrupt as one is entered or left would leave them there.
        """
        optimizer = self._optimizer
        groups_before, state_before = optimizer.param_groups, optimizer.state
        try:
            self.is_lending = True
            optimizer.state = state
            if groups is not None:
                optimizer.param_groups = groups
            return call()
        finally:
            self.is_lending = False
            optimizer.state = state_before
            if groups is not None:
                optimizer.param_groups = groups_before


class _NestedHooks(OrderedDict[int, Any]):
    """In the place of an optimizer's hooks while its step is called."""

    def values(self) -> Any:
        """Asked for by the step of a base class."""
        raise CoupledError(
            "this optimizer calls the step of a base class, which would run its step hooks again, in each call for "
            "some of its parameters"
        )


def own_copy(value: Any) -> Any:
    """Return a copy that a call may change: a tensor is cloned, containers are copied with the containers in them.

    An object that refuses to be copied, such as a lock, is given as it is.
    """
    if isinstance(value, torch.Tensor):
        return copied(value, {})
    if type(value) in _CONTAINERS:
        return _copied(value, _MAX_DEPTH, lambda item: item)
    try:
        return copy.copy(value)
    except Exception:  # whatever the object raises
        return value


def _scratch(value: Any) -> Any:
    """A copy that nobody looks at later: tensors within containers are cloned, too."""
    if type(value) not in _CONTAINERS:
        return own_copy(value)
    return _copied(value, _MAX_DEPTH, lambda item: item.clone() if isinstance(item, torch.Tensor) else item)


def _copied(value: Any, depth: int, copy_item: Callable[[Any], Any]) -> Any:
    if type(value) not in _CONTAINERS or depth == 0:
        return copy_item(value)
    if type(value) is dict:
        return {key: _copied(item, depth - 1, copy_item) for key, item in value.items()}
    if type(value) is set:
        return set(value)
    return type(value)(_copied(item, depth - 1, copy_item) for item in value)


def _is_same(one: Any, other: Any) -> bool:
    try:
        return same(one, other)
    except Exception:  # whoever cannot be compared is not the same
        return False
