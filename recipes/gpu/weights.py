"""Trains a GPT whose weights, gradients and optimizer states wait away from the device: bits, time, peak, bytes.

    python -m recipes.gpu.weights --device cuda --dir DIR --json FILE

Plain training first, twice; then what waits does so in host memory, on the drive, and in host memory together with
saved activations. At last the device is allowed little more than that last training took: plain training has to run out
of memory there, and ours to end with the same bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_ssd
from recipes.benchmarks.harness.gpt import GPT
from recipes.determinism import make_deterministic

__all__ = ["main"]

_SLACK = 1.1
"""Of a peak: what the capped trainings may reserve."""
_MODES: dict[str, dict[str, str]] = {
    "host": {"activations": "keep"},
    "drive": {"activations": "keep"},
    "everything_host": {"activations": "offload"},
}


@dataclass
class Training:
    """What came of one training."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    stall_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    """Of one step more, which waits for the device after each: seconds, and bytes that the device has then."""

    def told(self, plain: Training | None) -> dict[str, Any]:
        """Numbers for the results; the first step is not timed."""
        numbers = {key: value for key, value in vars(self).items() if key not in ("losses", "weights")}
        numbers["median_step_s"] = statistics.median(self.step_s[1:])
        if plain is not None:
            numbers["of_keep"] = numbers["median_step_s"] / statistics.median(plain.step_s[1:])
            numbers["equal"] = all(
                torch.equal(one, other)
                for one, other in zip([*self.losses, *self.weights], [*plain.losses, *plain.weights], strict=True)
            )
        return numbers


def train(args: argparse.Namespace, offloader: lightning_ssd.Offloader | None, steps: int) -> Training:
    """Some steps, the same in every call."""
    device = torch.device(args.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    with nullcontext() if offloader is None else offloader.streamed_init():
        model = GPT(
            layers=args.layers,
            width=args.width,
            heads=args.width // 64,
            sequence=args.sequence,
            vocabulary=args.vocabulary,
        )
    if offloader is not None:
        offloader.move_in(model)
    model.to(device)
    if offloader is not None:
        offloader.register_module(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if offloader is not None:
        optimizer = offloader.offload_optimizer(optimizer)
    done = Training()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(args.vocabulary, (args.batch, args.sequence), generator=generator).to(device)
        begin = time.perf_counter()
        done.losses.append(train_step(model, optimizer, offloader, tokens, lambda name: None))
        synchronize(device)
        done.step_s.append(time.perf_counter() - begin)
        if step == 0:  # in which host memory is locked and states are made
            reset_peaks(device, offloader)
    copies: AbstractContextManager[Any] = nullcontext() if offloader is None else offloader.host_copies()
    if device.type == "cuda":
        done.peak_bytes = torch.cuda.max_memory_allocated(device)
        done.reserved_bytes = torch.cuda.max_memory_reserved(device)
    if offloader is not None:
        stats = offloader.stats
        done.stall_s = stats.stall_s
        done.stats, done.states = (
            {key: value for key, value in asdict(one).items() if isinstance(value, (int, float))}
            for one in (stats, *offloader.optimizer_stats)
        )
    with copies:
        done.weights = [value.detach().cpu() for value in model.state_dict().values()]
    watch = PhaseWatch(device)
    train_step(model, optimizer, offloader, tokens, watch)
    done.phases = watch.phases
    return done


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    offloader: lightning_ssd.Offloader | None,
    tokens: Tensor,
    ended: Callable[[str], None],
) -> Tensor:
    """Returns the loss, in host memory."""
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


class PhaseWatch:
    """Waits for the device after each phase."""

    def __init__(self, device: torch.device) -> None:
        self.phases: dict[str, float] = {}
        self._device = device
        synchronize(device)
        self._begin_s = time.perf_counter()

    def __call__(self, phase: str) -> None:
        synchronize(self._device)
        now_s = time.perf_counter()
        self.phases[f"{phase}_s"], self._begin_s = now_s - self._begin_s, now_s
        if self._device.type == "cuda":
            self.phases[f"after_{phase}_bytes"] = torch.cuda.memory_allocated(self._device)


def synchronize(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peaks(device: torch.device, offloader: lightning_ssd.Offloader | None) -> None:
    """Peaks are those of later steps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if offloader is not None:
        offloader.reset_peaks()


def train_away(args: argparse.Namespace, mode: str) -> Training:
    """With what waits where the mode says."""
    policy = lightning_ssd.OffloadPolicy(
        parameters="offload", gradients="offload", optimizer_states="offload", **_MODES[mode]
    )
    hardware = lightning_ssd.HardwareProfile(
        paths=[args.dir], allow_unsuitable_paths=True, host_memory=0 if mode == "drive" else args.host_memory
    )
    with lightning_ssd.Offloader(policy=policy, hardware=hardware, device=args.device) as offloader:
        return train(args, offloader, args.drive_steps if mode == "drive" else args.steps)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All trainings one after the other; each is in the results as soon as it has ended."""
    make_deterministic(args.device)
    plain = train(args, None, args.steps)
    found: dict[str, Any] = {
        "parameters": sum(value.numel() for value in plain.weights[:-1]),
        "modes": {"keep": plain.told(None), "keep_again": train(args, None, args.steps).told(plain)},
    }
    write(args, found)
    for mode in args.modes.split(","):
        ours = train_away(args, mode)
        found["modes"][mode] = ours.told(train(args, None, args.drive_steps) if mode == "drive" else plain)
        write(args, found)
    if torch.device(args.device).type == "cuda" and "everything_host" in found["modes"]:
        found["capped"] = capped(args, plain, found["modes"]["everything_host"]["reserved_bytes"])
        write(args, found)
    return found


def capped(args: argparse.Namespace, plain: Training, reserved_bytes: int) -> dict[str, Any]:
    """Both trainings on a device that has little more than one of them needs."""
    device = torch.device(args.device, torch.cuda.current_device())
    _, total = torch.cuda.mem_get_info(device)
    allowed = int(_SLACK * reserved_bytes)
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    try:
        train(args, None, 2)
        ran = True
    except torch.cuda.OutOfMemoryError:
        ran = False
    return {"allowed_bytes": allowed, "plain_ran": ran, "ours": train_away(args, "everything_host").told(plain)}


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """What is known so far."""
    args.json.write_text(json.dumps(found, indent=1))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    sizes = {"layers": 8, "width": 2048, "batch": 8, "sequence": 1024, "vocabulary": 16_384}
    for name, default in (sizes | {"steps": 4, "drive-steps": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--modes", default=",".join(_MODES), help="of those that move; default: %(default)s")
    parser.add_argument("--host-memory", default="24GiB")
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
