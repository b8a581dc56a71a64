"""A step on copies, before an optimizer that is not known is first called several times in a step on the model's own.

Note: what a rehearsal shows
    Two copies of a parameter, with other gradients, are updated one by one and then together, twice. If bits, states,
    options, attributes or what ``step`` returns differ, the optimizer couples its parameters. While it is called, every
    operation is looked at: one that touches the model's own parameters or gradients, which no call was given, ends the
    rehearsal before it is executed. Nothing of it remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.dtensor import address_of, is_shard, local_of
from lightning_ssd.common.tensors import PLAIN_TYPES, storage_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import are_apart, spans_of, tensors_in
from lightning_ssd.optimizer.step.coupling import refuse_own_parameters, refuse_owned
from lightning_ssd.optimizer.step.step_effects import StepEffects, preserving_effects
from lightning_ssd.optimizer.step.stepper import GroupChanges, SubgroupStepper, own_copy
from lightning_ssd.optimizer.step.types import INCOMPLETE, State

__all__ = ["DryRun", "Watch"]

_NUM_STEPS = 2
_KEEP = "Nothing was updated: use OffloadPolicy.optimizer_states='keep'"


class DryRun:
    """Of one optimizer.

    Args:
        inner_step: calls it.
        optimizer: the user's.
    """

    def __init__(self, inner_step: SubgroupStepper, optimizer: Optimizer) -> None:
        self._inner_step = inner_step
        self._optimizer = optimizer
        self._known: set[tuple[bool, bool, bool]] = set()

    def _kind(self, num_calls: int, closure: Callable[[], Any] | None) -> tuple[bool, bool, bool]:
        return num_calls > 1, closure is not None, self._inner_step.has_hooks

    def is_due(self, num_calls: int, closure: Callable[[], Any] | None) -> bool:
        """Whether a step of so many calls is of a kind that was not rehearsed yet."""
        return self._kind(num_calls, closure) not in self._known

    def play(
        self,
        tensor: torch.Tensor,
        group: int,
        closure: Callable[[], Any] | None,
        *,
        num_calls: int,
        owner: torch.Tensor | None = None,
    ) -> None:
        """Try a step with copies of a parameter.

        Args:
            tensor: with its ``grad``; nothing is changed.
            group: number of its group.
            closure: of the step, evaluated already.
            num_calls: of the step to come; one call is a plain step, whatever it couples.
            owner: the parameter, where the tensor is a copy of it.

        Raises:
            ConfigError: the optimizer turns out to couple its parameters.
        """
        is_several = num_calls > 1
        refuse_owned(self._optimizer)
        if is_several:
            refuse_own_parameters(self._optimizer)
        if type(tensor) in PLAIN_TYPES or is_shard(tensor):  # a copy of what keeps its data in its own way may be none
            touched = _Touched(self._optimizer)
            ones, twos = ([_twin(tensor, is_other=other) for other in (False, is_several)] for _ in range(2))
            try:
                with preserving_effects(self._optimizer, [tensor.device]), touched:
                    self._compare(ones, twos, group, closure, tensor if owner is None else owner, is_several=is_several)
            except ConfigError:
                if not touched.place or is_several:
                    raise
            except Exception:  # what cannot be rehearsed is judged in the step, which raises this if it is true
                pass
            if touched.place and is_several:
                raise ConfigError(
                    f"OffloadPolicy.optimizer_states='offload' got {type(self._optimizer).__name__}, which touches "
                    f"parameters or gradients that its step was not given ({touched.place}). {_KEEP}"
                )
        self._known.add(self._kind(num_calls, closure))

    def _compare(
        self,
        ones: Sequence[torch.Tensor],
        twos: Sequence[torch.Tensor],
        group: int,
        closure: Callable[[], Any] | None,
        owner: torch.Tensor,
        *,
        is_several: bool,
    ) -> None:
        one_states: list[State | None] = [None, None]
        two_states: list[State | None] = [None, None]
        for _ in range(_NUM_STEPS if is_several else 1):
            changes = GroupChanges(StepEffects(self._optimizer, is_rehearsal=True), closure)
            for number in range(2 if is_several else 1):
                call = [ones[number]], [group], [one_states[number]]
                one_states[number] = self._inner_step.run(*call, changes, owners=[owner])[0]
            if not is_several:
                return
            two_states = self._inner_step.run(twos, [group] * 2, two_states, changes, owners=[owner] * 2)
            if not are_apart([spans_of([p, s]) for p, s in zip(twos, two_states, strict=True)]):
                raise ConfigError(f"this optimizer's states of several parameters share memory. {_KEEP}")
            if any(map(_differ, [ones, one_states], [twos, two_states])):
                raise ConfigError(
                    "this optimizer updates two parameters together otherwise than one after the other: it couples "
                    f"them, so that it cannot run on some of them at a time. {_KEEP}"
                )


class _Touched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends what touches the model's own parameters or gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = ""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._places = {place for p in parameters for t in (p, p.grad) if t is not None for place in _places(t)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and not self._places.isdisjoint(_places(value)):
                self.place = f"by {func}, a tensor of shape {tuple(value.shape)}"
                raise ConfigError(f"touched {self.place}")
        return func(*args, **(kwargs or {}))


def _places(tensor: torch.Tensor) -> set[object]:
    """Where its memory is, and its storage, which stays what it is when the memory comes back to another address."""
    address = address_of(tensor)
    return {address, ("storage", storage_of(local_of(tensor))._cdata)} if address else set()


class Watch:
    """Sees parameters change in a call that was not given them.

    Args:
        parameters: all of the optimizer's.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [p for p in parameters if not p.is_inference()]
        self._versions = [p._version for p in self._parameters]

    def check(self, given: Iterable[torch.Tensor]) -> None:
        """After a call.

        Raises:
            ConfigError: it has changed others than those that it was given.
        """
        mine = set(map(id, given))
        for number, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True)):
            if parameter._version != version:
                if id(parameter) not in mine:
                    raise ConfigError(f"this optimizer changes parameters that its step was not given. {INCOMPLETE}")
                self._versions[number] = parameter._version


def _twin(tensor: torch.Tensor, *, is_other: bool) -> torch.Tensor:
    """A copy, or one with another gradient."""
    twin = torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    # Optimizers may be told by marks on a parameter what to do with it, or keep a gradient there.
    vars(twin).update({name: own_copy(value) for name, value in vars(tensor).items()})
    if tensor.grad is not None:
        gradient = tensor.grad.detach()
        twin.grad = gradient * -2 if is_other and gradient.is_floating_point() else gradient.clone()
    return twin


def _differ(one: Any, other: Any) -> bool:
    pairs = zip(tensors_in(one), tensors_in(other), strict=False)
    return any(not _equal(local_of(a), local_of(b)) for a, b in pairs)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or other.layout != torch.strided or one.device.type == "meta":
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
