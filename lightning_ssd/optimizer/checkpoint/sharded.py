"""Read optimizer states from checkpoints of sharded models, parameter by parameter.

PyTorch's own way holds all states of a process at once, and takes a step with gradients of zero to learn their shapes.
It sends full states from one process to all others. Here each process reads its own shards, subgroup by subgroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lightning_ssd.common.dtensor import local_of, spec_of, wrap
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.step.types import State

__all__ = ["saved_in_directory", "saved_in_full"]

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of parameters' names that wrappers add, and that names in checkpoints do not have."""


class _LazyStates(Mapping[Any, State]):
    """The state of each parameter by its name or number, read on access.

    The last one is kept, because the caller reads the slices of a parameter one after the other.
    """

    def __init__(self, parameters: Mapping[Any, torch.Tensor], read: Callable[[Any, torch.Tensor], State]) -> None:
        self._parameters = parameters
        self._read = read
        self._last: tuple[Any, State] = None, {}

    def __getitem__(self, key: Any) -> State:
        if self._last[0] != key:
            self._last = key, self._read(key, self._parameters[key])
        return self._last[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def saved_in_directory(path: Path, number: int, module: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return a state dictionary for ``optimizer`` from a directory that all processes have written together.

    Args:
        path: the directory.
        number: the optimizer's number among all saved optimizers.
        module: the module whose parameters the optimizer has.
        optimizer: gives the order of the parameters.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    mine = {key: where[1:] for key, where in paths.items() if where[0] == f"optimizer_{number}"}
    groups = _read(reader, metadata, {key: where for key, where in mine.items() if where[0] == "param_groups"}, None)
    keys_of: dict[Any, dict[str, tuple[Any, ...]]] = {}
    for key, where in mine.items():
        if where[0] == "state":
            keys_of.setdefault(where[1], {})[key] = where[2:]
    if not groups:
        raise ConfigError(_missing(path, number))
    return _state_dict(
        groups["param_groups"],
        _names(module),
        lambda name, parameter: _read(reader, metadata, keys_of.get(name, {}), parameter),
        optimizer,
    )


def saved_in_full(
    checkpoint: Mapping[str, Any], path: Path, number: int, module: torch.nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Return a state dictionary for ``optimizer`` from a checkpoint with full tensors; each process takes its part.

    Args:
        checkpoint: result of ``torch.load``; with ``mmap=True`` its tensors cost no memory.
        path: the file of the checkpoint, for errors.
        number: the optimizer's number among all saved optimizers.
        module: the module whose parameters the optimizer has.
        optimizer: gives the order of the parameters.
    """
    states = checkpoint.get("optimizer_states", ())
    if len(states) <= number:
        raise ConfigError(_missing(path, number))
    saved: Mapping[Any, State] = states[number]["state"]
    groups: list[dict[str, Any]] = states[number]["param_groups"]
    parameters: dict[Any, torch.Tensor] = dict(_names(module))
    if all(isinstance(key, int) for group in groups for key in group["params"]):
        # The numbers that plain PyTorch gives them, in the order of the optimizer's groups.
        theirs, own = ([len(group["params"]) for group in found] for found in (groups, optimizer.param_groups))
        if theirs != own:
            raise ConfigError(
                f"{path} has an optimizer with groups of {theirs} parameters, and this optimizer has groups of {own}. "
                "Only the same groups can be loaded. Build the optimizer as it was when the checkpoint was saved"
            )
        keys = (key for group in groups for key in group["params"])
        parameters = dict(zip(keys, (p for group in optimizer.param_groups for p in group["params"]), strict=True))

    def read(key: Any, parameter: torch.Tensor) -> State:
        return {name: _part(value, parameter) for name, value in saved.get(key, {}).items()}

    return _state_dict(groups, parameters, read, optimizer)


def _state_dict(
    groups: list[dict[str, Any]],
    parameters: Mapping[Any, torch.Tensor],
    read: Callable[[Any, torch.Tensor], State],
    optimizer: Optimizer,
) -> dict[str, Any]:
    """Return a state dictionary with the optimizer's own groups, and the saved options of their parameters."""
    key_of = {id(parameter): key for key, parameter in parameters.items()}
    saved_group = {key: group for group in groups for key in group["params"]}
    result = []
    for own in optimizer.param_groups:
        keys = [key_of[id(parameter)] for parameter in own["params"]]
        missing = [str(key) for key in keys if key not in saved_group]
        if missing and saved_group:
            raise ConfigError(
                f"the checkpoint's optimizer does not know {', '.join(missing[:3])}{' ...' * (len(missing) > 3)}. Only "
                "the parameters that were saved can be loaded. Build the optimizer as it was when the checkpoint was "
                "saved"
            )
        saved = next((saved_group[key] for key in keys if key in saved_group), own)
        result.append({**saved, "params": keys})
    return {"state": _LazyStates(parameters, read), "param_groups": result}


def _names(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = parameter
    return found


def _read(
    reader: FileSystemReader,
    metadata: Metadata,
    keys: Mapping[str, tuple[Any, ...]],
    parameter: torch.Tensor | None,
) -> dict[Any, Any]:
    """Read some entries of a directory, nested as they were saved. Communicates with no other process."""
    if not keys:
        return {}
    values: dict[str, Any] = {}
    for key in keys:
        entry = metadata.state_dict_metadata[key]
        values[key] = None
        if isinstance(entry, TensorStorageMetadata):
            # If it is sharded as its parameter is, there is room for this process' part.
            is_like = parameter is not None and parameter.dim() > 0 and entry.size == parameter.shape
            like = parameter if is_like else None
            shape = entry.size if like is None else local_of(like).shape
            room = torch.empty(shape, dtype=entry.properties.dtype, device="cpu")
            values[key] = room if like is None else wrap(room, spec_of(like))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(values, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    nested: dict[Any, Any] = unflatten_state_dict(values, dict(keys))
    return nested


def _part(value: Any, parameter: torch.Tensor) -> Any:
    """Return this process' part of a full tensor that belongs to a parameter."""
    spec = spec_of(parameter)
    if spec is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    shape, offset = compute_local_shape_and_global_offset(value.shape, spec.mesh, spec.placements)
    here = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return wrap(value[here].contiguous(), spec)


def _missing(path: Path, number: int) -> str:
    return (
        f"the checkpoint {path} has no states of optimizer {number}. Resume from a checkpoint of a training with as "
        "many optimizers. To begin with its weights alone, load these into the module and call fit without ckpt_path"
    )
