"""Which optimizers may update some of their parameters at a time: known ones, rehearsed ones, and none of the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.dtensor import address_of, local_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import Span, are_apart, is_held, spans_of
from lightning_ssd.optimizer.step.rehearsal import Difference, Way, rehearse
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
_OWN_CODE = ("step", "_init_group")
"""Methods by which PyTorch's classes update parameters."""
_KEEP = "OffloadPolicy.optimizer_states='keep'"
_OFFLOAD = "OffloadPolicy.optimizer_states='offload'"


def _method(kind: type, name: str) -> Any:
    """Return a class' method as its author wrote it: PyTorch wraps the ``step`` of classes that have instances."""
    method = getattr(kind, name, None)
    return getattr(method, "__wrapped__", method) if hasattr(method, "hooked") else method


def _runs_code_of(optimizer: Optimizer, kinds: Collection[type[Optimizer]]) -> bool:
    kind = type(optimizer)
    known = next((known for known in kind.__mro__ if known in kinds), None)
    return known is not None and all(_method(kind, name) is _method(known, name) for name in _OWN_CODE)


class Contract:
    """Decides once per parameter and way of stepping whether an optimizer may be called for some of its parameters.

    Args:
        optimizer: the user's.
        declared: names of classes that the user promises to update each parameter by itself.
        dtype_of: the type in which a parameter is updated.
        state_of: what the optimizer remembers of a parameter; ``None``: it is in the optimizer's ``state``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        declared: Collection[str] = (),
        dtype_of: Callable[[torch.Tensor], torch.dtype] = lambda parameter: parameter.dtype,
        state_of: Callable[[torch.Tensor], State] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        self._is_declared = self._name in declared
        self._dtype_of = dtype_of
        self._state_of = (lambda parameter: optimizer.state.get(parameter, {})) if state_of is None else state_of
        self.is_elementwise = _runs_code_of(optimizer, _ELEMENTWISE)
        """Whether each element is known to be updated by itself."""
        self.is_known = self.is_elementwise or _runs_code_of(optimizer, _BY_PARAMETER)
        """Whether each parameter is known to be updated by itself."""
        self._refusals: dict[Way, ConfigError | None] = {}
        self._has_told = False
        self._runs_base_step = False
        self._num_calls = 0

    def admit(self, parameters: Sequence[torch.Tensor]) -> None:
        """Rehearse parameters that have come, in each way in which a step may go.

        Raises:
            ConfigError: a step without a closure, in which all of them have gradients, is not exact.
        """
        if self.is_known or not parameters:
            return
        _refuse_own_parameters(self._optimizer)
        for way in Way:
            self._refusals[way] = self._refusals.get(way) or self._rehearse(parameters, way)
        self.check(Way.PLAIN)
        if not self._has_told:
            self._has_told = True
            shown = "is declared" if self._is_declared else "was rehearsed on copies, with equal bits"
            if self._num_calls == 1:
                shown = "has one parameter, which each step updates as a whole"
            _log.info("%s %s: its states are offloaded, parameter by parameter.", self._name, shown)

    def check(self, way: Way) -> None:
        """Before a step touches anything.

        Raises:
            ConfigError: the optimizer is not exact in such a step.
        """
        refusal = self._refusals.get(way)
        if refusal is not None:
            raise refusal

    def check_hooks(self, *, has_hooks: bool) -> None:
        """Before a step touches anything.

        Raises:
            ConfigError: the class' step calls that of a base class, which runs the hooks a second time.
        """
        if has_hooks and self._runs_base_step:
            raise ConfigError(
                f"{_OFFLOAD} got {self._name}, whose step calls that of a base class. PyTorch runs step hooks in both, "
                f"and here the inner ones would run once per subgroup. Nothing was updated: remove the hooks, or use "
                f"{_KEEP}"
            )

    def _rehearse(self, parameters: Sequence[torch.Tensor], way: Way) -> ConfigError | None:
        try:
            found = rehearse(self._optimizer, parameters, way, self._dtype_of, self._state_of)
        except (Difference, CoupledError) as difference:
            what = difference.finding if isinstance(difference, CoupledError) else str(difference)
            return ConfigError(
                f"{_OFFLOAD} updates some parameters at a time, and {self._name} does not update each by itself: "
                f"{what}. Nothing was updated: use {_KEEP}"
            )
        except Exception as error:  # whatever the user's optimizer raises on copies
            if self._is_declared:
                return None
            refusal = ConfigError(
                f"{_OFFLOAD} got {self._name}, which is not of torch.optim and cannot be tried on copies of its "
                f"parameters{way.value}: it raised {type(error).__name__}: {error}. Nothing was updated. If it updates "
                f"each parameter by itself, say so: OffloadPolicy(per_parameter_optimizers=[{self._name!r}]). Else use "
                f"{_KEEP}"
            )
            refusal.__cause__ = error
            return refusal
        self._runs_base_step = self._runs_base_step or found.runs_base_step
        self._num_calls = found.num_calls
        return None


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
    for place, value in vars(optimizer).items():
        owned = next((found for found in _within(value) if place != "step" and found is not optimizer), None)
        if owned is not None and not place.startswith("_optimizer_"):
            raise ConfigError(
                f"{_OFFLOAD} expects an optimizer that updates its parameters itself; got {name}, which owns another "
                f"one, {type(owned).__name__}, in {place}. Offload that one and wrap what offload_optimizer() returns, "
                f"or use {_KEEP}"
            )
    refuse_own_step(optimizer)
    if "state" in vars(optimizer) and _is_held(vars(optimizer), "state"):
        raise ConfigError(
            f"{_OFFLOAD} expects nothing else to hold the `state` of {name}; got one that something (a wrapper, a "
            "variable, the Trainer of an earlier run) holds, which would not see it change. Let it look at the `state` "
            f"of what offload_optimizer() returns, let go of it, or use {_KEEP}"
        )


def _is_held(owner: dict[str, Any], name: str) -> bool:
    """As :func:`is_held`, but for what an earlier run has left: a Trainer is in cycles, which only the garbage
    collector ends.
    """
    if not is_held(owner, name):
        return False
    gc.collect()
    return is_held(owner, name)


def refuse_own_step(optimizer: Optimizer) -> None:
    """Refuse a ``step`` that the user has set on this one instance. That of a scheduler, which counts, is not meant.

    Raises:
        ConfigError: there is one.
    """
    step = vars(optimizer).get("step")
    if step is None:
        return
    while getattr(step, "_wrapped_by_lr_sched", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    function = getattr(step, "__func__", step)
    if function is not type(optimizer).step:
        raise ConfigError(
            f"{_OFFLOAD} expects the step of the class {type(optimizer).__name__}; got another one, {step!r}, set on "
            "the instance, which would be called once per subgroup of parameters. Set it on what offload_optimizer() "
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
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
    for place, value in {**own, "param_groups": groups}.items():
        if any(isinstance(leaf, torch.Tensor) and address_of(leaf) in addresses for leaf in tree_leaves(value)):
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
