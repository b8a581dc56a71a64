"""One call of the user's optimizer on some of its parameters, or on slices of them, with states that we hand to it.

An elementwise optimizer (Adam, say) does not care how many elements it gets in one call, so that calling it subgroup by
subgroup does what one call does, bit for bit. The optimizer's own code runs; only what it finds in ``param_groups`` and
``state`` is ours for the time of the call.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ssd.byproducts import Byproducts, untouched
from lightning_ssd.errors import ConfigError
from lightning_ssd.own_attributes import INCOMPLETE, same
from lightning_ssd.shards import is_shard
from lightning_ssd.tensors import PLAIN_TYPES

__all__ = ["GroupChanges", "InnerStep", "State", "refuse_coupling"]

State = dict[Hashable, Any]
"""What an optimizer remembers of one parameter."""

_COUPLING = ("LBFGS", "Prodigy", "DAdapt", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "SAM", "KFAC")
"""Optimizers whose update of one parameter depends on others, or that evaluate the model themselves."""


def refuse_coupling(optimizer: Optimizer) -> None:
    """Refuse what cannot be exact subgroup by subgroup, as far as its name tells.

    Raises:
        ConfigError: the optimizer couples its parameters.
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _COUPLING:
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' got {type(optimizer).__name__}, whose update of one "
                "parameter depends on the others, so that it cannot run on some of them at a time. Allowed: optimizers "
                "that treat each parameter by itself (Adam, AdamW, SGD, RMSprop, ...), or optimizer_states='keep'"
            )


class GroupChanges:
    """What an optimizer changed in its groups' options (a step count, say) during the calls of one step.

    All calls begin with the same options, so that they have to change them in the same way.

    Args:
        byproducts: what the calls change elsewhere; ``None``: nothing, as is known of PyTorch's own.
    """

    def __init__(self, byproducts: Byproducts | None = None) -> None:
        self.byproducts = byproducts
        self._changes: dict[int, dict[str, Any]] = {}

    def add(self, index: int, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Take note of one call.

        Raises:
            ConfigError: it is not what earlier calls did: the optimizer couples its parameters.
        """
        changed = {k: v for k, v in after.items() if k != "params" and not (k in before and same(before[k], v))}
        known = self._changes.setdefault(index, changed)
        if known.keys() != changed.keys() or not all(same(known[k], v) for k, v in changed.items()):
            names = sorted(map(str, known.keys() | changed.keys()))
            raise ConfigError(
                f"this optimizer changed the options {names} of parameter group {index} differently for different "
                f"parameters: it couples them. {INCOMPLETE}"
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


class InnerStep:
    """Calls an optimizer's ``step`` without its hooks, which belong to the whole step.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step: Callable[..., Any] = type(optimizer).step
        # PyTorch wraps each class' step once, to run the hooks around it.
        self._step: Callable[..., Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step

    def run(
        self,
        tensors: Sequence[torch.Tensor],
        groups: Sequence[int],
        states: Sequence[State],
        changes: GroupChanges | None = None,
        *,
        is_idle: bool = False,
    ) -> list[State]:
        """Update tensors in place.

        Args:
            tensors: parameters or slices of them, with their ``grad``.
            groups: of each tensor, the number of its group in the optimizer's ``param_groups``, ascending.
            states: of each tensor; the tensors in them are updated in place or replaced.
            changes: where to note what happens to the groups' options and elsewhere; ``None`` undoes it.
            is_idle: no tensor has a gradient.

        Returns:
            The states afterwards.

        Raises:
            ConfigError: the optimizer turns out to couple its parameters.
        """
        originals = self._optimizer.param_groups
        # Copies of tensors, because an optimizer may count in place.
        options = {
            index: {k: _own(v) for k, v in originals[index].items() if k != "params"} for index in dict.fromkeys(groups)
        }
        mine = {
            index: {**own, "params": [t for t, g in zip(tensors, groups, strict=True) if g == index]}
            for index, own in options.items()
        }
        state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        state.update((t, s) for t, s in zip(tensors, states, strict=True) if s)
        with (
            self._around({tensor.device for tensor in tensors}, changes, is_idle),
            self.lent(list(mine.values()), state),
        ):
            self._step(self._optimizer)
        if changes is not None:
            for index, after in mine.items():
                changes.add(index, originals[index], after)
        others = state.keys() - set(tensors)
        if others:
            found = sorted(map(repr, others))[:3]
            raise ConfigError(
                f"this optimizer keeps states for more than its parameters ({found}): it couples them. {INCOMPLETE}"
            )
        return [state.get(tensor, {}) for tensor in tensors]

    def _around(
        self, devices: set[torch.device], changes: GroupChanges | None, is_idle: bool
    ) -> AbstractContextManager[None]:
        if changes is None:
            return untouched(self._optimizer, devices)
        return nullcontext() if changes.byproducts is None else changes.byproducts.noted(devices, is_idle=is_idle)

    def run_idle(self, groups: Iterable[int], changes: GroupChanges) -> None:
        """As the plain step, which sees groups without a gradient too: it may count the step in their options."""
        numbers = sorted(groups)
        originals = self._optimizer.param_groups
        parameters = [(p, number) for number in numbers for p in originals[number]["params"]]
        if parameters:
            tensors, theirs = [p for p, _ in parameters], [n for _, n in parameters]
            self.run(tensors, theirs, [{} for _ in parameters], changes, is_idle=True)

    def rehearse(self, tensor: torch.Tensor, group: int) -> None:
        """Try a step with copies of a parameter, one and then two, before the model's own are touched.

        What is counted or drawn by parameter differs between these two, but perhaps not between subgroups.

        Args:
            tensor: with its ``grad``; nothing is changed.
            group: number of its group.

        Raises:
            ConfigError: the optimizer turns out to couple its parameters.
        """
        if type(tensor) not in PLAIN_TYPES and not is_shard(tensor):
            return  # a copy of what keeps its data in a way of its own may not be one
        changes = GroupChanges(Byproducts(self._optimizer, is_rehearsal=True))
        with untouched(self._optimizer, [tensor.device]):
            for num in (1, 2):
                twins = [_twin(tensor) for _ in range(num)]
                try:
                    self.run(twins, [group] * num, [{} for _ in twins], changes)
                except ConfigError:
                    raise
                except Exception:  # what cannot be rehearsed is judged in the step, which raises this if it is true
                    return

    @contextmanager
    def lent(self, groups: list[dict[str, Any]] | None, state: Any) -> Iterator[None]:
        """Let the optimizer have other groups (``None``: its own) and states for a while."""
        optimizer = self._optimizer
        groups_before, state_before = optimizer.param_groups, optimizer.state
        optimizer.state = state
        if groups is not None:
            optimizer.param_groups = groups
        try:
            yield
        finally:
            optimizer.state = state_before
            if groups is not None:
                optimizer.param_groups = groups_before


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    # Optimizers may be told by marks on a parameter what to do with it, or keep a gradient there.
    vars(twin).update({name: _own(value) for name, value in vars(tensor).items()})
    twin.grad = None if tensor.grad is None else tensor.grad.detach().clone()
    return twin
