"""How large the experiments of ``recipes.gpu`` are, by what a machine has. Pure arithmetic on estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Room", "io_bytes", "optimizer_layers", "step_arguments"]

MIB, GIB = 1 << 20, 1 << 30
_SHARE = 0.8
"""Of what is free."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What may be used, in bytes, and the drive's slower direction, in bytes per second."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    drive_per_s: float

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Room:
        """From ``recipes.gpu.facts``."""
        return cls(
            device_bytes=int(_SHARE * facts["device_free_bytes"]),
            host_bytes=int(_SHARE * facts["host_available_bytes"]),
            disk_bytes=int(_SHARE * facts["disk_free_bytes"]),
            drive_per_s=min(facts["write_per_s"], facts["read_per_s"]),
        )


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A GPT-2 in bfloat16 autocast."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    least_batch: int = 1

    @property
    def num_parameters(self) -> int:
        return self.width * (12 * self.layers * self.width + self.vocabulary + self.sequence)

    @property
    def sample_bytes(self) -> int:
        """What autograd saves per sample: by GPT-2 large, 4 GiB in its 36 blocks and half a GiB of logits."""
        return self.sequence * (91 * self.width * self.layers + 11 * self.vocabulary)

    def fits(self, batch: int, room: Room, num_modes: int, num_writing: int) -> bool:
        """Whether so many processes train it side by side, and none waits for its drive for too long."""
        saved = batch * self.sample_bytes
        # Between steps weights and two states stay; one process has gradients and its peak besides.
        device = num_modes * (12 * self.num_parameters + _CONTEXT_BYTES) + 4 * self.num_parameters + 1.5 * saved
        return (
            device <= room.device_bytes
            and num_modes * _PROCESS_BYTES <= room.host_bytes
            and num_writing * 1.25 * saved <= room.disk_bytes
            and saved <= _PASS_S * room.drive_per_s
        )


_CONTEXT_BYTES = 2 * GIB
"""Of a process on the device: CUDA, cuBLAS, fragments."""
_PROCESS_BYTES = 4 * GIB
"""Of a process on the host: PyTorch, CUDA, staging buffers, host tier."""
_PASS_S = 4.0
"""The drive may take so long for what a pass saves, in one direction."""
_MODELS = (
    _Model(layers=12, width=1280, heads=20, sequence=1024, vocabulary=50_304, least_batch=2),
    _Model(layers=12, width=768, heads=12, sequence=512, vocabulary=16_384),
    _Model(layers=6, width=512, heads=8, sequence=512, vocabulary=8_192),
)
_BATCHES = (32, 16, 8, 4, 2, 1)


def step_arguments(room: Room, *, num_modes: int, num_writing: int) -> list[str] | None:
    """Sizes for ``recipes.benchmarks.step``: the largest model, then batch, that fits; ``None``: none does."""
    for model in _MODELS:
        for batch in _BATCHES:
            if batch >= model.least_batch and model.fits(batch, room, num_modes, num_writing):
                names = ("layers", "width", "heads", "sequence", "vocabulary")
                sizes = {name: getattr(model, name) for name in names} | {"batch": batch}
                return [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return None


def io_bytes(room: Room, seconds: float, num_contenders: int) -> int:
    """What each contender of ``recipes.benchmarks.io --rounds 1`` moves at once: two rounds, then one to check."""
    timely = seconds * room.drive_per_s / (5 * num_contenders)
    most = min(timely, room.disk_bytes / num_contenders, room.host_bytes / 8, GIB)
    return max(64 * MIB, int(most) // (64 * MIB) * 64 * MIB)


def optimizer_layers(room: Room, seconds: float) -> int | None:
    """Layers of a GPT of width 1024 whose states move within the time; ``None``: not even two fit the drive.

    With float32 copies of the weights there are 12 bytes of states per parameter. They are moved some twelve times: two
    modes, three steps, both directions, checkpoints.
    """
    layer, rest = 12 * 1024 * 1024 * 12, 50_257 * 1024 * 12
    most = min(seconds * room.drive_per_s / 12, room.disk_bytes / 5, room.host_bytes / 6)
    if room.disk_bytes < 5 * (rest + 2 * layer):
        return None
    return max(2, min(24, int((most - rest) // layer)))
