"""One short trial on copies: does an optimizer do the same whether parameters come together or one after the other?

Note: what is compared
    Two copies of the optimizer get small random copies of all parameters. One steps as plain training does, the other
    is called for one parameter at a time, in the other order, with the code that later steps use. Gradients are usual,
    zero for some, large, infinite and not a number, and rates of learning small and large. Bits of parameters, states,
    options, attributes and results must be equal, no random number may be drawn, and states must share no memory. The
    user's optimizer, its class, its module, its parameters and all generators stay as they are.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.compiler import uncompiled
from lightning_ssd.common.dtensor import has_shape, is_shard, local_of
from lightning_ssd.common.rng import RandomStates, default_sources, shared_sources
from lightning_ssd.common.tensors import storage_of
from lightning_ssd.optimizer.step.aliases import is_held
from lightning_ssd.optimizer.step.copies import same
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, WholeStep
from lightning_ssd.optimizer.step.surroundings import kept_surroundings
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = ["Difference", "Doubt", "Way", "attributes", "rehearse", "signature"]

_STEPS = ((0.1, 1.0), (0.1, 0.01), (0.0, 1e-4), (1024.0, 100.0), (math.inf, 1.0), (math.nan, 1.0))
"""Of each step the size of gradients (0: those of some are zero; not finite: one element) and of rates of learning."""
_LARGE, _LARGEST = 8 * 32768, 2 << 20
"""Elements of large copies, of which larger parameters give the first ones of each dimension. PyTorch sums from 32768
on in other ways, and people compare with a million."""
_SUM_OF_NUMEL, _MIN_NUMEL = 1 << 22, 64
"""All other copies share so many; none of them has fewer because of that."""
_NUM_CALLS = 61
"""Calls for some parameters each in the first step; later steps have fewer."""
_TRIED_RATE = 1e-3
_OF_TRAINING = ("params", "param_names", "lr", "initial_lr", "max_lr", "min_lr")
"""Options that are no choice: schedulers set them later, or with each step."""
_MAX_DEPTH = 3


class Way(NamedTuple):
    """How a step goes; as a text it ends a sentence of an error."""

    has_closure: bool = False
    is_missing: bool = False
    """Whether some parameters have no gradient."""

    def __str__(self) -> str:
        return ", with a closure" * self.has_closure + ", some of them without a gradient" * self.is_missing


class Difference(Exception):  # no error of the user's optimizer
    """An optimizer does something else for some of its parameters than for all; the text says what."""


class Doubt(Exception):  # no error of the user's optimizer
    """A trial proves nothing of an optimizer; the text says why."""


def rehearse(
    optimizer: Optimizer,
    way: Way,
    dtype_of: Callable[[torch.Tensor], torch.dtype],
    state_of: Callable[[torch.Tensor], State],
) -> set[Any]:
    """Step copies of an optimizer in both ways and compare them.

    Args:
        optimizer: the user's.
        way: how the steps go. Large copies are made where they go plainly.
        dtype_of: the type of a parameter's copy.
        state_of: what the optimizer remembers of a parameter.

    Returns:
        what options and attributes were like in the steps (:func:`signature`).

    Raises:
        Difference: the two are not the same.
        Doubt: the step changes what is not the optimizer's, so that one trial says nothing of the next step.
        Exception: whatever the optimizer raises on copies.
    """
    known = [parameter for _, parameter in _parameters(optimizer)]
    sizes = _sizes(known, has_large=not any(way))
    themselves = {id(p): p for p in known}
    examples = {id(p): _example(state_of(p), p, sizes[id(p)], themselves) for p in known if not is_shard(p)}
    examples = {key: state for key, state in examples.items() if state}

    def made() -> list[_Copy]:
        return [_Copy(optimizer, sizes, examples, dtype_of) for _ in range(2)]

    plain, apart = made()
    seen = {signature(plain.optimizer)}
    for number, (scale, _) in enumerate(_STEPS):
        is_usual = scale == _STEPS[0][0]
        results = []
        try:
            with _without_a_mark(optimizer, is_usual=is_usual):
                results.append(plain.step_together(number, way))
            with _without_a_mark(optimizer, is_usual=is_usual):
                results.append(apart.step_apart(number, way))
        except (Difference, Doubt, CoupledError, _TouchedError):
            raise
        except Exception as error:
            if results:
                what = f"{type(error).__name__}: {error}"
                raise Difference(
                    f"steps of some raise {what}, and one of all does not, tried on copies{way}"
                ) from error
            if is_usual:
                raise
            plain, apart = made()  # plain training ends where it refuses a gradient, half way
            continue
        if what := plain.difference(apart) or ("" if same(*results) else "what its step returns differs"):
            raise Difference(f"{what} between a step of all parameters and steps of some, tried on copies{way}")
        seen.add(signature(plain.optimizer))
    return seen


def signature(optimizer: Optimizer) -> Any:
    """Return what the options and attributes of an optimizer are like: of numbers their type, and whether they are 0.

    An optimizer may go by them: a trial says nothing of those that were not there.
    """
    groups = [
        (type(group.get("lr")), _kind_of({k: v for k, v in group.items() if k not in _OF_TRAINING}))
        for group in optimizer.param_groups
    ]
    return tuple(groups), _kind_of(attributes(optimizer))


def _kind_of(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, str | FunctionType | type):
        return value
    if isinstance(value, bool | int | float | complex):
        return type(value), bool(value)
    if depth == _MAX_DEPTH or isinstance(value, torch.Tensor):
        return type(value)
    if isinstance(value, tuple):
        return type(value), tuple(_kind_of(item, depth + 1) for item in value)
    if isinstance(value, list):  # which may grow
        return type(value), frozenset(_kind_of(item, depth + 1) for item in value)
    items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return type(value), tuple((key, _kind_of(item, depth + 1)) for key, item in items.items() if isinstance(key, str))


def _sizes(parameters: Sequence[torch.Tensor], *, has_large: bool) -> dict[int, list[int]]:
    """By the id of a parameter, the shape of its copy. Those of one shape have the same, but for two large ones."""
    share = max(_SUM_OF_NUMEL // (1 if has_large else 4) // max(len(parameters), 1), _MIN_NUMEL)
    counts, seen = Counter(p.shape for p in parameters), Counter[torch.Size]()
    by_numel = sorted(counts, key=math.prod)
    largest = {len(shape): shape for shape in by_numel}.values()  # of each number of dimensions
    several = {len(shape): shape for shape in by_numel if counts[shape] > 1}.values()
    sizes = {}
    for p in parameters:
        seen[p.shape] += 1
        is_large = has_large and seen[p.shape] <= 2
        limit = _LARGEST if is_large and p.shape in largest else _LARGE if is_large and p.shape in several else share
        sizes[id(p)] = _cropped(p.shape, limit)
    return sizes


def _cropped(shape: Iterable[int], numel: int) -> list[int]:
    sizes = list(shape)
    while math.prod(sizes) > numel:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return sizes


class _Copy:
    """A copy of an optimizer with copies of its parameters that have these sizes and states, by the parameters' ids."""

    def __init__(
        self,
        optimizer: Optimizer,
        sizes: Mapping[int, Sequence[int]],
        examples: Mapping[int, State],
        dtype_of: Callable[[torch.Tensor], torch.dtype],
    ) -> None:
        mine: Any = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): mine}
        self._groups: list[int] = []
        for number, parameter in _parameters(optimizer):
            like = torch.empty(0, dtype=dtype_of(parameter), device=parameter.device)
            data = _numbers(sizes[id(parameter)], len(self._groups), like)
            twin = torch.nn.Parameter(data, requires_grad=data.is_floating_point() or data.is_complex())
            memo[id(parameter)] = twin
            vars(twin).update(copy.deepcopy(vars(parameter), memo))  # marks by which optimizers go
            self._groups.append(number)
        self._twins: list[torch.Tensor] = [memo[id(parameter)] for _, parameter in _parameters(optimizer)]
        vars(mine).update((name, OrderedDict()) for name in vars(optimizer) if name.startswith("_optimizer_"))
        vars(mine).update((name, copy.deepcopy(value, memo)) for name, value in attributes(optimizer).items())
        mine.state = defaultdict(dict, {memo[key]: copy.deepcopy(state, memo) for key, state in examples.items()})
        keys: list[Any] = list(optimizer.state)
        shared = [key for key in keys if not isinstance(key, torch.Tensor)]
        mine.state.update((key, copy.deepcopy(optimizer.state[key], memo)) for key in shared)
        mine.param_groups = []
        for group in optimizer.param_groups:
            own = {key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}
            if _is_rate(rate := own.get("lr")) and not rate:  # as a warm-up begins: no parameter would change
                own["lr"] = torch.full_like(rate, _TRIED_RATE) if isinstance(rate, torch.Tensor) else _TRIED_RATE
            mine.param_groups.append({"params": [memo[id(p)] for p in group["params"] if id(p) in memo], **own})
        self.optimizer: Optimizer = mine
        self._stepper = SubgroupStepper(mine)

    def _set_rates(self, number: int) -> None:
        factor = _STEPS[number][1] / (_STEPS[number - 1][1] if number else 1.0)
        for group in self.optimizer.param_groups:
            if _is_rate(group.get("lr")):
                group["lr"] = group["lr"] * factor

    def _give_gradients(self, number: int, way: Way, *, is_before: bool = False) -> None:
        scale = _STEPS[number][0]
        for index, twin in enumerate(self._twins):
            is_missing = way.is_missing and (index == len(self._twins) - 1 or (index == 0 and number == 1))
            noise = _numbers(twin.shape, 1000 * (2 * number + 1 + is_before) + index, twin.detach())
            gradient = (noise + 0.1 * twin.detach()) * (scale if 1 < scale < math.inf else 0.1)
            if scale == 0 and index % 2 == 0:
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

        self._set_rates(number)
        self._give_gradients(number, way, is_before=way.has_closure)
        return self._stepper.call_plainly(closure if way.has_closure else None)

    def step_apart(self, number: int, way: Way) -> Any:
        """Step as with offloaded states: the closure first, then some parameters at a time."""
        self._set_rates(number)
        loss = self._loss() if way.has_closure else None
        self._give_gradients(number, way)
        state: dict[Any, Any] = self.optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
        whole = WholeStep(self.optimizer, None if loss is None else lambda: loss, shared)
        active = [index for index, twin in enumerate(self._twins) if twin.grad is not None]
        num_calls = _NUM_CALLS - 2 * number  # so that no two parameters are always together
        for call in reversed(range(num_calls)):
            if mine := [index for index in active if index % num_calls == call]:
                twins = [self._twins[index] for index in mine]
                before = [state.pop(twin, None) for twin in twins]
                after = self._stepper.run(twins, [self._groups[index] for index in mine], before, whole)
                del before
                state.update((twin, one) for twin, one in zip(twins, after, strict=True) if one is not None)
        idle = set(range(len(self.optimizer.param_groups))) - {self._groups[index] for index in active}
        self._stepper.run_idle(idle, whole)
        whole.apply()
        state.update(whole.shared)
        return whole.result(loss)

    def _held(self, names: Mapping[int, int]) -> Iterator[tuple[str, dict[Any, Any]]]:
        state: dict[Any, Any] = self.optimizer.state
        yield "parameters", {number: twin.detach() for number, twin in enumerate(self._twins)}
        yield "gradients", {number: twin.grad for number, twin in enumerate(self._twins)}
        yield "states", {names.get(id(key), key): value for key, value in state.items()}
        for number, group in enumerate(self.optimizer.param_groups):
            yield f"param_groups[{number}]", {key: value for key, value in group.items() if key != "params"}
        yield "attributes", attributes(self.optimizer)

    def difference(self, other: _Copy) -> str:
        """Say in what the other one is not the same; nothing: in nothing."""
        names = {id(twin): number for each in (self, other) for number, twin in enumerate(each._twins)}
        names.update({id(each.optimizer): -1 for each in (self, other)})
        for (place, mine), (_, theirs) in zip(self._held(names), other._held(names), strict=True):
            keys = [k for k in {**mine, **theirs} if k not in mine or not same(mine[k], theirs.get(k, names), names)]
            if keys:
                return f"its {place} {keys[:3]} differ"
        for state in (*self.optimizer.state.values(), *other.optimizer.state.values()):
            tensors = (
                [k for k, v in state.items() if torch.is_tensor(v) and v.numel() > 1] if isinstance(state, dict) else []
            )
            if keys := [key for key in tensors if is_held(state, key)]:
                raise Difference(
                    f"its states {keys} share memory with others, with a parameter or gradient, or with something that "
                    "the optimizer holds, which would not follow them to a drive and back"
                )
        return ""


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float | torch.Tensor)


