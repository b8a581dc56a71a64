"""One short trial on copies: does an optimizer do the same whether parameters come together or one after the other?

Note: what is compared
    Two copies of the optimizer get the same small random parameters. One copy steps as plain training does, the other
    is called for a few parameters at a time, in the other order, with the code that later steps use. Usual, zero, large
    and non-finite gradients depend on the parameters, so that what moves them before the closure shows. Bits of
    parameters, states, options, attributes and results must be equal, and states must share no memory. The user's
    optimizer, its parameters and all generators of random numbers stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.compiler import uncompiled
from lightning_ssd.common.dtensor import has_shape, is_shard, local_of
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.optimizer.step.aliases import is_held
from lightning_ssd.optimizer.step.copies import same
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, WholeStep
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = ["Difference", "Found", "Way", "rehearse"]

_SCALES = (0.1, 0.1, 0.0, 1024.0, math.inf, math.nan)
"""Of the gradients in each step: usual, usual with states, zero in some calls, large, and one that is not finite."""
_MIN_NUMEL, _MAX_NUMEL = 4096, 8 * 32768
"""Copies of larger parameters have the first elements of each dimension. PyTorch sums from 32768 elements on in other
ways: one pair of each number of dimensions has several times as many."""
_SUM_OF_NUMEL = 64 * _MAX_NUMEL
"""All others share about so many."""
_NUM_CALLS = 7
"""Number of calls for some parameters. No pattern of layers has this prime as a period, so any two part sooner."""
_NUM_OF_KIND = 2
"""Copies of so many parameters of each group and number of dimensions."""
_TRIED_RATE = 1e-3
_HOOKS = "_optimizer_"
_NOT_COMPARED = ("state", "param_groups", "step")


class Way(Enum):
    """How a step goes; the value ends a sentence of an error."""

    PLAIN = ""
    CLOSURE = ", with a closure"
    MISSING = ", some of them without a gradient"


class Difference(Exception):  # no error of the user's optimizer
    """An optimizer does something else for some of its parameters than for all; the text says what."""


@dataclass(frozen=True)
class Found:
    """What else a trial tells."""

    runs_base_step: bool
    """Whether the class' step calls that of a base class."""
    num_calls: int
    """For how many calls a step was tried apart; one is no other than a plain step."""


def rehearse(
    optimizer: Optimizer,
    parameters: Sequence[torch.Tensor],
    way: Way,
    dtype_of: Callable[[torch.Tensor], torch.dtype],
    state_of: Callable[[torch.Tensor], State],
) -> Found:
    """Step copies of an optimizer in both ways and compare them.

    Args:
        optimizer: the user's.
        parameters: those of which copies are stepped first of all; all that the optimizer holds by parameter is copied.
        way: how the steps go.
        dtype_of: the type of a parameter's copy.
        state_of: what the optimizer remembers of a parameter.

    Raises:
        Difference: the two are not the same.
        Exception: whatever the optimizer raises on copies.
    """
    chosen = _chosen(optimizer, parameters)

    def made() -> _Copy:
        return _Copy(optimizer, chosen, dtype_of, state_of)

    plain, apart = made(), made()
    for number, scale in enumerate(_SCALES):
        is_usual = scale == _SCALES[0]
        results = []
        try:
            with _without_a_mark(optimizer, seed=number, is_usual=is_usual):
                results.append(plain.step_together(number, way))
            with _without_a_mark(optimizer, seed=number, is_usual=is_usual):
                results.append(apart.step_apart(number, way))
        except Exception as error:
            # Plain training ends where it refuses a gradient. What is left half done is of no use.
            if results and not isinstance(error, _TouchedError | CoupledError):
                raise Difference(
                    f"steps of some at a time raise {type(error).__name__}: {error}, and a step of all parameters does "
                    f"not, tried on copies{way.value}"
                ) from error
            if is_usual or results or isinstance(error, _TouchedError):
                raise
            plain, apart = made(), made()
            continue
        if what := plain.difference(apart) or ("" if same(*results) else "what its step returns"):
            raise Difference(
                f"{what} differ{'s' if what.startswith('what') else ''} between a step of all parameters and steps of "
                f"some at a time, tried on copies{way.value}"
            )
    return Found(runs_base_step=plain.runs_base_step or apart.runs_base_step, num_calls=min(len(chosen), _NUM_CALLS))


