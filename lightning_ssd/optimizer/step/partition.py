"""Which parameter's states are in which subgroup."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_ssd.common.dtensor import as_piece, even_numel, is_shard, local_of, spec_of, wrap
from lightning_ssd.common.tensors import give_gradient
from lightning_ssd.optimizer.step.layout import Field, Layout, is_bare
from lightning_ssd.optimizer.step.subgroups import ParameterSize, Part, make_subgroups
from lightning_ssd.optimizer.step.types import State

__all__ = ["Contents", "Partition", "Subgroup", "may_cut", "shared"]


class Contents(NamedTuple):
    """What a subgroup's memory means. Changes as a whole, together with the memory."""

    layout: Layout | None
    """Of what moves; ``None``: nothing does."""
    templates: list[State]
    """Of each part: its state, in which what moves is marked."""


@dataclass(slots=True)
class Subgroup:
    """States that move together."""

    parts: tuple[Part, ...]
    expected_bytes: int = 0
    """What its states will take on a drive, as far as a trial tells."""
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(None, [{} for _ in self.parts])

    @property
    def layout(self) -> Layout | None:
        """Of what moves; ``None``: nothing does."""
        return self.contents.layout

    @property
    def templates(self) -> Sequence[State]:
        """Of each part: its state, in which what moves is marked."""
        return self.contents.templates

    def forget(self, number: int) -> None:
        """A part has no state any more. What its memory holds means nothing."""
        layout, templates = self.contents
        left = Contents(None if layout is None else layout.without(number), templates)
        # No call in between: interrupted, a template would name what no layout has.
        self.contents = left
        templates[number] = {}

    def forget_layout(self) -> None:
        """Nothing of it has memory any more."""
        self.contents = Contents(None, self.contents.templates)

    def field(self, number: int, key: Hashable) -> Field:
        """Where a moved tensor is."""
        fields = () if self.layout is None else self.layout.fields
        return next(field for field in fields if field.part == number and field.key == key)


