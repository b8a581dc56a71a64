"""Which optimizers may update some of their parameters at a time: known ones, rehearsed ones, and none of the rest."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from types import FunctionType
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.dtensor import address_of, local_of
from lightning_ssd.common.rng import source_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import Span, are_apart, is_held, spans_of
from lightning_ssd.optimizer.step.rehearsal import Difference, Doubt, Way, attributes, rehearse, signature
from lightning_ssd.optimizer.step.stepper import without_hooks
from lightning_ssd.optimizer.step.surroundings import own_code
from lightning_ssd.optimizer.step.types import CoupledError, State

__all__ = [
    "Contract",
    "OwnMemory",
    "leads_to_optimizer",
    "refuse_by_kind",
    "refuse_differentiable",
    "refuse_own_step",
]

_log = logging.getLogger(__name__)

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
"""Update every element of a parameter by itself."""
_BY_PARAMETER: tuple[type[Optimizer], ...] = (
    optim.SparseAdam,
    optim.Adafactor,
    *([optim.Muon] if hasattr(optim, "Muon") else []),  # since PyTorch 2.9
)
"""Update every parameter by itself."""
_COUPLING = ("LBFGS", "Prodigy", "DAdapt", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "SAM", "KFAC")
"""Classes whose update of one parameter depends on others, or that evaluate the model themselves."""
_HARMLESS = ("zero_grad", "add_param_group", "state_dict", "load_state_dict", "_abc_impl")
"""What a subclass may override of PyTorch's classes, besides ``__init__`` and the like: no step calls it."""
_KEEP = "OffloadPolicy.optimizer_states='keep'"
_OFFLOAD = "OffloadPolicy.optimizer_states='offload'"


def _runs_code_of(optimizer: Optimizer, kinds: Collection[type[Optimizer]]) -> bool:
    kind = type(optimizer)
    known: Any = next((known for known in kind.__mro__ if known in kinds), None)
    if known is None:
        return False
    own = {name for base in kind.__mro__[: kind.__mro__.index(known)] for name in vars(base)} - {*_HARMLESS}
    called = [name for name in own if hasattr(known, name) and not name.startswith("__")]
    return not own & {"param_groups", "state", "__getattribute__", "__setattr__"} and all(
        without_hooks(getattr(kind, name)) is without_hooks(getattr(known, name)) for name in called
    )


