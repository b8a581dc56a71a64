"""One process of ``recipes.benchmarks.optimizer``: holds parameters and updates them in one mode, a step at a time.

``recipes.benchmarks.harness.process`` says how it is told what to do. Nothing is trained: gradients are made anew for
each step from a seed, in memory that is taken once.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

import lightning_ssd
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import MemoryReadings, read_memory, reset_device_peak, reset_host_peak
from lightning_ssd.optimizer.step.master_weights import MASTER
from recipes.benchmarks.harness.process import answer_parent
from recipes.benchmarks.workers.optimizer_job import BASELINE, OPTIMIZERS, Kind, OptimizerJob
from recipes.determinism import make_deterministic
from recipes.meter import weights_digest

__all__ = ["AnonymousPeak", "anonymous_bytes", "open_updater", "states_digest"]

SAMPLED_EVERY_S = 0.002
_QUIET_S = 0.005
_BUSY = ("fetch_busy_s", "flush_busy_s")
_COUNTED = (
    *("written_bytes", "read_bytes", "kept_bytes"),
    *("stall_s", "fetch_busy_s", "flush_busy_s", "update_s"),
)
_LEVELS = ("num_subgroups", "subgroup_bytes", "state_bytes", "resident_bytes", "resident_peak_bytes")


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file, in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


class AnonymousPeak:
    """``with AnonymousPeak() as peak:`` samples anonymous memory in a thread; then ``peak.extra_bytes``.

    The kernel's own peak counts pages of files too, and a checkpoint may be read through these.
    """

    def __init__(self) -> None:
        self.first_bytes = self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-anonymous-peak", daemon=True)

    @property
    def extra_bytes(self) -> int:
        """Highest level above the first."""
        return self.peak_bytes - self.first_bytes

    def __enter__(self) -> AnonymousPeak:
        self.first_bytes = self.peak_bytes = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def states_digest(saved: Mapping[str, Any]) -> str:
    """Hash of the states in what ``state_dict()`` gives, parameter by parameter: names, types, bytes."""
    digest = xxhash.xxh3_64()
    for index in sorted(saved["state"]):
        for name, value in sorted(saved["state"][index].items()):
            if name == MASTER:
                continue  # plain PyTorch's are elsewhere; what they round to is compared as weights
            digest.update(f"{index} {name}\n".encode())
            if isinstance(value, Tensor):
                digest.update(f"{tuple(value.shape)} {value.dtype}\n".encode())
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


class CopiesByHand:
    """Plain PyTorch on float32 copies of half-precision parameters, brought over before and after each step.

    Args:
        parameters: what the model uses.
        kind: of the optimizer.
    """

    def __init__(self, parameters: list[nn.Parameter], kind: Kind) -> None:
        self._parameters = parameters
        self._copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self.optimizer = kind.cls(self._copies, **kind.settings)
        self.optimizer.register_step_pre_hook(self._widen)
        self.optimizer.register_step_post_hook(self._round)

    def _widen(self, *args: object) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def _round(self, *args: object) -> None:
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            copy.grad = None
            parameter.copy_(copy)


def open_optimizer(stack: ExitStack, job: OptimizerJob, model: nn.Module) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer of one mode, and one line on where its states go. All use of the class under test is here."""
    kind = OPTIMIZERS[job.optimizer]
    if job.mode == BASELINE and job.master_weights:
        copies = CopiesByHand(list(model.parameters()), kind)
        return copies.optimizer, "states and float32 copies of weights in memory"
    plain = kind.cls(model.parameters(), **kind.settings)
    if job.mode == BASELINE:
        return plain, "states in memory"
    offloader = lightning_ssd.Offloader(
        policy=lightning_ssd.OffloadPolicy(
            activations="keep", optimizer_states="offload", master_weights=job.master_weights
        ),
        hardware=lightning_ssd.HardwareProfile(
            paths=[job.directory], host_memory=job.cache_bytes, allow_unsuitable_paths=True
        ),
        device=job.sizes.device,
    )
    stack.enter_context(offloader)
    offloader.open(model)
    return offloader.offload_optimizer(plain), offloader.description


