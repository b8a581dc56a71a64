"""One process of ``recipes.benchmarks.rivals``: trains in one way, a step at a time, when its parent says so.

``recipes.benchmarks.harness.process`` says how it is told what to do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import read_memory, reset_host_peak
from recipes.benchmarks.harness.process import answer_parent
from recipes.benchmarks.harness.shapes import Shape
from recipes.benchmarks.workers.contenders import CONTENDERS, Contender

__all__ = ["RivalsJob"]


@dataclass(frozen=True)
class RivalsJob:
    """What one process does."""

    mode: str
    """Of :data:`~recipes.benchmarks.workers.contenders.CONTENDERS`; what follows a colon only tells rows apart."""
    shape: Shape
    directory: str
    threads: int
    adapters: bool = False
    """Whether adapters (LoRA) are trained and all else is frozen, instead of all weights."""


def build(job: RivalsJob) -> nn.Module:
    """The same weights in every process."""
    model = job.shape.model()
    if job.adapters:
        from recipes.lora import LoRA, add_adapters

        model.requires_grad_(requires_grad=False)
        add_adapters(model, LoRA())  # type: ignore[arg-type]  # it is of transformers, where adapters are asked for
    return model


class RivalTrainer:
    """A contender, its clock and its peak."""

    def __init__(self, job: RivalsJob, stack: ExitStack) -> None:
        self._job = job
        self._num_steps = 0
        self._rest_bytes = read_memory().host_bytes
        self._contender: Contender = CONTENDERS[job.mode.partition(":")[0]](
            lambda: build(job), Path(job.directory), job.shape.batch, stack
        )
        trim()

    def description(self) -> dict[str, Any]:
        """What the process held before it made the model."""
        return {"rest_bytes": self._rest_bytes}

    def step(self) -> dict[str, Any]:
        """One step; ``sync_s`` is what the drive then still has to write, which the page cache had taken."""
        tokens = self._job.shape.tokens(self._num_steps)
        self._num_steps += 1
        os.sync()
        reset_host_peak()
        begin_s = time.perf_counter()
        loss = self._contender.step(tokens)
        step_s = time.perf_counter() - begin_s
        os.sync()
        return {
            "loss": loss,
            "step_s": step_s,
            "update_s": self._contender.update_s,
            "sync_s": time.perf_counter() - begin_s - step_s,
            "peak_bytes": read_memory().host_peak_bytes,
        }

    def weights(self) -> dict[str, Any]:
        """A hash of each weight."""
        return {name: xxhash.xxh3_64_hexdigest(_bytes(weight)) for name, weight in self._contender.weights()}


def _bytes(weight: Tensor) -> memoryview:
    return memoryview(weight.detach().contiguous().view(-1).view(torch.uint8).numpy())


@contextmanager
def open_trainer(job: RivalsJob) -> Iterator[RivalTrainer]:
    """All that a job needs; opened and closed in this process."""
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        yield RivalTrainer(job, stack)


if __name__ == "__main__":
    sys.exit(answer_parent(RivalsJob, open_trainer))