class Contract:
    """Decides once per way of stepping whether an optimizer may be called for some of its parameters.

    Args:
        optimizer: the user's.
        declared: names of classes that the user promises to update each parameter by itself.
        dtype_of: the type in which a parameter is updated.
        state_of: what the optimizer remembers of a parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        declared: Collection[str] = (),
        dtype_of: Callable[[torch.Tensor], torch.dtype] = lambda parameter: parameter.dtype,
        state_of: Callable[[torch.Tensor], State] = lambda parameter: {},
    ) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._is_declared = self._name in declared
        self._dtype_of = dtype_of
        self._state_of = state_of
        self.is_elementwise = _runs_code_of(optimizer, _ELEMENTWISE)
        """Whether each element is known to be updated by itself."""
        self.is_known = self.is_elementwise or _runs_code_of(optimizer, _BY_PARAMETER)
        """Whether each parameter is known to be updated by itself."""
        self._refusals: dict[Any, ConfigError | None] = {}
        self._has_told = False

    def admit(self) -> None:
        """Rehearse all parameters, some of which have come, in each way in which a step may go.

        Raises:
            ConfigError: a step without a closure, in which all of them have gradients, is not exact.
        """
        if self.is_known:
            return
        _refuse_own_parameters(self._optimizer)
        if "grad_scaler" in inspect.signature(type(self._optimizer).step).parameters:
            raise ConfigError(
                f"{_OFFLOAD} got {self._name}, whose step takes a grad_scaler, and would get none here. Take that "
                f"argument out, so that the scaler unscales gradients itself, or use {_KEEP}"
            )
        self._refusals.clear()
        self.check(Way())
        if not self._has_told:
            self._has_told = True
            shown = "is declared" if self._is_declared else "was rehearsed on copies, with equal bits"
            if sum(len(group["params"]) for group in self._optimizer.param_groups) == 1:
                shown = "has one parameter, which each step updates as a whole"
            _log.info("%s %s: its states are offloaded, parameter by parameter.", self._name, shown)

    def check(self, way: Way) -> None:
        """Before a step touches anything. Rehearses where no step had such options and attributes in this way.

        Raises:
            ConfigError: the optimizer is not exact in such a step.
        """
        like = signature(self._optimizer)
        if (way, like) not in self._refusals:
            self._rehearse(way, like)
        refusal = self._refusals[way, like]
        if refusal is not None:
            raise refusal

    def check_hooks(self) -> None:
        """Raise ``ConfigError`` where hooks are around a step that calls another one, which runs them once more."""
        functions = [code for code in own_code(type(self._optimizer)) if isinstance(code, FunctionType)]
        if any("step" in function.__code__.co_names for function in functions):
            raise ConfigError(
                f"{_OFFLOAD} got {self._name}, whose step calls that of a base class. PyTorch runs step hooks in both, "
                f"here once per subgroup. Nothing was updated: remove the hooks, or use {_KEEP}"
            )

    def _rehearse(self, way: Way, like: Any) -> None:
        refusal = None
        try:
            if not self._is_declared:
                _doubt(self._optimizer)
            seen = rehearse(self._optimizer, way, self._dtype_of, self._state_of)
            self._refusals.update(((way, one), None) for one in seen)
        except (Difference, CoupledError) as difference:
            what = difference.finding if isinstance(difference, CoupledError) else str(difference)
            refusal = ConfigError(
                f"{_OFFLOAD} updates some parameters at a time, and {self._name} does not update each by itself: "
                f"{what}. Nothing was updated: use {_KEEP}"
            )
        except Exception as error:  # whatever the user's optimizer raises on copies
            why = str(error) if isinstance(error, Doubt) else f"it raised {type(error).__name__}: {error}"
            refusal = ConfigError(
                f"{_OFFLOAD} got {self._name}, which is not of torch.optim, and a trial on copies of its parameters"
                f"{way} cannot show that it updates each by itself: {why}. Nothing was updated. If it does, say so: "
                f"OffloadPolicy(per_parameter_optimizers=[{self._name!r}]). Else use {_KEEP}"
            )
            refusal.__cause__ = error
            if self._is_declared:
                refusal = None
        self._refusals[way, like] = refusal


def _doubt(optimizer: Optimizer) -> None:
    """Raise ``Doubt`` where an optimizer holds what may do otherwise after a trial."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        raise Doubt("it unscales gradients itself (_step_supports_amp_scaling), and none is scaled in a trial")
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for place, leaf in _held(optimizer):
        if source_of(leaf) is not None or isinstance(leaf, nn.Module):
            raise Doubt(f"{place} holds a {type(leaf).__name__}")
        if isinstance(leaf, int) and leaf in ids:
            raise Doubt(f"{place} holds the id() of a parameter, and a copy has another one")


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield names, and what an optimizer holds under them besides its parameters and states."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    for place, value in {**attributes(optimizer), "param_groups": groups}.items():
        numbers = [key for key in value if isinstance(key, int)] if isinstance(value, Mapping | Set) else []
        for leaf in (*tree_leaves(value), *numbers):
            yield place, leaf


# -- refused by what they are ------------------------------------------------------------------------------------------


def refuse_by_kind(optimizer: Optimizer) -> None:
    """Refuse what is more than one update of each parameter, as far as its class and what it owns tell.

    Raises:
        ConfigError: the optimizer couples its parameters, swaps weights, owns another optimizer, has a step of its own,
            or something else holds its ``state``.
    """
    kind, name = type(optimizer), type(optimizer).__name__
    if any(base.__name__ in _COUPLING for base in kind.__mro__):
        raise ConfigError(
            f"{_OFFLOAD} got {name}, whose update of one parameter depends on the others. Allowed: optimizers that "
            f"update each parameter by itself (Adam, AdamW, SGD, RMSprop, ...), or {_KEEP}"
        )
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise ConfigError(
            f"{_OFFLOAD} got {name}, whose train() and eval() exchange all weights by its states at once, as "
            f"schedule-free optimizers do. Use {_KEEP}"
        )
    for place, value in _held(optimizer):
        if owned := [found for found in _within(value) if found is not optimizer]:
            raise ConfigError(
                f"{_OFFLOAD} expects an optimizer that updates its parameters itself; got {name}, which owns another "
                f"one, {type(owned[0]).__name__}, in {place}. Offload that one and wrap what offload_optimizer() "
                f"returns, or use {_KEEP}"
            )
    refuse_own_step(optimizer)
    if "state" in vars(optimizer) and is_held(vars(optimizer), "state"):
        gc.collect()  # the Trainer of an earlier run is in cycles
        if is_held(vars(optimizer), "state"):
            raise ConfigError(
                f"{_OFFLOAD} expects nothing else to hold the `state` of {name}; got one that something (a wrapper, a "
                "variable, the Trainer of an earlier run) holds, which would not see it change. Let it look at the "
                f"`state` of what offload_optimizer() returns, let go of it, or use {_KEEP}"
            )