def _chosen(optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> dict[int, int]:
    """By the id of each parameter to try, how many elements its copy may have.

    Known ones are tried with those that have come: what couples these with them would not show otherwise.
    """
    new = set(map(id, parameters))
    ones = [
        (id(parameter) not in new, number, parameter.dim(), parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if has_shape(parameter)
    ]
    counts: Counter[tuple[Any, ...]] = Counter()
    chosen: dict[int, int] = {}
    for _, number, dim, parameter in sorted(ones, key=lambda one: one[0]):
        kind = number, dim, parameter.numel() > 0
        if counts[kind] < _NUM_OF_KIND:
            counts[kind] += 1
            counts[kind[1:]] += 1
            chosen[id(parameter)] = _MAX_NUMEL if counts[kind[1:]] <= _NUM_OF_KIND else 0
    share = min(max(_SUM_OF_NUMEL // max(len(chosen), 1), _MIN_NUMEL), _MAX_NUMEL)
    return {key: numel or share for key, numel in chosen.items()}


class _Copy:
    """A copy of an optimizer with small copies of some parameters.

    Args:
        optimizer: the user's.
        chosen: by the id of a parameter, how many elements its copy may have.
        dtype_of: the type of a parameter's copy.
        state_of: what the optimizer remembers of a parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        chosen: Mapping[int, int],
        dtype_of: Callable[[torch.Tensor], torch.dtype],
        state_of: Callable[[torch.Tensor], State],
    ) -> None:
        own = vars(optimizer)
        self._twins: list[torch.Tensor] = []
        self._groups: list[int] = []
        memo: dict[int, Any] = {}
        mine: Any = object.__new__(type(optimizer))
        memo[id(optimizer)] = mine
        states: defaultdict[Any, Any] = defaultdict(dict)
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            twins = []
            for parameter in group["params"]:
                is_chosen = id(parameter) in chosen
                like = torch.empty(0, dtype=dtype_of(parameter), device=parameter.device)
                sizes = _cropped(parameter, chosen[id(parameter)]) if is_chosen else ()
                data = _numbers(sizes, len(self._twins), like) if is_chosen else like
                twin = torch.nn.Parameter(data, requires_grad=data.is_floating_point() or data.is_complex())
                memo[id(parameter)] = twin
                if is_chosen:
                    vars(twin).update(copy.deepcopy(vars(parameter), memo))  # marks by which optimizers go
                    twins.append(twin)
                    self._twins.append(twin)
                    self._groups.append(number)
                    if (state := state_of(parameter)) and not is_shard(parameter):
                        states[twin] = _cropped_state(state, parameter, twin, memo)
            groups.append((group, twins))
        keys: list[Any] = list(optimizer.state)
        for key in keys:
            if not isinstance(key, torch.Tensor):
                states[key] = copy.deepcopy(optimizer.state[key], memo)
        for name, value in own.items():
            if name.startswith(_HOOKS):
                vars(mine)[name] = OrderedDict()
            elif name not in _NOT_COMPARED:
                vars(mine)[name] = copy.deepcopy(value, memo)
        mine.state = states
        mine.param_groups = [
            {key: twins if key == "params" else _awake(key, copy.deepcopy(value, memo)) for key, value in group.items()}
            for group, twins in groups
        ]
        for group in mine.param_groups:
            if "param_names" in group:
                group["param_names"] = [str(number) for number in range(len(group["params"]))]
        self._optimizer: Optimizer = mine
        self._stepper = SubgroupStepper(mine)

    @property
    def runs_base_step(self) -> bool:
        """Whether the class' step calls that of a base class."""
        return self._stepper.runs_base_step

    def _give_gradients(self, number: int, way: Way, *, is_before: bool = False) -> None:
        """Set the gradients of a step, or those that it finds before its closure."""
        scale = _SCALES[number]
        for index, twin in enumerate(self._twins):
            is_missing = way is Way.MISSING and (index == len(self._twins) - 1 or (index == 0 and number == 1))
            noise = _numbers(twin.shape, 1000 * (2 * number + 1 + is_before) + index, twin.detach())
            gradient = (noise + 0.1 * twin.detach()) * (scale if 1 < scale < math.inf else 0.1)
            if scale == 0 and index % _NUM_CALLS % 2 == 0:
                gradient.zero_()
            if not math.isfinite(scale) and index == min(1, len(self._twins) - 1) and gradient.numel():
                gradient.view(-1)[0] = scale
            twin.grad = None if is_missing else gradient

    def _loss(self) -> torch.Tensor:
        return torch.stack([twin.detach().float().sum().cpu() for twin in self._twins]).sum()

    def step_together(self, number: int, way: Way) -> Any:
        """Step as plain training does; return what the step returns."""

        def closure() -> torch.Tensor:
            self._give_gradients(number, way)
            return self._loss()

        if way is not Way.CLOSURE:
            self._give_gradients(number, way)
            return self._stepper.call_plainly(None)
        self._give_gradients(number, way, is_before=True)
        return self._stepper.call_plainly(closure)

    def step_apart(self, number: int, way: Way) -> Any:
        """Step as with offloaded states: the closure first, then some parameters at a time."""
        loss = self._loss() if way is Way.CLOSURE else None
        self._give_gradients(number, way)
        state: dict[Any, Any] = self._optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        whole = WholeStep(self._optimizer, None if loss is None else lambda: loss, shared)
        active = [index for index, twin in enumerate(self._twins) if twin.grad is not None]
        for call in reversed(range(_NUM_CALLS)):
            mine = [index for index in active if index % _NUM_CALLS == call]
            if mine:
                twins = [self._twins[index] for index in mine]
                before = [state.get(twin) for twin in twins]
                for twin in twins:
                    state.pop(twin, None)
                after = self._stepper.run(twins, [self._groups[index] for index in mine], before, whole)
                del before
                state.update((twin, one) for twin, one in zip(twins, after, strict=True) if one is not None)
        idle = set(range(len(self._optimizer.param_groups))) - {self._groups[index] for index in active}
        self._stepper.run_idle(idle, whole)
        whole.apply()
        state.update(whole.shared)
        return whole.result(loss)

    def difference(self, other: _Copy) -> str:
        """Say in what the other one is not the same; nothing: in nothing."""
        names = {id(twin): number for copy_ in (self, other) for number, twin in enumerate(copy_._twins)}
        if not all(same(p.detach(), q.detach()) for p, q in zip(self._twins, other._twins, strict=True)):
            return "parameters"
        one, two = self._optimizer, other._optimizer
        if not same(dict(one.state), dict(two.state), names):
            return "states"
        for number, (group, theirs) in enumerate(zip(one.param_groups, two.param_groups, strict=True)):
            # One without parameters of a trial may have some in a step.
            if group["params"] and (keys := _differing(group, theirs, names, without=("params",))):
                return f"the options {keys} of param_groups[{number}]"
        if keys := _differing(vars(one), vars(two), names, without=_NOT_COMPARED):
            return f"the attributes {keys}"
        for state in (*one.state.values(), *two.state.values()):
            if isinstance(state, dict):
                held = [key for key, v in state.items() if isinstance(v, torch.Tensor) and v.numel() > 1]
                if found := [key for key in held if is_held(state, key)]:
                    raise Difference(
                        f"its states {found} share memory with others, with a parameter or gradient, or with something "
                        "that the optimizer holds, which would not follow them to a drive and back"
                    )
        return ""


def _awake(key: str, value: Any) -> Any:
    """Give a rate of learning: a warm-up begins at 0, by which a trial would see no parameter change."""
    if key == "lr" and isinstance(value, int | float | torch.Tensor) and not bool(value):
        return torch.full_like(value, _TRIED_RATE) if isinstance(value, torch.Tensor) else _TRIED_RATE
    return value


def _numbers(shape: Iterable[int], seed: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(tuple(shape), generator=generator, dtype=kind, device="cpu").to(like)


def _cropped(parameter: torch.Tensor, numel: int) -> list[int]:
    sizes = list(parameter.shape)
    while math.prod(sizes) > numel:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return sizes


def _cropped_state(state: State, parameter: torch.Tensor, twin: torch.Tensor, memo: dict[int, Any]) -> State:
    """Copy a state, if it can be copied and its tensors are cropped like the parameter; else a trial begins anew."""
    if twin.shape != parameter.shape and any(
        t.numel() > 1 and t.shape != parameter.shape for t in tree_leaves(state) if isinstance(t, torch.Tensor)
    ):
        return {}
    first = tuple(slice(0, size) for size in twin.shape)
    try:
        if twin.shape != parameter.shape:
            large = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
            memo.update((id(t), t[first].clone()) for t in large)
        return copy.deepcopy(state, memo)
    except Exception:  # whatever an object of the user's raises that refuses to be copied
        return {}


# -- leaving no mark ---------------------------------------------------------------------------------------------------


class _TouchedError(RuntimeError):
    """A step on copies touched the model's own tensors."""


class _Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends what touches the model's own parameters or gradients, before it is executed."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._storages = {place for p in parameters for t in (p, p.grad) if (place := _storage(t)) is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and _storage(value) in self._storages:
                raise _TouchedError(
                    f"{func} touched a tensor of shape {tuple(value.shape)} of the model, which the step was not given"
                )
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor | None) -> int | None:
    """Return which storage a tensor is in: it stays what it is while its memory is elsewhere."""
    if tensor is None or not has_shape(tensor) or local_of(tensor).layout != torch.strided:
        return None
    storage = storage_of(local_of(tensor))
    return int(storage._cdata) if storage.nbytes() or tensor.numel() else None


@contextlib.contextmanager
def _without_a_mark(optimizer: Optimizer, *, seed: int, is_usual: bool) -> Iterator[None]:
    """Call an optimizer's copy: generators begin alike and are put back, nothing is compiled, and warnings of
    gradients that are no real ones are not shown.
    """
    devices = {p.device for group in optimizer.param_groups for p in group["params"]} - {torch.device("cpu")}
    others = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = others[0].type if others else "cuda"
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with (
            torch.random.fork_rng([device.index or 0 for device in others], device_type=kind),
            warnings.catch_warnings(),
            uncompiled(),
            _Untouched(optimizer),
        ):
            if not is_usual:
                warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(seed)
            for device in others:
                with torch.get_device_module(device).device(device):
                    torch.get_device_module(device).manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


# -- comparing ---------------------------------------------------------------------------------------------------------


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Mapping[int, int], *, without: Sequence[str]
) -> list[str]:
    keys = [k for k in {**one, **other} if k not in without and not str(k).startswith(_HOOKS)]
    return [key for key in keys if (key in one) != (key in other) or not same(one.get(key), other.get(key), names)]
