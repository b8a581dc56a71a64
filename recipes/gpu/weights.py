"""Trains a GPT whose weights, gradients and optimizer states wait away from the device: bits, time, peak, phases.

    python -m recipes.gpu.weights --device cuda --dir DIR --json FILE

Plain training first, twice; then what waits does so in host memory, on the drive, and in host memory with saved
activations on the drive. At last the device is allowed little more than the first of these took: plain training has to
run out of memory there, and ours to end with the same bits.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_ssd
from recipes.benchmarks.harness.gpt import GPT
from recipes.determinism import make_deterministic
from recipes.gpu.training import Training

__all__ = ["main"]

_SLACK = 1.1
"""Of a peak: what the capped trainings may reserve."""
_ACTIVATIONS = {"host": "keep", "drive": "keep", "everything": "offload"}
"""By mode. Weights, gradients and states wait in all of them."""


@dataclass
class WatchedTraining(Training):
    """Peaks are those of all steps but the first, in which states are made and host memory is locked."""

    reserved_bytes: int | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Of one step more, which waits for the device after each: seconds, and bytes that the device has then."""

    @property
    def median_s(self) -> float:
        """Of all steps but the first."""
        return statistics.median(self.step_s[1:])

    def told(self, plain: WatchedTraining | None) -> dict[str, Any]:
        """Numbers for the results."""
        numbers = {key: value for key, value in vars(self).items() if key not in ("losses", "weights")}
        numbers["median_step_s"] = self.median_s
        if plain is not None:
            numbers |= {"of_keep": self.median_s / plain.median_s, "equal": self.is_same(plain)}
        return numbers