def refuse_own_step(optimizer: Optimizer) -> None:
    """Refuse a method of PyTorch's, such as ``step``, that the user has set on this one instance.

    The ``step`` of a scheduler, which counts, is not meant.

    Raises:
        ConfigError: there is one.
    """
    kind = type(optimizer)
    pytorchs = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    for name, method in vars(optimizer).items():
        if name in _HARMLESS or not isinstance(getattr(pytorchs, name, None), FunctionType):
            continue
        while getattr(method, "_wrapped_by_lr_sched", False) and hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if getattr(method, "__func__", method) is not getattr(kind, name):
            raise ConfigError(
                f"{_OFFLOAD} expects the {name} of the class {kind.__name__}; got another one, {method!r}, set on the "
                "instance, which would be called once per subgroup of parameters. Set it on what offload_optimizer() "
                f"returns, put it into a subclass or a step hook, or use {_KEEP}"
            )


def refuse_differentiable(optimizer: Optimizer) -> None:
    """Refuse steps that gradients are to go through: what waits on a drive belongs to no graph.

    Raises:
        ConfigError: a group has the option.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"{_OFFLOAD} expects differentiable=False; got {type(optimizer).__name__} with differentiable=True in "
                f"param_groups[{number}], whose states belong to autograd's graph, which cannot wait on a drive. Use "
                f"{_KEEP}"
            )


def _refuse_own_parameters(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds its parameters outside of ``param_groups`` as well: it may loop over these.

    What it holds in dictionaries by parameter is a state like others.

    Raises:
        ConfigError: it does.
    """
    addresses = {address_of(p) for group in optimizer.param_groups for p in group["params"]} - {0}
    for place, leaf in _held(optimizer):
        if isinstance(leaf, torch.Tensor) and address_of(leaf) in addresses:
            raise ConfigError(
                f"{_OFFLOAD} expects an optimizer that finds its parameters in param_groups; got "
                f"{type(optimizer).__name__}, which holds one in {place}, too, and would not see that a call is for "
                f"some of them. Use {_KEEP}"
            )


def leads_to_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or holds one, as a scheduler does."""
    return next(_within(value), None) is not None


def _within(value: Any) -> Iterator[Any]:
    """Yield optimizers: the value, those in containers, and those that an object in them holds or is bound to."""
    for leaf in tree_leaves(value):
        if _is_optimizer(leaf):
            yield leaf
        elif not isinstance(leaf, type | torch.Tensor | nn.Module):
            held = getattr(leaf, "__dict__", None)
            inner = [getattr(leaf, "__self__", None), *(held.values() if isinstance(held, Mapping) else ())]
            yield from filter(_is_optimizer, inner)


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, Optimizer):
        return True
    is_object = not isinstance(value, type | torch.Tensor | nn.Module | Mapping)
    return is_object and hasattr(value, "param_groups") and callable(getattr(value, "step", None))


class OwnMemory:
    """Refuses parameters that share memory: a plain step updates them at the same time."""

    def __init__(self) -> None:
        self._known: list[tuple[list[Span], tuple[int, ...]]] = []

    def check(self, parameters: Sequence[torch.Tensor]) -> None:
        """Before a step of several calls. Looks closely only where there is other memory than the last time.

        Raises:
            ConfigError: two of them share memory.
        """
        memory = [(spans_of(p), local_of(p).stride() if p.layout == torch.strided else ()) for p in parameters]
        if memory == self._known:
            return
        if not are_apart([spans for spans, _ in memory]):
            raise ConfigError(
                f"{_OFFLOAD} expects parameters with memory of their own; got two that lie within the same memory, "
                "which a plain step updates at the same time. Nothing was updated: let modules share one parameter, "
                f"clone one of them, or use {_KEEP}"
            )
        self._known = memory