def _parameters(optimizer: Optimizer) -> list[tuple[int, torch.Tensor]]:
    return [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"] if has_shape(p)]


def attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer has besides groups, states, hooks and the step that a scheduler has wrapped."""
    without = ("state", "param_groups", "step")
    return {key: value for key, value in vars(optimizer).items() if key not in without and not key.startswith("_opt")}


def _numbers(shape: Iterable[int], seed: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(tuple(shape), generator=generator, dtype=kind, device="cpu").to(like)


def _example(state: State, parameter: torch.Tensor, sizes: Sequence[int], memo: Mapping[int, Any]) -> State:
    """Copy a state, if it can be copied and its tensors are cropped like the parameter; else a trial begins anew."""
    tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.numel() > 1]
    inner = dict(memo) if state else {}
    if list(parameter.shape) != sizes:
        if any(t.shape != parameter.shape for t in tensors):
            return {}
        inner.update((id(t), t[tuple(map(slice, sizes))].clone()) for t in tensors)
    try:
        return {key: copy.deepcopy(value, dict(inner)) for key, value in state.items()}  # users may share tensors
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
def _without_a_mark(optimizer: Optimizer, *, is_usual: bool) -> Iterator[None]:
    """Call an optimizer's copy: what it changes elsewhere is put back and refused, nothing is compiled, and warnings of
    gradients that are no real ones are not shown.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memo = {id(p): p for p in parameters} | {id(optimizer): optimizer}
    random = RandomStates([*shared_sources(), *default_sources({p.device for p in parameters})])
    try:
        with kept_surroundings(type(optimizer), memo) as changed:
            with warnings.catch_warnings(), uncompiled(), _Untouched(optimizer):
                if not is_usual:
                    warnings.simplefilter("ignore")
                yield
            if random.are_used():
                raise Difference("its step draws random numbers, in another order than a plain step")
            if names := changed():
                raise Doubt(f"its step changes what belongs to its class, its module or a closure: {names}")
    finally:
        random.restore()
