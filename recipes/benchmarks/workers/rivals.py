"""One process of ``recipes.benchmarks.rivals``: trains in one way, a step at a time, when its parent says so.

Speaks JSON, one object per line: the job comes first, then ``step`` or ``weights``; each is answered with one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
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

    def to_json(self) -> str:
        """For the child's first line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RivalsJob:
        """The inverse."""
        fields = json.loads(line)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


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
        self._contender: Contender = CONTENDERS[job.mode.partition(":")[0]](
            lambda: build(job), Path(job.directory), job.shape.batch, stack
        )
        trim()

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


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    """Work off commands until there are none."""
    job = RivalsJob.from_json(lines.readline())
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        rest_bytes = read_memory().host_bytes
        trainer = RivalTrainer(job, stack)
        answer({"rest_bytes": rest_bytes})
        for line in lines:
            command = line.strip()
            if command not in ("step", "weights"):
                raise ValueError(f"command {command!r}; allowed: 'step', 'weights'")
            answer(getattr(trainer, command)())


def main() -> int:
    """Entry of the child process."""
    transformers.logging.set_verbosity_error()  # it remarks on the defaults of a model built from a configuration
    return answer_parent(serve)


if __name__ == "__main__":
    sys.exit(main())
