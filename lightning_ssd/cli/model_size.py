"""Sizes of a model's weights, by the units that are offloaded together, and of their states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_ssd.parameters.pager import Place
from lightning_ssd.parameters.units import SharedWeights, owners
from lightning_ssd.planning.what_fits import NUM_STATES, ModelSize, UnitSize

__all__ = ["model_size"]


def model_size(model: nn.Module, min_tensor_nbytes: int) -> ModelSize:
    """Return sizes in the units of training; the tensors may be fake. Weights that share memory count once."""
    found: dict[int, SharedWeights] = {}
    for name, parameter in model.named_parameters():
        storage = parameter.untyped_storage()
        weights = found.setdefault(storage._cdata, SharedWeights(storage))
        weights.names.append(name)
        weights.parameters.append(parameter)
    large = {w.names[0]: w for w in found.values() if w.storage.nbytes() >= min_tensor_nbytes}
    units: dict[Place, list[SharedWeights]] = {}
    for name, place in owners(model, large.values()).items():
        units.setdefault(place, []).append(large[name])
    return ModelSize(
        units=tuple(map(_unit_size, units.values())),
        staying=_unit_size([w for w in found.values() if w.storage.nbytes() < min_tensor_nbytes]),
        state_bytes=NUM_STATES * sum(w.trained_bytes for w in found.values()),
    )


def _unit_size(members: Sequence[SharedWeights]) -> UnitSize:
    return UnitSize(
        weight_bytes=sum(w.storage.nbytes() for w in members),
        trained_bytes=sum(min(w.trained_bytes, w.storage.nbytes()) for w in members),
    )
