"""Which model fits on which device, how, and what a step then costs: arithmetic on sizes and rates alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_ssd.planning.plan import Prediction, TierRates
from lightning_ssd.planning.update_memory import NUM_SLOTS, update_bytes

__all__ = ["NUM_STATES", "Choice", "Fit", "ModelSize", "UnitSize", "choose", "fit", "largest"]

_Choice = Literal["keep", "offload"]
NUM_STATES = 2
"""Number of AdamW's states per trained parameter, in the type of the weight, as ``torch.optim.AdamW`` makes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSize:
    """Weights that are brought in together: those of a block, or of a module outside of blocks."""

    weight_bytes: float
    trained_bytes: float
    """Bytes of weights that are trained; their gradients take as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The size of a model, as training sees it."""

    units: tuple[UnitSize, ...]
    staying: UnitSize
    """Weights that are too small to wait."""
    state_bytes: float
    """Bytes of all optimizer states."""
    num_backwards: int = 1
    """Per update."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return sum(unit.weight_bytes for unit in (*self.units, self.staying))

    @property
    def trained_bytes(self) -> float:
        """Bytes of weights that are trained, and of all gradients."""
        return sum(unit.trained_bytes for unit in (*self.units, self.staying))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Bytes in each place, without activations, and per step."""

    plain_bytes: float
    """On the device, if all of it stays there."""
    device_bytes: float
    """On the device, if what the settings name waits elsewhere."""
    waiting_bytes: float
    """In host memory or on drives."""
    read_bytes: float
    """Per step, of which nothing is in host memory."""
    written_bytes: float

    def io_s(self, drives: TierRates) -> float:
        """Return the seconds of a step that only moves, reads and writes one after the other."""
        return self.read_bytes / drives.read_bytes_per_s + self.written_bytes / drives.write_bytes_per_s


def fit(
    size: ModelSize,
    *,
    parameters: _Choice = "offload",
    gradients: _Choice = "offload",
    optimizer_states: _Choice = "offload",
    num_directories: int = 1,
) -> Fit:
    """Where the bytes of a training lie, and how many move.

    Args:
        size: what is trained.
        parameters: as in the policy: whether weights wait; trained ones only with their states.
        gradients: whether those of weights that are large enough wait.
        optimizer_states: whether they wait.
        num_directories: that they wait in.
    """
    do_states_wait, k = optimizer_states == "offload", size.num_backwards
    weights, trained = size.weight_bytes, size.trained_bytes
    trained_units = [unit.trained_bytes for unit in size.units]
    waiting_units = [
        (unit.weight_bytes if do_states_wait else unit.weight_bytes - unit.trained_bytes) * (parameters == "offload")
        for unit in size.units
    ]
    waiting = sum(waiting_units)
    waiting_trained = sum(trained_units) if waiting and do_states_wait else 0
    waiting_gradients = sum(trained_units) if gradients == "offload" else 0
    moved_states = size.state_bytes if do_states_wait else 0
    updated_states = update_bytes(int(moved_states), num_directories)
    in_update: float = updated_states
    if waiting_trained:  # the units of the subgroups that are in memory, of which one may have several
        in_update += max(_largest(trained_units, NUM_SLOTS), updated_states / moved_states * waiting_trained)
    here_gradients = trained - waiting_gradients + (_largest(trained_units, 2) if waiting_gradients else 0)
    return Fit(
        plain_bytes=weights + trained + size.state_bytes,
        device_bytes=max(_largest(waiting_units, 2), in_update)
        + (weights - waiting)
        + here_gradients
        + (size.state_bytes - moved_states),
        waiting_bytes=waiting + waiting_gradients + moved_states,
        read_bytes=2 * k * waiting + waiting_trained + k * waiting_gradients + moved_states,
        written_bytes=k * waiting_gradients + waiting_trained + moved_states,
    )


def _largest(sizes: Iterable[float], count: int) -> float:
    """Return the bytes of the ``count`` largest units, which are in memory at a time."""
    return sum(sorted(sizes)[-count:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A way to treat activations together with one to treat weights, gradients and states."""

    mode: str
    waits: str
    fits: bool
    held_bytes: float
    """On the device, without temporaries."""
    step_s: float
    """Moving the model and computing one after the other."""
    written_bytes: float
    """To drives, per step."""
    limit: Literal["the drive", "compute"]
    """The part that takes most of the step."""


def choose(
    modes: Mapping[str, Prediction], waits: Mapping[str, Fit], *, room_bytes: float, drives: TierRates
) -> Choice:
    """Return the fastest choice that fits; where none does, the one that holds least.

    Args:
        modes: of activations.
        waits: parts of the model that are offloaded.
        room_bytes: of the device.
        drives: of one process.
    """

    def combine(mode: str, part: str) -> Choice:
        pass_, model = modes[mode], waits[part]
        moving_s = model.io_s(drives)
        held_bytes, step_s = pass_.peak_bytes + model.device_bytes, pass_.step_s + moving_s
        return Choice(
            mode=mode,
            waits=part,
            fits=held_bytes <= room_bytes,
            held_bytes=held_bytes,
            step_s=step_s,
            written_bytes=pass_.written_bytes + model.written_bytes,
            limit="the drive" if moving_s + pass_.stall_s > step_s / 2 else "compute",
        )

    choices = [combine(mode, part) for mode in modes for part in waits]
    fitting = [choice for choice in choices if choice.fits]
    if fitting:
        return min(fitting, key=lambda choice: choice.step_s)
    return min(choices, key=lambda choice: choice.held_bytes)


def largest(fits: Callable[[int], bool], start: int) -> int:
    """Return the largest number that fits, exactly up to 16 and else to within 6 %; 0: not even 1 does.

    Args:
        fits: true up to some number.
        start: where the search begins.
    """
    low, high, number = 0, 0, start
    while not high or high - low > max(1, low // 16):
        if fits(number):
            low = number
        else:
            high = number
        number = (low + high) // 2 if high else 2 * low
    return low
