"""One process of ``recipes.benchmarks.step``: trains in one mode, a step at a time, when its parent says so.

``recipes.benchmarks.harness.process`` says how it is told what to do.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import read_memory, reset_device_peak, reset_host_peak
from recipes.benchmarks.harness.modes import Account, Mode, Settings, open_mode
from recipes.benchmarks.harness.process import answer_parent
from recipes.benchmarks.harness.shapes import Shape
from recipes.determinism import make_deterministic


@dataclass(frozen=True)
class Job:
    """What one process does."""

    mode: str
    shape: Shape
    directory: str
    threads: int
    settings: Settings = field(default_factory=Settings)


_SUMMED_WORDS = 16 << 20
"""At a time."""
_FACTOR = 0x9E3779B1


def fingerprint(tensors: list[Tensor]) -> str:
    """One hash over the bytes of all tensors, in order."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        told = tensor.detach() if tensor.device.type == "cpu" else checksums(tensor).cpu()
        digest.update(told.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def checksums(tensor: Tensor) -> Tensor:
    """Of a tensor's words, summed where it is: to copy a gigabyte to the host takes longer than a step on a card.

    A word counts by an odd factor of its place, modulo 2 ** 64, so that the order of additions does not matter and no
    change of a single word is lost.
    """
    whole = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = whole.view(torch.int32) if whole.numel() % 4 == 0 else whole
    factors = torch.arange(min(len(words), _SUMMED_WORDS), device=words.device) * _FACTOR * 2 + 1
    return torch.stack([(part * factors[: len(part)]).sum() for part in words.split(_SUMMED_WORDS)])


class Trainer:
    """Model, optimizer and mode; one method per command."""

    def __init__(self, job: Job, model: nn.Module, mode: Mode, *, determinism: str = "") -> None:
        self._job, self._model, self._mode = job, model, mode
        self._determinism = determinism
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self._num_steps = 0

    def description(self) -> dict[str, Any]:
        """What the mode says about itself, and how far its bits can be compared."""
        return self._mode.description() | ({"determinism": self._determinism} if self._determinism else {})

    def step(self) -> dict[str, Any]:
        """One training step: times, faults, peaks, what was moved, and hashes of what came out."""
        tokens = self._job.shape.tokens(self._num_steps)
        self._num_steps += 1
        self._mode.begin_step()
        reset_host_peak()
        reset_device_peak(self._job.shape.device)
        before = resource.getrusage(resource.RUSAGE_SELF)
        times = [self._now()]
        with self._mode.forward(), self._job.shape.precision():
            loss = self._model(input_ids=tokens, labels=tokens).loss
        times.append(self._now())
        loss.backward()
        self._mode.end_backward()
        times.append(self._now())
        self._optimizer.step()
        times.append(self._now())
        after = resource.getrusage(resource.RUSAGE_SELF)
        memory = read_memory(self._job.shape.device)
        parameters = list(self._model.parameters())
        result = {
            "forward_s": times[1] - times[0],
            "backward_s": times[2] - times[1],
            "optimizer_s": times[3] - times[2],
            "step_s": times[3] - times[0],
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "page_faults": after.ru_minflt - before.ru_minflt,
            "host_peak_bytes": memory.host_peak_bytes,
            "device_peak_bytes": memory.device_peak_bytes,
            "loss": fingerprint([loss]),
            "loss_value": float(loss.detach()),
            "gradients": fingerprint([p.grad for p in parameters if p.grad is not None]),
            "weights": fingerprint(parameters),
        } | self._mode.counters()
        self._optimizer.zero_grad()
        return result

    def rest(self) -> dict[str, Any]:
        """The resident size between steps: what is in use, without what malloc holds back."""
        trim()
        memory = read_memory(self._job.shape.device)
        return {"host_bytes": memory.host_bytes, "device_bytes": memory.device_bytes}

    def release(self) -> dict[str, Any]:
        """Let the next process have the device's memory."""
        if self._job.shape.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def account(self) -> dict[str, Any]:
        """What plain PyTorch holds at its worst moment. Makes no optimizer step, so that the run goes on as it was."""
        account = Account(self._model)
        tokens = self._job.shape.tokens(0)
        with account.hooks(), self._job.shape.precision():
            loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.zero_grad()
        return {"held_bytes": account.peak_bytes, "num_parameters": sum(p.numel() for p in self._model.parameters())}

    def _now(self) -> float:
        if self._job.shape.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def open_trainer(job: Job) -> Iterator[Trainer]:
    """Everything that a job needs; opened and closed in this process."""
    torch.set_num_threads(job.threads)
    model = job.shape.model()
    determinism = ""
    if job.settings.deterministic:
        determinism = make_deterministic(job.shape.device, lambda: _try(job.shape, model))
    with open_mode(job.mode, model, Path(job.directory), job.settings) as mode:
        yield Trainer(job, model, mode, determinism=determinism)


def _try(shape: Shape, model: nn.Module) -> None:
    """Every operation of a step but the optimizer's, on a batch of one; before the mode opens, so alike in all."""
    tokens = replace(shape, batch=1).tokens(0)
    try:
        with shape.precision():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    finally:
        model.zero_grad()
        if shape.device == "cuda":
            torch.cuda.empty_cache()  # the other processes are about to need it


if __name__ == "__main__":
    sys.exit(answer_parent(Job, open_trainer))
