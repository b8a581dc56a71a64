"""What a training run costs while it runs: step times, memory peaks, and a hash of what it has learnt."""

from __future__ import annotations

import statistics
import time

import torch
import xxhash
from torch import nn

from lightning_ssd.common.dtensor import is_shard
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import read_memory, reset_device_peak, reset_host_peak

__all__ = ["NUM_WARMUP", "StepMeter", "num_warmup", "weights_digest"]

NUM_WARMUP = 3
"""One step is profiled, its plan is made while the next one runs, and a third one follows it for the first time."""


def num_warmup(max_steps: int) -> int:
    """Steps that count for nothing: fewer in a run that has few; -1 is a run without end."""
    return NUM_WARMUP if max_steps < 0 else max(min(NUM_WARMUP, max_steps - 1), 0)


class StepMeter:
    """Times steps and finds the memory peak above the resting level.

    The first steps are a warm-up: they make the optimizer's states, warm allocators, and are profiled. The resting
    level is read after them, once free heap has been given back to the system. From there on the peak begins anew with
    each step, for every reader in the process.

    Args:
        device: whose peak counts; for the CPU that of the process.
        num_warmup: steps that count for nothing.
    """

    def __init__(self, device: torch.device | str = "cpu", *, num_warmup: int = NUM_WARMUP) -> None:
        self.device = torch.device(device)
        self.num_warmup = num_warmup
        self.step_s: list[float] = []
        self.peaks_bytes: list[int] = []
        """Of each step after the warm-up, above the resting level; 0 where the system does not tell."""
        self._started_s = 0.0
        self._rest_bytes = 0

    def start_step(self) -> None:
        """Before the forward of a step."""
        self._started_s = time.perf_counter()

    def end_step(self) -> None:
        """After the update of a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step_s.append(time.perf_counter() - self._started_s)
        if self.is_warm:
            trim()
            self._rest_bytes = self._read()[0]
        elif len(self.step_s) > self.num_warmup:
            self.peaks_bytes.append(max(0, self._read()[1] - self._rest_bytes))
        if len(self.step_s) >= self.num_warmup:
            reset_host_peak()
            reset_device_peak(self.device)

    @property
    def is_warm(self) -> bool:
        """Whether the last step of the warm-up has just ended."""
        return len(self.step_s) == self.num_warmup

    @property
    def median_step_s(self) -> float:
        """Median of all steps after the warm-up."""
        return statistics.median(self.step_s[self.num_warmup :] or self.step_s)

    @property
    def peak_above_rest_bytes(self) -> int:
        """Highest memory use since the warm-up, minus the resting level; 0 where the system does not tell."""
        return max(self.peaks_bytes, default=0)

    @property
    def typical_peak_above_rest_bytes(self) -> int:
        """The same in the median step."""
        return int(statistics.median(self.peaks_bytes or [0]))

    def _read(self) -> tuple[int, int]:
        now = read_memory(self.device)
        if self.device.type == "cuda":
            return now.device_bytes or 0, now.device_peak_bytes or 0
        return now.host_bytes or 0, now.host_peak_bytes or 0


def weights_digest(network: nn.Module) -> str:
    """Hash of the names, shapes, types and bytes of all parameters and buffers: equal means bitwise equal.

    Of a sharded network too, tensor by tensor; then every process has to call this, on the device of the shards.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in network.state_dict().items():
        tensor = tensor.full_tensor() if is_shard(tensor) else tensor
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
