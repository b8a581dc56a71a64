"""Optimizers that are more than a ``step`` on their parameters, refused by what they hold."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import address_of, local_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import Span, have_elements_in_common, is_held, spans_of

__all__ = [
    "OwnMemory",
    "leads_to_optimizer",
    "refuse_coupling",
    "refuse_differentiable",
    "refuse_own_parameters",
    "refuse_own_step",
    "refuse_owned",
]

_COUPLING = ("LBFGS", "Prodigy", "DAdapt", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "SAM", "KFAC")
"""Optimizers whose update of one parameter depends on others, or that evaluate the model themselves."""
_UNCALLED = ("zero_grad", "add_param_group", "state_dict", "load_state_dict")
"""Methods that no step calls."""
_MAX_DEPTH = 4
_MAX_ITEMS = 100_000
_KEEP = "OffloadPolicy.optimizer_states='keep'"


def refuse_coupling(optimizer: Optimizer) -> None:
    """Refuse what cannot be exact subgroup by subgroup, as far as its name and what it owns tell.

    Raises:
        ConfigError: the optimizer couples its parameters, owns another optimizer, or unscales gradients itself.
    """
    name = type(optimizer).__name__
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _COUPLING:
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' got {name}, whose update of one "
                "parameter depends on the others, so that it cannot run on some of them at a time. Allowed: optimizers "
                "that treat each parameter by itself (Adam, AdamW, SGD, RMSprop, ...), or optimizer_states='keep'"
            )
    refuse_owned(optimizer)
    refuse_own_step(optimizer)
    if "grad_scaler" in inspect.signature(type(optimizer).step).parameters:
        raise ConfigError(
            f"OffloadPolicy.optimizer_states='offload' got {name}, whose step takes a grad_scaler, and would "
            "get none here, so that gradients stayed scaled. Take that argument out: the scaler unscales them then. Or "
            f"use {_KEEP}"
        )
    if "state" in vars(optimizer) and _is_held(vars(optimizer), "state"):
        raise ConfigError(
            f"OffloadPolicy.optimizer_states='offload' expects nobody else to hold the `state` of {name}; got one that "
            "something (a wrapper, a variable, the Trainer of an earlier run) holds, which would not see it change. "
            f"Let it look at the `state` of what offload_optimizer() returns, let go of it, or use {_KEEP}"
        )


def _is_held(owner: dict[str, Any], name: str) -> bool:
    """As :func:`is_held`, but for what an earlier run has left: a Trainer is in cycles, which only the garbage
    collector ends.
    """
    if not is_held(owner, name):
        return False
    gc.collect()
    return is_held(owner, name)


def refuse_differentiable(optimizer: Optimizer) -> None:
    """Refuse steps that gradients are to go through: what waits on a drive belongs to no graph.

    Raises:
        ConfigError: a group has the option.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' expects differentiable=False; got "
                f"{type(optimizer).__name__} with differentiable=True in param_groups[{number}], whose states "
                f"belong to autograd's graph, which cannot wait on a drive. Use {_KEEP}"
            )


def refuse_owned(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps another one.

    Raises:
        ConfigError: it owns one.
    """
    name = type(optimizer).__name__
    for place, value in _held(optimizer):
        if value is not optimizer and _is_optimizer(value):
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' expects an optimizer that updates its parameters itself; "
                f"got {name}, which owns another one, {type(value).__name__}, in {place}. Offload that one and "
                f"wrap what offload_optimizer() returns, or use {_KEEP}"
            )


def leads_to_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer, or holds one, as a scheduler does."""
    return any(_is_optimizer(found) for _, found in _within(value, "", 0, set()))


def refuse_own_step(optimizer: Optimizer) -> None:
    """Refuse ``step``, or a method of PyTorch's that it calls, set on this one instance.

    The ``step`` of a scheduler, which counts, is not meant.

    Raises:
        ConfigError: there is one.
    """
    kind = type(optimizer)
    pytorchs = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    for name, method in vars(optimizer).items():
        if name in _UNCALLED or not isinstance(getattr(pytorchs, name, None), FunctionType):
            continue  # methods of the user's own classes are called on copies, too, where a difference shows
        while getattr(method, "_wrapped_by_lr_sched", False) and hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if getattr(method, "__func__", method) is not getattr(kind, name):
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' expects the {name} of the class {kind.__name__}; got "
                f"another one, {method!r}, set on the instance, which would be called once per subgroup of parameters. "
                f"Set it on what offload_optimizer() returns, put it into a subclass or a step hook, or use {_KEEP}"
            )


def refuse_own_parameters(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds its parameters outside of ``param_groups`` as well: it may loop over these.

    What it holds in dictionaries by parameter is a state like others.

    Raises:
        ConfigError: it does.
    """
    addresses = {address_of(p) for group in optimizer.param_groups for p in group["params"]} - {0}
    for place, value in _held(optimizer):
        if isinstance(value, torch.Tensor) and address_of(value) in addresses:
            raise ConfigError(
                f"OffloadPolicy.optimizer_states='offload' expects an optimizer that finds its parameters in "
                f"param_groups; got {type(optimizer).__name__}, which holds one in {place}, too, and would not see "
                f"that a call is for some of them. Use {_KEEP}"
            )


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
        if have_elements_in_common(parameters):
            raise ConfigError(
                "OffloadPolicy.optimizer_states='offload' expects parameters with memory of their own; got two that "
                "share memory, which a plain step updates at the same time. Nothing was updated: let modules share "
                f"one parameter, or use {_KEEP}"
            )
        self._known = memory


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What is within reach of an optimizer's attributes and options, and where."""
    seen = {id(optimizer)}
    for name, value in vars(optimizer).items():
        # Hooks run once per step, whatever they hold.
        if name not in ("state", "param_groups", "step") and not name.startswith("_optimizer_"):
            yield from _within(value, name, 0, seen)
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield from _within(value, f"param_groups[{number}][{key!r}]", 0, seen)


def _within(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or value is None or isinstance(value, bool | int | float | str | bytes | type):
        return
    seen.add(id(value))
    yield place, value
    if depth >= _MAX_DEPTH or isinstance(value, torch.Tensor | nn.Module) or _is_optimizer(value):
        return
    items: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Mapping) and len(value) <= _MAX_ITEMS:
        items = ((f"{place}[{key!r}]" if isinstance(key, str | int) else place, item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset) and len(value) <= _MAX_ITEMS:
        items = ((f"{place}[{number}]", item) for number, item in enumerate(value))
    elif callable(value):
        cells = [cell for cell in getattr(value, "__closure__", None) or () if _is_filled(cell)]
        items = iter([(place, getattr(value, "__self__", None)), *((place, cell.cell_contents) for cell in cells)])
    elif hasattr(value, "__dict__"):
        items = ((f"{place}.{name}", item) for name, item in vars(value).items())
    for inner_place, item in items:
        yield from _within(item, inner_place, depth + 1, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, Optimizer):
        return True
    is_object = not isinstance(value, type | torch.Tensor | nn.Module | Mapping)
    return is_object and hasattr(value, "param_groups") and callable(getattr(value, "step", None))
