"""Accept the optimizers that may update some of their parameters at a time: known and declared ones. Refuse others."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType, MemberDescriptorType
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.dtensor import address_of
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.aliases import Span, are_apart, is_held
from lightning_ssd.optimizer.step.stepper import without_hooks

__all__ = [
    "elementwise_kind",
    "is_known",
    "refuse_by_kind",
    "refuse_differentiable",
    "refuse_own_step",
    "refuse_shared_memory",
    "refuse_undeclared",
]

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
    optim.Muon,
)
"""Update every parameter by itself."""
_COUPLING = ("LBFGS", "Prodigy", "DAdapt", "DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdaGrad", "SAM", "KFAC")
"""Classes whose update of one parameter depends on others, or that evaluate the model themselves."""
_UNCALLED = ("zero_grad", "add_param_group", "state_dict", "load_state_dict", "_abc_impl")
"""Methods that a subclass of PyTorch's optimizers may override, besides special ones, because no step calls them."""
_KEEP = "OffloadPolicy.optimizer_states='keep'"
_OFFLOAD = "OffloadPolicy.optimizer_states='offload'"


def elementwise_kind(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return PyTorch's class whose code the optimizer runs, if that is known to update each element by itself."""
    return _unchanged_base(type(optimizer), _ELEMENTWISE)


def is_known(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is known to update each parameter by itself."""
    return _unchanged_base(type(optimizer), (*_ELEMENTWISE, *_BY_PARAMETER)) is not None


def _unchanged_base(kind: type[Optimizer], known_kinds: Collection[type[Optimizer]]) -> type[Optimizer] | None:
    """Return the known class that a class is or inherits from, if its steps run that class's code alone.

    ``None``: there is none, or other code has overridden or replaced a method of it.
    """
    known: Any = next((base for base in kind.__mro__ if any(base is known for known in known_kinds)), None)
    if known is None:
        return None
    methods = [without_hooks(method) for base in known.__mro__ for method in vars(base).values()]
    # The last two define the wrappers of deprecated methods. Other code has replaced what is elsewhere.
    places = ("torch.", "typing_extensions", "warnings")
    modules = [method.__globals__["__name__"] for method in methods if isinstance(method, FunctionType)]
    if not all(module.startswith(places) for module in modules):
        return None
    own = {name for base in kind.__mro__ if base not in known.__mro__ for name in vars(base)} - {*_UNCALLED}
    called = [name for name in own if hasattr(known, name) and not name.startswith("__")]
    is_run = not own & {"param_groups", "state", "__getattribute__", "__getattr__", "__setattr__"} and all(
        without_hooks(getattr(kind, name)) is without_hooks(getattr(known, name)) for name in called
    )
    return known if is_run else None


def refuse_undeclared(optimizer: Optimizer, declared: Collection[str]) -> None:
    """Refuse a class that is neither known nor declared, and a declared one that keeps its own list of parameters."""
    kind, name = type(optimizer), type(optimizer).__name__
    if is_known(optimizer):
        return
    if name not in declared and f"{kind.__module__}.{kind.__qualname__}" not in declared:
        known = ", ".join(known.__name__ for known in (*_ELEMENTWISE, *_BY_PARAMETER))
        raise ConfigError(
            f"{_OFFLOAD} updates some parameters at a time. That is known to be exact for {known} of torch.optim; got "
            f"{kind.__module__}.{kind.__qualname__}. If its step updates each parameter by that parameter, its "
            "gradient, its state and its group's options alone, declare it: "
            f"OffloadPolicy(optimizer_states='offload', per_parameter_optimizers=[{name!r}]). Else use {_KEEP}"
        )
    elsewhere = [n for base in kind.__mro__ for n, v in vars(base).items() if isinstance(v, MemberDescriptorType)]
    elsewhere += {"param_groups", "state"} - vars(optimizer).keys()
    if elsewhere:
        raise ConfigError(
            f"{_OFFLOAD} expects an optimizer whose groups, states and counters are plain attributes, which a call for "
            f"some of its parameters can replace; got {name}, which has {elsewhere[0]!r} in __slots__ or in a "
            f"property. Make it a plain attribute, or use {_KEEP}"
        )
    addresses = {address_of(p) for group in optimizer.param_groups for p in group["params"]} - {0}
    for place, leaf in _held(optimizer):
        if isinstance(leaf, torch.Tensor) and address_of(leaf) in addresses:
            raise ConfigError(
                f"{_OFFLOAD} expects an optimizer that finds its parameters in param_groups; got {name}, which holds "
                f"one in {place}, too, and would not see that a call is for some of them. Use {_KEEP}"
            )


def refuse_by_kind(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose class or attributes show that its step is more than an update of each parameter.

    Raises:
        ConfigError: the optimizer couples its parameters, swaps weights, owns another optimizer, has a step of its own
            or one that takes a scaler, or something else holds its ``state``.
    """
    kind, name = type(optimizer), type(optimizer).__name__
    if any(base.__name__ in _COUPLING for base in kind.__mro__):
        raise ConfigError(
            f"{_OFFLOAD} got {name}, whose update of one parameter depends on the others. Use an optimizer that "
            f"updates each parameter by itself (Adam, AdamW, SGD, RMSprop, ...), or {_KEEP}"
        )
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        raise ConfigError(
            f"{_OFFLOAD} got {name}, whose train() and eval() exchange all weights by its states at once, as "
            f"schedule-free optimizers do. Use {_KEEP}"
        )
    for place, value in _held(optimizer):
        # A scheduler may refer to what an earlier offload_optimizer() returned.
        if owned := [found for found in _optimizers_in(value) if getattr(found, "inner", found) is not optimizer]:
            raise ConfigError(
                f"{_OFFLOAD} expects an optimizer that updates its parameters itself; got {name}, which owns another "
                f"one, {type(owned[0]).__name__}, in {place}. Offload that one and wrap what offload_optimizer() "
                f"returns, or use {_KEEP}"
            )
    refuse_own_step(optimizer)
    if "grad_scaler" in inspect.signature(kind.step).parameters:
        raise ConfigError(
            f"{_OFFLOAD} got {name}, whose step takes a grad_scaler, and would get none here, so that gradients stayed "
            f"scaled. Take that argument out: the scaler unscales them then. Or use {_KEEP}"
        )
    if "state" in vars(optimizer) and is_held(vars(optimizer), "state"):
        gc.collect()  # reference cycles keep the Trainer of an earlier run alive
        if is_held(vars(optimizer), "state"):
            raise ConfigError(
                f"{_OFFLOAD} expects nothing else to hold the `state` of {name}; got one that something (a wrapper, a "
                "variable, the Trainer of an earlier run) holds, which would not see it change. Let it look at the "
                f"`state` of what offload_optimizer() returns, let go of it, or use {_KEEP}"
            )


def refuse_own_step(optimizer: Optimizer) -> None:
    """Refuse an instance on which ``step``, or a method of PyTorch's that ``step`` calls, was replaced.

    Schedulers wrap ``step`` to count its calls. Their wrapper is accepted.
    """
    kind = type(optimizer)
    pytorchs = next(base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    for name, method in vars(optimizer).items():
        if name in _UNCALLED or not isinstance(getattr(pytorchs, name, None), FunctionType):
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
    """Refuse differentiable steps, because offloaded states belong to no graph."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ConfigError(
                f"{_OFFLOAD} expects differentiable=False; got {type(optimizer).__name__} with differentiable=True in "
                f"param_groups[{number}], whose states belong to autograd's graph, which cannot wait on a drive. Use "
                f"{_KEEP}"
            )


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the values that an optimizer holds besides its parameters and states, after the names of their places."""
    for place, value in vars(optimizer).items():
        if place not in ("state", "param_groups", "step") and not place.startswith("_optimizer_"):
            yield from ((place, leaf) for leaf in tree_leaves(value))
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        yield from (("param_groups", leaf) for leaf in tree_leaves(options))


def _optimizers_in(value: Any) -> Iterator[Any]:
    """Yield the optimizers in a value: itself, those in containers, and those that an object in it refers to."""
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


def refuse_shared_memory(memory: Sequence[Sequence[Span]]) -> None:
    """Refuse parameters that share memory, because separate calls would update them at different times."""
    if not are_apart(memory):
        raise ConfigError(
            f"{_OFFLOAD} expects parameters with memory of their own; got two that lie within the same memory, which a "
            "plain step updates at the same time. Nothing was updated: let modules share one parameter, clone one of "
            f"them, or use {_KEEP}"
        )
