"""Make the state dictionary of an optimizer with offloaded states, by the optimizer's own ``state_dict``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_ssd.optimizer.step.aliases import tensors_in
from lightning_ssd.optimizer.step.stepper import SubgroupStepper, with_attributes
from lightning_ssd.optimizer.step.types import State

__all__ = ["saved_states"]

_PRE, _POST = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"


def saved_states(
    optimizer: Optimizer, inner_step: SubgroupStepper, snapshot: Callable[[], Mapping[Any, State]]
) -> dict[str, Any]:
    """Call the optimizer's own ``state_dict`` on a snapshot of its states, and return the result.

    Its hooks find the true states in ``optimizer.state``, and their edits there take effect.

    Args:
        optimizer: the user's optimizer.
        inner_step: lends the snapshot's states to the optimizer.
        snapshot: returns the states, which do not change while training goes on.

    Raises:
        RuntimeError: a hook has edited a tensor of the dictionary, which is a copy, so that training would not see it.
    """
    own = vars(optimizer)
    pre_hooks, post_hooks = own.get(_PRE), own.get(_POST)
    for hook in (pre_hooks or {}).values():
        hook(optimizer)
    states = snapshot()
    before = _fingerprint(states)
    without_hooks = {name: OrderedDict[int, Any]() for name in (_PRE, _POST) if name in own}
    saved: dict[str, Any] = with_attributes(
        optimizer, without_hooks, lambda: inner_step.lend(None, states, optimizer.state_dict)
    )
    for hook in (post_hooks or {}).values():
        changed = hook(optimizer, saved)
        saved = saved if changed is None else changed
    if _fingerprint(states) != before:
        raise RuntimeError(
            "a state_dict of an OffloadedOptimizer is a copy; its tensors or states were edited while it was made, "
            "which training would not see. Edit optimizer.state (in a hook before state_dict, say)"
        )
    return saved


def _fingerprint(states: Mapping[Any, Any]) -> list[Any]:
    return [
        (id(key), name, id(value), [(id(t), None if t.is_inference() else t._version) for t in tensors_in(value)])
        for key, state in states.items()
        for name, value in (state.items() if isinstance(state, Mapping) else [("", state)])
    ]
