"""One process of ``recipes.benchmarks.parameters``: trains a GPT in one mode, some steps at a time.

``recipes.benchmarks.harness.process`` says how it is told what to do. Between steps nothing looks at weights or
gradients, which would bring them into memory and write others out unseen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_ssd
from lightning_ssd.memory.readings import read_memory, reset_host_peak
from lightning_ssd.parameters.units import owners, shared_weights
from recipes.benchmarks.harness.gpt import GPT
from recipes.benchmarks.harness.modes import Account
from recipes.benchmarks.harness.process import answer_parent
from recipes.determinism import settle_first_calls
from recipes.lora import LoRALayer
from recipes.meter import weights_digest

__all__ = ["MODES", "ParametersJob", "Sizes"]

MODES = {
    "keep": {},
    "keep_again": {},
    "states": {"optimizer_states": "offload"},
    "away": dict.fromkeys(("parameters", "gradients", "optimizer_states"), "offload"),
    "frozen_away": {"parameters": "offload"},
}
"""What of the policy is not the default. Saved activations are kept in all."""
_SECTOR_BYTES = 512
_NUM_SLOTS = 4
"""Subgroups of states in memory at a time, as documented."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int = 4096

    def model(self, *, lora: bool) -> nn.Module:
        """The same weights in every process."""
        settle_first_calls()
        torch.manual_seed(0)
        sizes = asdict(self)
        del sizes["batch"]
        model = GPT(**sizes)
        if lora:
            model.requires_grad_(False)
            for block in model.transformer.h:
                for name, layer in list(block.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(block, name, LoRALayer(layer, rank=8, scale=2.0))
        return model


@dataclass(frozen=True)
class ParametersJob:
    """What one process does."""

    mode: str
    sizes: Sizes
    lora: bool
    directory: str
    threads: int


def moved_now(directory: str) -> dict[str, int]:
    """Bytes that went from and to drives so far.

    By the kernel's account of this process (``/proc/self/io``: a write is counted when a page of the page cache is
    changed, which may be the inode's page, if reading a file changes its access time), and by that of the whole drive,
    whoever moved them.
    """
    process = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    device = Path(directory).stat().st_dev
    stat = Path(f"/sys/dev/block/{device >> 8}:{device & 0xFF}/stat")
    drive = stat.read_text().split() if stat.exists() else ["0"] * 7
    return {
        "process_read_bytes": int(process["read_bytes"]),
        "process_written_bytes": int(process["write_bytes"]),
        "drive_read_bytes": int(drive[2]) * _SECTOR_BYTES,
        "drive_written_bytes": int(drive[6]) * _SECTOR_BYTES,
    }


def faults_now() -> dict[str, float]:
    """Page faults that a drive served, and the kernel's time for this process, so far."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {"major_faults": int(fields[9]), "system_s": int(fields[12]) / 100}


class Trainer:
    """Model, optimizer and mode; one method per command."""

    def __init__(self, job: ParametersJob, offloader: lightning_ssd.Offloader | None) -> None:
        self._job, self._offloader = job, offloader
        self._empty_bytes = read_memory().host_bytes
        with nullcontext() if offloader is None else offloader.streamed_init():
            self._model = job.sizes.model(lora=job.lora)
        if offloader is not None:
            offloader.register_module(self._model)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-4)
        if MODES[job.mode].get("optimizer_states") == "offload" and offloader is not None:
            self._optimizer = offloader.offload_optimizer(self._optimizer)
        self._num_steps = 0

    def description(self) -> dict[str, Any]:
        """How much there is of what. Of the same model in each mode."""
        weights = list(self._model.parameters())
        units: dict[int, int] = {}
        found = shared_weights(self._model, 1 << 20)
        places = owners(self._model, found)
        for weight in found:
            owner = places[weight.names[0]][1]
            units[id(owner)] = units.get(id(owner), 0) + weight.storage.nbytes()
        return {
            "parameter_bytes": sum(p.nbytes for p in weights),
            "trained_bytes": sum(p.nbytes for p in weights if p.requires_grad),
            "small_bytes": sum(p.nbytes for p in weights if p.nbytes < 1 << 20),
            "largest_unit_bytes": max(units.values(), default=0),
            "empty_bytes": self._empty_bytes,
        }

    def _tokens(self) -> torch.Tensor:
        sizes = self._job.sizes
        generator = torch.Generator().manual_seed(self._num_steps)
        return torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.sequence), generator=generator)

    def step(self) -> dict[str, Any]:
        """One training step: time, its parts, the peak, what was moved, and the bits of the loss."""
        tokens, offloader = self._tokens(), self._offloader
        self._num_steps += 1
        if offloader is not None:
            offloader.reset_peaks()
        reset_host_peak()
        before = moved_now(self._job.directory) | faults_now() | self._counters()
        times = [time.perf_counter()]
        with nullcontext() if offloader is None else offloader.saved_tensors():
            loss = self._model(input_ids=tokens, labels=tokens).loss
        times.append(time.perf_counter())
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        times.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        times.append(time.perf_counter())
        after = moved_now(self._job.directory) | faults_now() | self._counters()
        return {
            "forward_s": times[1] - times[0],
            "backward_s": times[2] - times[1],
            "update_s": times[3] - times[2],
            "step_s": times[3] - times[0],
            "peak_bytes": read_memory().host_peak_bytes,
            "loss": float(loss.detach()).hex(),
        } | {name: value - before[name] for name, value in after.items()}

    def _counters(self) -> dict[str, float]:
        return {"stall_s": 0.0 if self._offloader is None else self._offloader.stats.stall_s}

    def rest(self) -> dict[str, Any]:
        """Sizes that are known once it has stepped."""
        stats = () if self._offloader is None else self._offloader.optimizer_stats
        slots = sum(min(_NUM_SLOTS, s.num_subgroups) * s.subgroup_bytes for s in stats)
        return {"slots_bytes": slots}

    def account(self) -> dict[str, Any]:
        """What plain PyTorch saves for backward at its worst moment. No step of the optimizer."""
        account = Account(self._model)
        tokens = self._tokens()
        with account.hooks():
            loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.zero_grad()
        return {"activation_bytes": account.peak_bytes}

    def digest(self) -> dict[str, Any]:
        """Of all weights, at the end."""
        return {"weights": weights_digest(self._model)}


@contextmanager
def open_trainer(job: ParametersJob) -> Iterator[Trainer]:
    """Everything that a job needs; opened and closed in this process."""
    torch.set_num_threads(job.threads)
    if job.mode in ("keep", "keep_again"):
        yield Trainer(job, None)
        return
    policy = lightning_ssd.OffloadPolicy(**{"activations": "keep", **MODES[job.mode]})
    hardware = lightning_ssd.HardwareProfile(paths=[job.directory])
    with lightning_ssd.Offloader(policy=policy, hardware=hardware, device="cpu") as offloader:
        yield Trainer(job, offloader)


if __name__ == "__main__":
    sys.exit(answer_parent(ParametersJob, open_trainer))
