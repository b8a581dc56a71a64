"""Assign the states of parameters, or of slices of them, to subgroups."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lightning_ssd.common.dtensor import as_piece, even_numel, is_shard, local_of, spec_of, wrap
from lightning_ssd.common.tensors import give_gradient
from lightning_ssd.optimizer.step.layout import Field, Layout, is_bare
from lightning_ssd.optimizer.step.subgroups import ParameterSize, Part, make_subgroups
from lightning_ssd.optimizer.step.types import State

__all__ = ["Contents", "Partition", "Subgroup", "may_cut", "shared"]


class Contents(NamedTuple):
    """The description of a subgroup's memory. It is replaced as a whole, together with the memory."""

    layout: Layout | None
    """Layout of the moved tensors; ``None``: there are none."""
    templates: list[State]
    """State of each part, with a mark in the place of each moved tensor."""


@dataclass(slots=True)
class Subgroup:
    """States that are moved together."""

    parts: tuple[Part, ...]
    expected_bytes: int = 0
    """Bytes that its states will take on a drive, as a trial predicts."""
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(None, [{} for _ in self.parts])

    @property
    def layout(self) -> Layout | None:
        return self.contents.layout

    @property
    def templates(self) -> Sequence[State]:
        return self.contents.templates

    def forget(self, number: int) -> None:
        """Drop the state of a part. Its bytes in the subgroup's memory are ignored from then on."""
        layout, templates = self.contents
        if layout is not None:  # the memory of the others does not change
            layout = replace(layout, fields=tuple(field for field in layout.fields if field.part != number))
        left = Contents(layout, templates)
        # No call in between: an interrupt would leave a mark in the template that no layout has.
        self.contents = left
        templates[number] = {}

    def forget_layout(self) -> None:
        """Drop the layout, because the subgroup has no memory any more."""
        self.contents = Contents(None, self.contents.templates)

    def field(self, number: int, key: Hashable) -> Field:
        fields = () if self.layout is None else self.layout.fields
        return next(field for field in fields if field.part == number and field.key == key)