class Trainer:
    """Trains copies of one model, the same in every call.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._device = torch.device(args.device)
        torch.manual_seed(0)
        sizes = {name: getattr(args, name) for name in ("layers", "width", "sequence", "vocabulary")}
        self._template = GPT(heads=args.width // 64, **sizes)
        self.num_parameters = sum(p.numel() for p in self._template.parameters())

    def plain(self, steps: int) -> WatchedTraining:
        """With everything on the device."""
        return self._train(None, steps)

    def away(self, mode: str, steps: int) -> WatchedTraining:
        """With what waits where the mode says."""
        policy = lightning_ssd.OffloadPolicy(
            parameters="offload",
            gradients="offload",
            optimizer_states="offload",
            activations=_ACTIVATIONS[mode],  # type: ignore[arg-type]
        )
        hardware = lightning_ssd.HardwareProfile(
            paths=[self._args.dir],
            allow_unsuitable_paths=True,
            host_memory=0 if mode == "drive" else self._args.host_memory,
        )
        with lightning_ssd.Offloader(policy=policy, hardware=hardware, device=self._device) as offloader:
            return self._train(offloader, steps)

    def _train(self, offloader: lightning_ssd.Offloader | None, steps: int) -> WatchedTraining:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        model = copy.deepcopy(self._template)
        if offloader is not None:
            offloader.move_in(model)
        model.to(self._device)
        if offloader is not None:
            offloader.register_module(model)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if offloader is not None:
            optimizer = offloader.offload_optimizer(optimizer)
        done = WatchedTraining()
        for step in range(steps):
            begin_s = time.perf_counter()
            done.losses.append(self._step(model, optimizer, offloader, step))
            synchronize(self._device)
            done.step_s.append(time.perf_counter() - begin_s)
            if step == 0:
                self._reset_peaks(offloader)
        self._measure(done, offloader)
        with nullcontext() if offloader is None else offloader.host_copies():
            done.weights = [value.detach().cpu() for value in model.state_dict().values()]
        watch = PhaseWatch(self._device)
        self._step(model, optimizer, offloader, steps, ended=watch.end)
        done.phases = watch.phases
        return done

    def _step(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        offloader: lightning_ssd.Offloader | None,
        step: int,
        ended: Callable[[str], None] = lambda phase: None,
    ) -> Tensor:
        args, generator = self._args, torch.Generator().manual_seed(step)
        tokens = torch.randint(args.vocabulary, (args.batch, args.sequence), generator=generator).to(self._device)
        with nullcontext() if offloader is None else offloader.saved_tensors():
            loss: Tensor = model(tokens, tokens).loss
        ended("forward")
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        ended("backward")
        optimizer.step()
        optimizer.zero_grad()
        ended("update")
        return loss.detach().cpu()

    def _reset_peaks(self, offloader: lightning_ssd.Offloader | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if offloader is not None:
            offloader.reset_peaks()

    def _measure(self, done: WatchedTraining, offloader: lightning_ssd.Offloader | None) -> None:
        if self._device.type == "cuda":
            done.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            done.reserved_bytes = torch.cuda.max_memory_reserved(self._device)
        if offloader is not None:
            done.stats, done.states = (
                {key: value for key, value in asdict(one).items() if isinstance(value, (int, float))}
                for one in (offloader.stats, *offloader.optimizer_stats)
            )


class PhaseWatch:
    """Waits for the device after each phase."""

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, float] = {}
        self._device = device
        synchronize(device)
        self._begin_s = time.perf_counter()

    def end(self, phase: str) -> None:
        """Note its time, and what the device has now."""
        synchronize(self._device)
        now_s = time.perf_counter()
        self.phases[f"{phase}_s"], self._begin_s = now_s - self._begin_s, now_s
        if self._device.type == "cuda":
            self.phases[f"after_{phase}_bytes"] = torch.cuda.memory_allocated(self._device)


def synchronize(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All trainings one after the other; each is in the results as soon as it has ended."""
    make_deterministic(args.device)
    trainer = Trainer(args)
    plain = trainer.plain(args.steps)
    found: dict[str, Any] = {
        "num_parameters": trainer.num_parameters,
        "modes": {"keep": plain.told(None), "keep_again": trainer.plain(args.steps).told(plain)},
    }
    reserved_bytes = None
    for mode in args.modes.split(","):
        steps = args.drive_steps if mode == "drive" else args.steps
        ours = trainer.away(mode, steps)
        found["modes"][mode] = ours.told(plain if steps == args.steps else trainer.plain(steps))
        if reserved_bytes is None:
            reserved_bytes = ours.reserved_bytes
            if reserved_bytes is not None:
                found["capped"] = capped(trainer, args, plain, mode, reserved_bytes)
        args.json.write_text(json.dumps(found, indent=1))
    return found


def capped(
    trainer: Trainer, args: argparse.Namespace, plain: WatchedTraining, mode: str, reserved_bytes: int
) -> dict[str, Any]:
    """Both trainings on a device that has little more than one of them needs."""
    device = torch.device("cuda", torch.cuda.current_device())
    allowed_bytes = int(_SLACK * reserved_bytes)
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info(device)[1], device)
    try:
        trainer.plain(2)
        has_run = True
    except torch.cuda.OutOfMemoryError:
        has_run = False
    try:
        ours = trainer.away(mode, args.steps).told(plain)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    return {"allowed_bytes": allowed_bytes, "plain_has_run": has_run, "ours": ours}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    sizes = {"layers": 8, "width": 2048, "batch": 8, "sequence": 1024, "vocabulary": 16_384}
    for name, default in (sizes | {"steps": 4, "drive-steps": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--modes", default=",".join(_ACTIVATIONS), help="of those that move; default: %(default)s")
    parser.add_argument("--host-memory", default="24GiB", help="for what waits there; default: %(default)s")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 1 where bits differ although plain training repeats its own."""
    args = parse_arguments(arguments)
    found = compare(args)
    print(json.dumps(found, indent=1))
    trainings = [*found["modes"].values(), *([found["capped"]["ours"]] if "capped" in found else [])]
    differ = [training for training in trainings if training.get("equal") is False]
    return 1 if differ and found["modes"]["keep_again"]["equal"] else 0


if __name__ == "__main__":
    sys.exit(main())
