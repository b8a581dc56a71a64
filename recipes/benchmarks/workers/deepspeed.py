"""One process of ``recipes.benchmarks.deepspeed``: trains in one mode, a step at a time, when its parent says so.

Speaks JSON, one object per line: the job comes first, then ``step``; each is answered with one line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
import transformers
from torch import Tensor

import lightning_ssd
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import read_memory, reset_host_peak
from recipes.benchmarks.harness.process import answer_parent
from recipes.benchmarks.harness.shapes import Shape
from recipes.meter import weights_digest

__all__ = ["MODES", "RivalJob"]

MODES = {
    "torch": "AdamW in memory",
    "ours": "AdamW through lightning_ssd, states on the drive",
    "ours_cached": "the same, with memory for half of the states",
    "deepspeed": "ZeRO stage 3, optimizer on NVMe",
}
LEARNING_RATE = 1e-4
_QUIET_S = 0.005


@dataclass(frozen=True)
class RivalJob:
    """What one process does."""

    mode: str
    shape: Shape
    directory: str
    threads: int

    def to_json(self) -> str:
        """For the child's first line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> RivalJob:
        """The inverse."""
        fields = json.loads(line)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Contender(Protocol):
    """One way to train; a step is :meth:`loss`, :meth:`backward`, :meth:`update`."""

    def loss(self, tokens: Tensor) -> Tensor:
        """Forward."""

    def backward(self, loss: Tensor) -> None:
        """Gradients."""

    def update(self) -> None:
        """The optimizer's step, and what belongs to it."""

    def busy_s(self) -> float:
        """Grows while anything goes on behind; 0 where nothing does."""

    def digest(self) -> str | None:
        """Of the weights; ``None`` where they cannot be had."""


class InPyTorch:
    """Plain AdamW, or the same with its states on the drive.

    Args:
        model: what is trained.
        directory: for the states; ``None``: they stay in memory.
        stack: closes what is opened.
        cached_share: of the states, so many may stay in memory.
    """

    def __init__(
        self, model: torch.nn.Module, directory: Path | None, stack: ExitStack, *, cached_share: float = 0.0
    ) -> None:
        self._model = model
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        if directory is not None:
            nbytes = sum(2 * parameter.nbytes for parameter in model.parameters())  # AdamW's two moments
            offloader = lightning_ssd.Offloader(
                policy=lightning_ssd.OffloadPolicy(activations="keep", optimizer_states="offload"),
                hardware=lightning_ssd.HardwareProfile(
                    paths=[directory], allow_unsuitable_paths=True, host_memory=int(cached_share * nbytes)
                ),
            )
            # With the model, or it would be opened for the CPU, wherever the model is.
            stack.enter_context(offloader.open(model))
            self._optimizer = offloader.offload_optimizer(self._optimizer)

    def loss(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._model(input_ids=tokens, labels=tokens).loss
        return found

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def busy_s(self) -> float:
        stats = getattr(self._optimizer, "stats", None)
        return 0.0 if stats is None else stats.fetch_busy_s + stats.flush_busy_s

    def digest(self) -> str | None:
        return weights_digest(self._model)


class InDeepSpeed:
    """ZeRO-3 with the optimizer on NVMe, as its documentation sets it up.

    Args:
        model: what is trained.
        directory: for the swapped states.
    """

    def __init__(self, model: torch.nn.Module, directory: Path, batch: int) -> None:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29577")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed  # type: ignore[import-not-found, unused-ignore]  # installed for this benchmark only

        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": batch,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": str(directory), "buffer_count": 5},
            },
        }
        self._engine = deepspeed.initialize(model=model, config=config)[0]

    def loss(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._engine(input_ids=tokens, labels=tokens).loss
        return found

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def update(self) -> None:
        self._engine.step()

    def busy_s(self) -> float:
        return 0.0

    def digest(self) -> str | None:
        return None


class RivalTrainer:
    """A contender and its clock."""

    def __init__(self, job: RivalJob, stack: ExitStack) -> None:
        self._job = job
        self._num_steps = 0
        directory = Path(job.directory)
        model = job.shape.model()
        self._base_bytes = read_memory().host_bytes or 0
        self._contender: Contender
        if job.mode == "deepspeed":
            self._contender = InDeepSpeed(model, directory, job.shape.batch)
        else:
            share = 0.5 if job.mode == "ours_cached" else 0.0
            self._contender = InPyTorch(model, None if job.mode == "torch" else directory, stack, cached_share=share)
        trim()

    def step(self) -> dict[str, Any]:
        """One step: times, peak, loss, a hash of the weights."""
        tokens = self._job.shape.tokens(self._num_steps)
        self._num_steps += 1
        reset_host_peak()
        times = [time.perf_counter()]
        loss = self._contender.loss(tokens)
        times.append(time.perf_counter())
        self._contender.backward(loss)
        times.append(time.perf_counter())
        self._contender.update()
        times.append(time.perf_counter())
        # Ours writes on behind the next forward; here that counts, since the bytes do.
        settled_s = self._wait_until_quiet(times[-1])
        return {
            "forward_s": times[1] - times[0],
            "backward_s": times[2] - times[1],
            "update_s": times[3] - times[2],
            "settled_s": settled_s - times[2],
            "step_s": settled_s - times[0],
            "host_peak_bytes": read_memory().host_peak_bytes,
            "loss": float(loss.detach()),
            "weights": self._contender.digest(),
        }

    def _wait_until_quiet(self, since_s: float) -> float:
        busy_s = 0.0
        while (now_s := self._contender.busy_s()) != busy_s:
            since_s = time.perf_counter() if busy_s else since_s
            busy_s = now_s
            time.sleep(_QUIET_S)
        return since_s


@contextmanager
def open_trainer(job: RivalJob) -> Iterator[RivalTrainer]:
    """Everything that a job needs; opened and closed in this process."""
    torch.set_num_threads(job.threads)
    with ExitStack() as stack:
        yield RivalTrainer(job, stack)


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    """Work off commands until there are none."""
    with open_trainer(RivalJob.from_json(lines.readline())) as trainer:
        answer({"mode": MODES[trainer._job.mode]})
        for line in lines:
            if line.strip() != "step":
                raise ValueError(f"command {line.strip()!r}; allowed: 'step'")
            answer(trainer.step())


def main() -> int:
    """Entry of the child process."""
    transformers.logging.set_verbosity_error()  # it remarks on the defaults of a model built from a configuration
    return answer_parent(serve)


if __name__ == "__main__":
    sys.exit(main())