class Partition:
    """Parameters, their parts, and the subgroups. It only grows: existing parts keep their subgroups."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.parameters: list[torch.Tensor] = []
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shape and stride of each parameter; for a DTensor those of its local part."""
        self.places: list[list[tuple[int, int]]] = []
        """Parts of each parameter, in the order of the elements: subgroup, and number of the part in it."""
        self.subgroups: list[Subgroup] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, key: object) -> int | None:
        """Return the number of a parameter; ``None`` if ``key`` is not in the partition."""
        return self._numbers.get(id(key))

    def places_of(self, key: object) -> Sequence[tuple[int, int]]:
        """Return the places of a parameter; empty if ``key`` is not in the partition."""
        number = self.number_of(key)
        return () if number is None else self.places[number]

    def extend(
        self,
        parameters: Sequence[torch.Tensor],
        element_bytes: Callable[[torch.Tensor], int],
        is_sliceable: Callable[[torch.Tensor], bool],
        make_room: Callable[[int], None] = lambda num: None,
    ) -> None:
        """Add parameters: all of them or, if it is interrupted, none.

        Args:
            parameters: parameters that are not in the partition yet.
            element_bytes: returns the bytes of states per element of a parameter.
            is_sliceable: returns whether slices of a parameter may be updated.
            make_room: called first, with the number of new subgroups.
        """
        first = len(self.parameters)
        expected = [element_bytes(parameter) for parameter in parameters]
        sizes = []
        for parameter, nbytes in zip(parameters, expected, strict=True):
            size = max(nbytes, parameter.dtype.itemsize)
            # An uncut parameter has the same size in all processes. So all visit the same parameters in the same order,
            # and an optimizer may communicate with the other processes in the update of one of them.
            num_elements = even_numel(parameter)
            # A parameter that fits is not cut, and needs no trial.
            is_cut = num_elements * size > self.max_bytes // 4 and is_sliceable(parameter)
            sizes.append(ParameterSize(local_of(parameter).numel() if is_cut else num_elements, size, is_cut))
        made = make_subgroups(sizes, self.max_bytes)
        numbers = {id(parameter): first + number for number, parameter in enumerate(parameters)}
        local = list(map(local_of, parameters))
        shapes = [(tuple(part.shape), part.stride()) for part in local]
        places: list[list[tuple[int, int]]] = [[] for _ in parameters]
        subgroups = []
        for index, parts in enumerate(made, len(self.subgroups)):
            for number, part in enumerate(parts):
                places[part.parameter].append((index, number))
            need = sum(part.num_elements * expected[part.parameter] for part in parts)
            moved = tuple(Part(part.parameter + first, part.start, part.stop) for part in parts)
            subgroups.append(Subgroup(moved, need))
        make_room(len(subgroups))
        grown = self.subgroups + subgroups, self.places + places, self.shapes + shapes, [*self.parameters, *parameters]
        known = self._numbers | numbers
        # No call in between: an interrupt would leave a known parameter without a subgroup, and never updated.
        self.subgroups, self.places, self.shapes, self.parameters = grown
        self._numbers = known

    def retire(self, number: int) -> None:
        """Drop a parameter that has left the groups, and has no state. Its parts stay, and are never visited."""
        key, nothing = id(self.parameters[number]), torch.empty(0, device="cpu")
        # No call in between: after an interrupt a parameter could be added twice, and updated twice.
        del self._numbers[key]
        self.parameters[number] = nothing
        for index, _ in self.places[number]:
            subgroup = self.subgroups[index]
            if all(id(self.parameters[part.parameter]) not in self._numbers for part in subgroup.parts):
                subgroup.expected_bytes = 0

    def is_whole(self, part: Part) -> bool:
        return len(self.places[part.parameter]) == 1

    def slice_of(self, part: Part) -> torch.Tensor:
        """Return the tensor that the optimizer updates: the parameter, or its slice with the slice of its gradient."""
        parameter = self.parameters[part.parameter]
        if self.is_whole(part):
            return parameter
        gradient = parameter.grad
        piece = as_piece(local_of(parameter).detach().view(-1)[part.start : part.stop], parameter)
        if gradient is not None:
            give_gradient(piece, as_piece(local_of(gradient).detach().reshape(-1)[part.start : part.stop], parameter))
        return piece

    def align_gradients(self) -> None:
        """Redistribute gradients to the placements of their parameters, which tensor parallelism does not do by itself.

        It is done for whole parameters, because the processes communicate, and have to do so in the same order.
        """
        for parameter in self.parameters:
            gradient: Any = parameter.grad
            if gradient is not None and is_shard(gradient):
                placements = parameter.placements  # type: ignore[attr-defined]
                if gradient.placements != placements:
                    parameter.grad = gradient.redistribute(placements=placements)

    def check_cuttable(self, part: Part) -> None:
        """Before a step, check that a parameter which is cut, and its gradient, can still be cut."""
        if self.is_whole(part):
            return
        parameter = self.parameters[part.parameter]
        gradient = parameter.grad
        local = local_of(parameter)
        if (tuple(local.shape), local.stride()) != self.shapes[part.parameter]:
            raise RuntimeError(
                f"a parameter of shape {self.shapes[part.parameter][0]} has become {tuple(local.shape)} with "
                f"stride {local.stride()}; its states are offloaded in slices. Make a new optimizer for it"
            )
        if gradient is not None and gradient.layout != torch.strided:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {gradient.layout}, but "
                "its optimizer states are offloaded in slices; use dense gradients, or optimizer_states='keep'"
            )

    def join(self, number: int, states: Sequence[State]) -> State:
        """Join the states of a parameter's parts to the state of the whole parameter."""
        parameter = self.parameters[number]
        shape, stride = self.shapes[number]
        parts = [self.subgroups[index].parts[part] for index, part in self.places[number]]
        result: State = {}
        for key, value in states[0].items():
            values = [state[key] for state in states]
            is_slice = isinstance(value, torch.Tensor) and tuple(local_of(value).shape) == (parts[0].num_elements,)
            if not is_slice:
                result[key] = _own(shared(values, key))
                continue
            flat = torch.cat([local_of(piece).flatten() for piece in values])
            # In place: a view would leave a second tensor over the memory, which would count as a holder.
            result[key] = wrap(flat.set_(flat.untyped_storage(), 0, shape, stride), spec_of(parameter))
        return result

    def cut(self, part: Part, state: State) -> State:
        """Return a part's share of its parameter's state: slices of tensors of the parameter's shape, else copies."""
        if self.is_whole(part):
            return dict(state)
        shape = self.shapes[part.parameter][0]
        return {
            key: as_piece(local_of(value).detach().reshape(-1)[part.start : part.stop], value)
            if isinstance(value, torch.Tensor) and tuple(local_of(value).shape) == shape
            else _own(value)
            for key, value in state.items()
        }


def may_cut(state: State, parameter: torch.Tensor) -> bool:
    """Return whether a state can be cut into states for slices of its parameter, and joined again."""
    return all(_is_like(value, parameter) for value in state.values())


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return isinstance(value, bool | int | float | type(None))
    if not is_bare(value):
        return False
    is_same_kind = is_shard(value) == is_shard(parameter) and value.is_floating_point()
    return value.dim() == 0 or (value.shape == parameter.shape and is_same_kind)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def shared(values: Sequence[Any], key: Hashable) -> Any:
    """Return a value that all slices of a parameter share, such as a step count."""
    first = values[0]
    for value in values[1:]:
        same = torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value
        if not same:
            raise RuntimeError(f"slices of one parameter have different states {key!r}: {first!r} and {value!r}")
    return first
