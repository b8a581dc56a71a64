"""Does it pay when processes that share a drive take turns? Optimizer states of several processes, one directory.

    python -m recipes.benchmarks.drive_turns --dir DIR [--processes 2] [--parameters 64] [--steps 8] [--json FILE]

Each process has as many parameters as ``--parameters`` says, in millions, AdamW, and its states on the drive, twice:
once all processes move bytes as they like, once only one of them reads and one writes at a time
(``storage/drive_turns.py``; MLP-Offload, section 3.2). The two take turns step by step in an order that rotates; a
step begins when all processes are there, and takes as long as its slowest process needs until its last write.
At the end the trial that runs at setup
says what it would have chosen here, and weights are compared between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lightning_ssd
from lightning_ssd.common.tensors import Region
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.storage.backend import Backend, WrappedBackend
from lightning_ssd.storage.drive_turn_lock import DriveLock
from lightning_ssd.storage.drive_turns import ExclusiveBackend, open_exclusive
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.tables import quartiles
from recipes.benchmarks.step import environment, spill_directory

MODES = ("at once", "in turns")
_MILLION = 1 << 20


class AllInTurns(WrappedBackend):
    """Every chunk waits for the turn of this process, whatever a trial would say.

    Args:
        inner: moves the bytes.
        directory: on the drive that is shared.
    """

    def __init__(self, inner: Backend, directory: Path) -> None:
        super().__init__(inner)
        self._arbiter = DriveLock(directory)

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        with self._arbiter.writing():
            self.inner.write(arena, region, offset)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        with self._arbiter.reading():
            self.inner.read(arena, region, offset)

    def close(self) -> None:
        self._arbiter.close()
        super().close()


class Updater:
    """The parameters of one process in one mode, and their optimizer.

    Args:
        stack: closes what is opened.
        directory: for the states.
        num_millions: of parameters.
        wrap: puts a backend in front of the one that moves bytes.
    """

    def __init__(
        self, stack: ExitStack, directory: Path, num_millions: int, wrap: Callable[[Backend], Backend] | None
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(_MILLION, generator=generator)) for _ in range(num_millions)]
        gradient = torch.randn(_MILLION, generator=generator)
        for parameter in self.parameters:
            parameter.grad = gradient  # of all: only bytes of states matter here
        policy = lightning_ssd.OffloadPolicy(activations="keep", optimizer_states="offload")
        hardware = lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
        offloader = stack.enter_context(lightning_ssd.Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap))
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(self.parameters, lr=1e-3))
        assert isinstance(optimizer, OffloadedOptimizer)
        self.optimizer = optimizer

    def step(self) -> float:
        """Seconds of one step with its last write."""
        start_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.flush()
        return time.perf_counter() - start_s


def threads_of(num_processes: int) -> int:
    """For computing, of each process."""
    return max(1, (os.cpu_count() or 1) // num_processes)


def smallest(values: Sequence[float]) -> list[float]:
    """Of each number over all processes."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return [float(value) for value in found]


def measure(updaters: dict[str, Updater], num_steps: int, num_warmup: int) -> list[dict[str, float]]:
    """Seconds of the slowest process, by mode, for each timed step."""
    found: list[dict[str, float]] = []
    for step in range(num_warmup + num_steps):
        order = MODES if step % 2 == 0 else MODES[::-1]
        seconds = {}
        for mode in order:
            dist.barrier()
            seconds[mode] = -smallest([-updaters[mode].step()])[0]
        if step >= num_warmup:
            found.append(seconds)
    return found


def work(rank: int, args: argparse.Namespace, directory: Path, meeting: Path, results: Path) -> None:
    """One process."""
    torch.set_num_threads(threads_of(args.processes))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(meeting), args.processes),
        rank=rank,
        world_size=args.processes,
        timeout=timedelta(minutes=10),
    )
    try:
        with ExitStack() as stack:
            wraps = {"at once": None, "in turns": partial(AllInTurns, directory=directory)}
            updaters = {mode: Updater(stack, directory, args.parameters, wraps[mode]) for mode in MODES}
            seconds = measure(updaters, args.steps, args.warmup)
            first, second = (updater.parameters for updater in updaters.values())
            are_equal = all(map(torch.equal, first, second))
            stats = updaters["at once"].optimizer.stats
            moved = stats.written_bytes // (args.steps + args.warmup)
        with ExitStack() as stack:
            plain = PosixBackend([directory])
            stack.callback(plain.close)
            chosen = isinstance(open_exclusive(stack, plain, [directory], smallest), ExclusiveBackend)
        are_equal = bool(smallest([float(are_equal)])[0])
        if rank == 0:
            content = {"seconds": seconds, "equal": are_equal, "trial": MODES[chosen], "moved_bytes": moved}
            results.write_text(json.dumps(content))
    finally:
        dist.destroy_process_group()


def report(content: dict[str, Any], args: argparse.Namespace) -> None:
    """The table."""
    at_once, in_turns = ([turn[mode] for turn in content["seconds"]] for mode in MODES)
    ratios = [b / a for a, b in zip(at_once, in_turns, strict=True)]
    low, high = quartiles(ratios)
    print(f"\n{args.processes} processes, {args.parameters} million parameters each; slowest process of each step\n")
    print("| mode | update s | / at once | quartiles |\n|---|---|---|---|")
    print(f"| at once | {statistics.median(at_once):.2f} | 1.000 | |")
    print(f"| in turns | {statistics.median(in_turns):.2f} | {statistics.median(ratios):.3f} | {low:.3f}-{high:.3f} |")
    print(
        f"\nwritten per process and step: {content['moved_bytes'] >> 20:,} MiB; the trial at setup chose: "
        f"{content['trial']}; weights of both: {'equal' if content['equal'] else 'DIFFERENT'}"
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.drive_turns", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dir", type=Path, help="on the drive; default: a temporary one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=64, help="of each process, in millions (2**20)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each mode")
    parser.add_argument("--warmup", type=int, default=2, help="steps before these; the first one makes the states")
    parser.add_argument("--json", type=Path, help="write environment and seconds here")
    args = parser.parse_args(arguments)
    for name, smallest_allowed in (("processes", 2), ("parameters", 1), ("steps", 1), ("warmup", 1)):
        if getattr(args, name) < smallest_allowed:
            parser.error(f"--{name}={getattr(args, name)}; allowed: {smallest_allowed} or more")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when weights differ. Speed is only reported."""
    args = parse_arguments(arguments)
    with spill_directory(args.dir, "bench_turns") as directory, tempfile.TemporaryDirectory() as own:
        facts = environment("drive_turns", threads_of(args.processes))
        print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
        meeting, results = Path(own) / "meeting", Path(own) / "results"
        torch.multiprocessing.spawn(work, (args, directory, meeting, results), nprocs=args.processes)
        content = json.loads(results.read_text())
    report(content, args)
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": facts, **content}, indent=1))
    return 0 if content["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