class Updater:
    """Parameters, gradients and an optimizer; one method per command."""

    def __init__(self, stack: ExitStack, job: OptimizerJob) -> None:
        self._job = job
        self._model = job.sizes.model()
        self._parameters = list(self._model.parameters())
        self._num_steps = 0
        self._fill_gradients()
        trim()
        # What training needs in any mode: the optimizer comes after it, with all that it holds.
        self._base = read_memory(job.sizes.device)
        self._optimizer, self._where = open_optimizer(stack, job, self._model)

    def description(self) -> dict[str, Any]:
        """What is updated, and how bytes reach the drive; without the names of directories."""
        return {
            "num_parameters": self._job.sizes.num_parameters,
            "where": self._where.partition("; in ")[0],
            "cache_bytes": self._job.cache_bytes,
        }

    def step(self) -> dict[str, Any]:
        """One update: time, peaks, what was moved, a hash of the weights."""
        self._fill_gradients()
        before = self._stats()
        reset_host_peak()
        reset_device_peak(self._job.sizes.device)
        begin = self._now()
        self._optimizer.step()
        seconds = self._now() - begin
        # In training the last writes go on behind the next forward; here they count, since their bytes do.
        settled_s = self._wait_until_quiet(begin + seconds) - begin
        memory = read_memory(self._job.sizes.device)
        after = self._stats()
        self._num_steps += 1
        return {
            "step_s": seconds,
            "settled_s": settled_s,
            "host_peak_bytes": memory.host_peak_bytes,
            "device_peak_bytes": memory.device_peak_bytes,
            "peak_above_base_bytes": self._above_base(memory),
            "weights": weights_digest(self._model),
            **{name: after[name] - before[name] for name in _COUNTED if after},
            **{name: after[name] for name in _LEVELS if after},
        }

    def checkpoint(self) -> dict[str, Any]:
        """Save the states as everybody does; what that takes, and a hash of what is in the file."""
        path = Path(self._job.directory) / f"bench_optimizer-{os.getpid()}.pt"
        trim()
        begin = self._now()
        try:
            with AnonymousPeak() as peak:
                torch.save(self._optimizer.state_dict(), path)
            seconds = self._now() - begin
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            digest = states_digest(saved)
            return {
                "checkpoint_s": seconds,
                "checkpoint_bytes": path.stat().st_size,
                "checkpoint_extra_bytes": peak.extra_bytes,
                "states": digest,
            }
        finally:
            path.unlink(missing_ok=True)

    def _fill_gradients(self) -> None:
        """In place, the same for a step of any mode."""
        generator = torch.Generator(self._job.sizes.device).manual_seed(1 + self._num_steps)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.uniform_(-1.0, 1.0, generator=generator)

    def _stats(self) -> dict[str, Any]:
        stats = getattr(self._optimizer, "stats", None)
        return {} if stats is None else asdict(stats)

    def _wait_until_quiet(self, since_s: float) -> float:
        """Wait for the last transfer; when it was seen to end. A flush would also write what is to stay in memory."""
        busy_s = 0.0
        while (now_s := sum(self._stats().get(name, 0.0) for name in _BUSY)) != busy_s:
            # Busy time grows while anything is under way. The first look only takes note of it.
            since_s = time.perf_counter() if busy_s else since_s
            busy_s = now_s
            time.sleep(_QUIET_S)
        return since_s

    def _above_base(self, memory: MemoryReadings) -> int:
        if memory.device_peak_bytes is not None:
            return memory.device_peak_bytes - (self._base.device_bytes or 0)
        return (memory.host_peak_bytes or 0) - (self._base.host_bytes or 0)

    def _now(self) -> float:
        if self._job.sizes.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def open_updater(job: OptimizerJob) -> Iterator[Updater]:
    """Everything that a job needs; opened and closed in this process."""
    torch.set_num_threads(job.threads)
    make_deterministic(job.sizes.device)  # of what optimizers call nothing is known to fail
    with ExitStack() as stack:
        yield Updater(stack, job)


if __name__ == "__main__":
    sys.exit(answer_parent(OptimizerJob, open_updater))
