"""A step on copies, before an optimizer that is not known is first called several times in a step on the model's own.

Note: what a rehearsal shows
    Two copies of a parameter, with other gradients, are updated one by one and then together: twice as they are, once
    with large gradients, which a limit for all of them may cut, and once with one that is not a number, for which a
    step may be left out. Such gradients may be refused, and of them nobody is warned. If bits, states, options,
    attributes or what ``step`` returns differ, the optimizer couples its parameters. While it is called, every
    operation is looked at: one that touches the model's own parameters or gradients, which no call was given, ends the
    rehearsal before it is executed. With a closure, a step must find the parameter where the model was evaluated, and
    must not care which gradient was there before. Without a gradient, it must leave parameter and state alone. One
    parameter of each group and number of dimensions is tried. Nothing of it remains.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.compiler import uncompiled
from lightning_ssd.common.dtensor import address_of, local_of
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import are_apart, spans_of
from lightning_ssd.optimizer.step.coupling import refuse_own_parameters, refuse_owned
from lightning_ssd.optimizer.step.step_effects import StepEffects, preserving_effects
from lightning_ssd.optimizer.step.stepper import GroupChanges, SubgroupStepper
from lightning_ssd.optimizer.step.twins import Sample, differ, has_twins, introduced
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = ["DryRun", "Watch"]

Closure = Callable[[], Any]
_NUM_STEPS = 2
_USUAL = (1.0, 1.0)
_FACTORS = (_USUAL, _USUAL, (1024.0, 1024.0), (1.0, math.nan))
"""Of the gradients of two copies, in each step."""
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
        self._known: set[tuple[Any, ...]] = set()
        self._known_missing: set[tuple[int, int, bool]] = set()

    def _kind(self, tensor: torch.Tensor, group: int, num_calls: int, closure: Closure | None) -> tuple[Any, ...]:
        return group, tensor.dim(), num_calls > 1, closure is not None, self._inner_step.has_hooks

    def is_due(self, tensor: torch.Tensor, group: int, num_calls: int, closure: Closure | None) -> bool:
        """Whether a step of so many calls, with such a parameter, is of a kind that was not rehearsed yet."""
        return self._kind(tensor, group, num_calls, closure) not in self._known

    def play(
        self,
        tensor: torch.Tensor,
        group: int,
        closure: Closure | None,
        *,
        num_calls: int,
        state: State | None = None,
        owner: torch.Tensor | None = None,
    ) -> None:
        """Try a step with copies of a parameter.

        Args:
            tensor: with its ``grad``; nothing is changed.
            group: number of its group.
            closure: of the step, evaluated already.
            num_calls: of the step to come; one call is a plain step, whatever it couples.
            state: of the parameter; ``None``: it has none.
            owner: the parameter, where the tensor is a copy of it.

        Raises:
            ConfigError: the optimizer turns out to couple its parameters, or to need what is there before its closure
                is evaluated; or it cannot be tried.
        """
        is_several = num_calls > 1
        refuse_owned(self._optimizer)
        if is_several:
            refuse_own_parameters(self._optimizer)
        if has_twins(tensor):
            self._try(Sample(tensor, state, owner=owner), group, closure, is_several=is_several)
        self._known.add(self._kind(tensor, group, num_calls, closure))

    def _try(self, sample: Sample, group: int, closure: Closure | None, *, is_several: bool) -> None:
        touched = _Touched(self._optimizer)
        error: Exception | None = None
        try:
            self._compare(sample, group, closure, touched, is_several=is_several)
            if closure is not None:
                self._evaluate(sample, group, closure, touched)
        except Exception as caught:
            error = caught
        if not is_several and closure is None and (touched.place or not isinstance(error, ConfigError)):
            return  # it is a plain step, which raises this if it is true
        self._refuse(error, touched)

    def _refuse(self, error: Exception | None, touched: _Touched) -> None:
        """After a trial, which may have ended with an error, or have swallowed one.

        Raises:
            ConfigError: something was wrong.
        """
        name = type(self._optimizer).__name__
        if touched.place:
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' got {name}, which touches parameters or gradients that its "
                f"step was not given ({touched.place}). {_KEEP}"
            ) from error
        if isinstance(error, CoupledError):
            raise ConfigError(f"{error.finding}. {_KEEP}") from error
        if isinstance(error, ConfigError):
            raise error
        if error is not None:
            raise ConfigError(
                "OffloadPolicy.optimizer_states='offload' expects an optimizer that can be tried on a copy of a "
                f"parameter; got {name}, which raised {type(error).__name__}: {error}. {_KEEP}"
            ) from error

    def _compare(
        self,
        sample: Sample,
        group: int,
        closure: Closure | None,
        touched: _Touched,
        *,
        is_several: bool,
    ) -> None:
        """Two copies one by one, and together; of a plain step one copy alone."""
        ones, twos = ([sample.twin(is_other=other) for other in (False, is_several)] for _ in range(2))
        states = [sample.state_for(twin) for twin in (*ones, *twos)]
        gradients = [twin.grad for twin in ones]
        with self._trial(sample, [*ones, *twos], touched):
            if not is_several:
                changes = GroupChanges(StepEffects(self._optimizer, is_rehearsal=True), closure)
                self._inner_step.run(ones[:1], [group], states[:1], changes, owners=[sample.owner])
                return
            for factors in _FACTORS:
                for twin, gradient, factor in zip(ones + twos, gradients * 2, factors * 2, strict=True):
                    twin.grad = _times(gradient, factor)
                try:
                    with contextlib.nullcontext() if factors == _USUAL else _unheard():
                        states = self._step_both(sample, group, closure, (ones, twos), states)
                except Exception as error:
                    if factors == _USUAL or (isinstance(error, ConfigError) and math.nan not in factors):
                        raise
                    return
                if any(map(differ, [ones, states[:2]], [twos, states[2:]])):
                    raise ConfigError(
                        "this optimizer updates two parameters together otherwise than one after the other: it "
                        f"couples them, so that it cannot run on some of them at a time. {_KEEP}"
                    )

    def _step_both(
        self,
        sample: Sample,
        group: int,
        closure: Closure | None,
        pairs: tuple[list[torch.Tensor], list[torch.Tensor]],
        states: list[State | None],
    ) -> list[State | None]:
        """One step of a pair of copies one by one, and of another pair together; return the states of all."""
        ones, twos = pairs
        changes = GroupChanges(StepEffects(self._optimizer, is_rehearsal=True), closure)
        after = [
            self._inner_step.run([twin], [group], [state], changes, owners=[sample.owner])[0]
            for twin, state in zip(ones, states[:2], strict=True)
        ]
        together = self._inner_step.run(twos, [group] * 2, states[2:], changes, owners=[sample.owner] * 2)
        if not are_apart([spans_of([p, s]) for p, s in zip(twos, together, strict=True)]):
            raise ConfigError(f"this optimizer's states of several parameters share memory. {_KEEP}")
        return [*after, *together]

    def is_missing_due(self, tensor: torch.Tensor, group: int, *, has_state: bool) -> bool:
        """Whether it was not tried yet what a step does with such a parameter without a gradient."""
        return (group, tensor.dim(), has_state) not in self._known_missing

    def play_missing(self, tensor: torch.Tensor, group: int, *, state: State | None) -> None:
        """Try a step with a copy of a parameter that has no gradient: ours leave it out.

        Args:
            tensor: nothing is changed.
            group: number of its group.
            state: of the parameter; ``None``: it has none.

        Raises:
            ConfigError: the optimizer updates it all the same, or cannot be tried.
        """
        if has_twins(tensor):
            sample, touched = Sample(tensor, state, is_blank=True), _Touched(self._optimizer)
            twin = sample.twin()
            twin.grad, given = None, sample.state_for(twin)
            other, before = sample.twin(), _versions([twin, given])
            others = sample.state_for(other)
            after, error = given, None
            try:
                with self._trial(sample, [twin], touched):
                    changes = GroupChanges(StepEffects(self._optimizer, is_rehearsal=True))
                    call = [twin], [group], [given]
                    after = self._inner_step.run(*call, changes, is_idle=True, owners=[sample.owner])[0]
            except Exception as caught:
                error = caught
            self._refuse(error, touched)
            if before != _versions([twin, after or None]) or differ([twin, after], [other, others]):
                raise ConfigError(
                    "OffloadPolicy.optimizer_states='offload' expects an optimizer that leaves parameters without a "
                    f"gradient alone; got {type(self._optimizer).__name__}, which updates them or their states. {_KEEP}"
                )
        self._known_missing.add((group, tensor.dim(), state is not None))

    @contextlib.contextmanager
    def _trial(self, sample: Sample, twins: Sequence[torch.Tensor], touched: _Touched) -> Iterator[None]:
        """Around calls with copies, of which nothing remains."""
        effects = preserving_effects(self._optimizer, [sample.tensor.device])
        with effects, introduced(self._optimizer, sample.tensor, twins), uncompiled(), touched:
            yield

    def _evaluate(self, sample: Sample, group: int, closure: Closure, touched: _Touched) -> None:
        """Steps that find this gradient, another one or none before they evaluate the model: all are to end alike.

        Ours evaluate it first, so that all that is there before is already what the evaluation has left.
        """
        ends = []
        for gradient in (sample.gradient(), sample.gradient(is_other=True), None):
            twin = sample.twin()
            state, evaluation = sample.state_for(twin), _Evaluation(twin, gradient, closure)
            with self._trial(sample, [twin], touched):
                for _ in range(_NUM_STEPS):
                    evaluation.begin()
                    changes = GroupChanges(StepEffects(self._optimizer, is_rehearsal=True), evaluation)
                    state = self._inner_step.run([twin], [group], [state], changes, owners=[sample.owner])[0]
            ends.append([twin, state])
        if any(differ(ends[0], end) for end in ends[1:]):
            raise ConfigError(
                "OffloadPolicy.optimizer_states='offload' expects an optimizer that looks at gradients after its "
                f"closure; got {type(self._optimizer).__name__}, which uses those from before. {_KEEP}"
            )


def _times(gradient: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    """A copy, times a factor where there are fractions."""
    if gradient is None or not gradient.is_floating_point():
        return None if gradient is None else gradient.clone()
    return gradient.clone() if factor == 1 else gradient.mul(factor)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Nobody is warned of what is not so, nor goes without the same warning when it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Evaluation:
    """In the place of a closure: gives a copy its gradient, if nothing has changed before.

    Args:
        twin: the copy; its gradient is what the model's evaluation gives.
        before: what is there as its gradient when a step begins; ``None``: none.
        closure: gives what the model's own has given.
    """

    def __init__(self, twin: torch.Tensor, before: torch.Tensor | None, closure: Closure) -> None:
        self._twin = twin
        self._after, twin.grad = twin.grad, None
        self._before = before
        self._closure = closure
        self._given: list[torch.Tensor | None] = []

    def begin(self) -> None:
        """Before a step."""
        self._twin.grad = None if self._before is None else self._before.clone()
        self._given = [self._twin.detach().clone(), None if self._before is None else self._before.clone()]

    def __call__(self) -> Any:
        """Evaluate.

        Raises:
            ConfigError: the step has changed parameter or gradient before.
        """
        now = [self._twin.detach(), self._twin.grad]
        is_there = [t is not None for t in now]
        if is_there != [t is not None for t in self._given] or differ(now, self._given):
            raise ConfigError(
                "OffloadPolicy.optimizer_states='offload' expects an optimizer that evaluates its closure before it "
                f"changes anything; got one that moves parameters or clears gradients first. {_KEEP}"
            )
        self._twin.grad = None if self._after is None else self._after.clone()
        return self._closure()


def _versions(value: Any) -> Any:
    """What differs where something in ``value`` was edited or replaced, if only by what is equal."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version, address_of(value)
    if isinstance(value, Mapping):
        return {key: _versions(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_versions(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else id(value)


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
                    raise CoupledError("this optimizer changes parameters that its step was not given")
                self._versions[number] = parameter._version