class Partition:
    """Parameters, their parts, and the subgroups. Grows; what is known stays where it is.

    Args:
        max_bytes: of a subgroup's states, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.parameters: list[torch.Tensor] = []
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Shape and stride of each; of a DTensor those of this process' part."""
        self.places: list[list[tuple[int, int]]] = []
        """Of each parameter: subgroup and number of the part in it, in the order of the elements."""
        self.subgroups: list[Subgroup] = []
        self._numbers: dict[int, int] = {}

    def number_of(self, key: object) -> int | None:
        """By which number a parameter goes; ``None`` if no such parameter is known."""
        return self._numbers.get(id(key))

    def places_of(self, key: object) -> Sequence[tuple[int, int]]:
        """Return the places of a parameter; none if no such parameter is known."""
        number = self.number_of(key)
        return () if number is None else self.places[number]

    def extend(
        self,
        parameters: Sequence[torch.Tensor],
        element_bytes: Callable[[torch.Tensor], int],
        is_sliceable: Callable[[torch.Tensor], bool],
        make_room: Callable[[int], None] = lambda num: None,
    ) -> None:
        """Take in more parameters: all, or where this is interrupted, none.

        Args:
            parameters: not known yet.
            element_bytes: of each, the bytes of states per element.
            is_sliceable: of each, whether slices of it may be updated.
            make_room: is told, before, how many subgroups that makes.
        """
        first = len(self.parameters)
        expected = [element_bytes(parameter) for parameter in parameters]
        sizes = []
        for parameter, nbytes in zip(parameters, expected, strict=True):
            size = max(nbytes, parameter.dtype.itemsize)
            # Of what is not cut the same in all processes: then all visit the same parameters in the same order, and an
            # optimizer may talk to the others when it updates one of them.
            num_elements = even_numel(parameter)
            # What fits is not cut, and needs no trial.
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
        # No call in between: what is known but in no subgroup, because of an interrupt, would never be updated.
        self.subgroups, self.places, self.shapes, self.parameters = grown
        self._numbers = known

    def retire(self, number: int) -> None:
        """Let go of a parameter that has left the groups, and has no state. Its parts stay, and are never visited."""
        key, nothing = id(self.parameters[number]), torch.empty(0, device="cpu")
        # No call in between: what comes back after an interrupt would be known twice, and updated twice.
        del self._numbers[key]
        self.parameters[number] = nothing
        for index, _ in self.places[number]:
            subgroup = self.subgroups[index]
            if all(id(self.parameters[part.parameter]) not in self._numbers for part in subgroup.parts):
                subgroup.expected_bytes = 0

    def is_whole(self, part: Part) -> bool:
        """Whether the part is all of its parameter."""
        return len(self.places[part.parameter]) == 1

    def slice_of(self, part: Part) -> torch.Tensor:
        """What the optimizer updates: the parameter itself, or its slice with the slice of its gradient."""
        parameter = self.parameters[part.parameter]
        if self.is_whole(part):
            return parameter
        gradient = parameter.grad
        piece = as_piece(local_of(parameter).detach().view(-1)[part.start : part.stop], parameter)
        if gradient is not None:
            give_gradient(piece, as_piece(local_of(gradient).detach().reshape(-1)[part.start : part.stop], parameter))
        return piece

    def align_gradients(self) -> None:
        """Spread gradients as their parameters are, which tensor parallelism leaves to whoever uses them.

        Here, and not slice by slice: processes talk to each other in it, and have to do so in the same order.
        """
        for parameter in self.parameters:
            gradient: Any = parameter.grad
            if gradient is not None and is_shard(gradient):
                placements = parameter.placements  # type: ignore[attr-defined]
                if gradient.placements != placements:
                    parameter.grad = gradient.redistribute(placements=placements)

    def check_cuttable(self, part: Part) -> None:
        """Before anything of a step is done.

        Raises:
            RuntimeError: the part is a slice, and its parameter or the gradient is of a kind that cannot be cut any
                more.
        """
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
        """The whole parameter's state of those of its parts."""
        parameter = self.parameters[number]
        shape, stride = self.shapes[number]
        parts = [self.subgroups[index].parts[part] for index, part in self.places[number]]
        result: State = {}
        for key, value in states[0].items():
            values = [state[key] for state in states]
            if not _is_slice(value, parts[0]):
                result[key] = _own(shared(values, key))
                continue
            flat = torch.cat([local_of(piece).flatten() for piece in values])
            # In place: a view would hold the memory a second time.
            result[key] = wrap(flat.set_(flat.untyped_storage(), 0, shape, stride), spec_of(parameter))
        return result

    def cut(self, part: Part, state: State) -> State:
        """A part's share of its parameter's state: a slice of what has the parameter's shape, copies of all else."""
        if self.is_whole(part):
            return dict(state)
        shape = self.shapes[part.parameter][0]
        return {key: _cut(value, shape, part) for key, value in state.items()}


def may_cut(state: State, parameter: torch.Tensor) -> bool:
    """Whether slices of a state are good for slices of its parameter, and can be joined again."""
    return all(_is_like(value, parameter) for value in state.values())


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        is_same_kind = is_shard(value) == is_shard(parameter) and value.is_floating_point()
        return is_bare(value) and (value.dim() == 0 or (value.shape == parameter.shape and is_same_kind))
    return isinstance(value, bool | int | float | type(None))


def _is_slice(value: Any, part: Part) -> bool:
    return isinstance(value, torch.Tensor) and tuple(local_of(value).shape) == (part.num_elements,)


def _cut(value: Any, shape: tuple[int, ...], part: Part) -> Any:
    if isinstance(value, torch.Tensor) and tuple(local_of(value).shape) == shape:
        return as_piece(local_of(value).detach().reshape(-1)[part.start : part.stop], value)
    return _own(value)


def _own(value: Any) -> Any:
    """Copy a number."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def shared(values: Sequence[Any], key: Hashable) -> Any:
    """What all slices of a parameter must agree on (a step count)."""
    first = values[0]
    for value in values[1:]:
        same = torch.equal(first, value) if isinstance(first, torch.Tensor) else first == value
        if not same:
            raise RuntimeError(f"slices of one parameter have different states {key!r}: {first!r} and {value!r}")
    return first
