"""Optimizer states of a sharded model as whole tensors, collected one after the other.

PyTorch's own way holds the full states of the whole model in the memory of one process. Here one tensor at a time is
whole, in each process for the moment that it takes, and the one that receives them puts each on its drive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_ssd.shards import is_shard, local_of, spec_of, wrap

__all__ = ["full_nbytes", "full_states"]

Put = Callable[[torch.Tensor], torch.Tensor]
States = Mapping[int, Mapping[Any, Any]]


def full_states(states: States, put: Put | None) -> dict[int, dict[Any, Any]]:
    """What the states of sharded parameters are as a whole. All processes call it, with states of the same names.

    Args:
        states: by number of the parameter; of its sharded tensors the part that this process has.
        put: where a whole tensor goes; ``None``: this process helps to collect, and receives nothing.

    Returns:
        The same with whole tensors in the place of sharded ones; nothing where ``put`` is ``None``.
    """
    found: dict[int, dict[Any, Any]] = {}
    for number in sorted(states):
        state = {key: _whole(value, put) for key, value in states[number].items()}
        if put is not None:
            found[number] = state
    return found


def full_nbytes(states: States) -> int:
    """Bytes of all sharded tensors together, as whole ones."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _sharded(states))


def _sharded(states: States) -> Iterator[torch.Tensor]:
    return (value for state in states.values() for value in state.values() if is_shard(value))


def _whole(value: Any, put: Put | None) -> Any:
    if not is_shard(value):
        return value
    spec = spec_of(value)
    # Parts are mapped from a file, into host memory; the processes meet on the mesh's device.
    tensor: Any = wrap(local_of(value).to(spec.mesh.device_type), spec)
    whole = tensor.full_tensor()
    return whole if put is None else put(whole)
