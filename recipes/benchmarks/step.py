"""A training step that offloads, against keeping, recomputing and naive disk hooks: time, memory, bytes, equality.

    python -m recipes.benchmarks.step --dir DIR [--modes keep,ssd,recompute,naive] [--json FILE]
    python -m recipes.benchmarks.step --dir DIR --modes keep,auto,budget=40%,budget=1.5GiB@200MB/s [--shape tall]
    python -m recipes.benchmarks.step --dir DIR --modes keep,keep_again  # does this machine repeat its bits and times?
    python -m recipes.benchmarks.step --profile gpu --dir DIR  # one CUDA card

Each mode trains in a process of its own. The processes take turns, step by step, in an order that rotates, so that a
machine which slows down slows all of them down: a step is compared with keep's step of the same turn, and the table
shows medians of these ratios. Every step's loss, gradients and weights are hashed and compared with keep's; on CUDA
only operations that repeat their bits are used, unless ``--no-deterministic`` allows others. ``keep_again`` is a second
keep: how far its row is from 1 and "equal" is the noise of the machine, in which all other rows stand as well. Modes
that plan are warmed up until they follow a plan. A mode that runs out of memory is told of in its row, and the others
go on without it. How names of modes are read: ``recipes.benchmarks.harness.mode_names``.

A process that waits for its turn has its memory grow cold, and on some virtual machines what it has freed goes back to
the host. ``--turn-steps 4`` has each take four steps in a turn, of which the first is not timed: so a process trains
that has the machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.memory.malloc import malloc_name
from recipes.benchmarks.harness.mode_names import (
    BASELINE,
    CARD_MODES,
    DEFAULT_MODES,
    MODES,
    parse_mode,
    parse_modes,
)
from recipes.benchmarks.harness.modes import Settings
from recipes.benchmarks.harness.process import Child, ChildDiedError, ChildOutOfMemoryError
from recipes.benchmarks.harness.rounds import PLANNED_WARMUP, run_round, tell
from recipes.benchmarks.harness.shapes import Shape, add_shape_arguments, choose_shape, has_transformers
from recipes.benchmarks.harness.tables import Sample, show, summarise
from recipes.benchmarks.workers.step import Job

GIB = float(1 << 30)
_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")
_FREE_PAGE_REPORTING = 5
"""Bit of a memory balloon's features (Virtual I/O Device Version 1.2, section 5.5.3)."""
_PATH_OPTIONS = ("--dir", "--json", "--output")


def make_jobs(
    modes: Sequence[str], shape: Shape, directory: Path, args: argparse.Namespace, *, held_bytes: int | None
) -> list[Job]:
    """One per mode.

    Args:
        modes: names.
        shape: what they train.
        directory: on the drive.
        args: ``threads``, ``verify`` and ``deterministic``.
        held_bytes: what keep holds, for budgets that are shares of it; see :func:`held_if_needed`.
    """
    common = Settings(verify=args.verify, deterministic=args.deterministic)
    return [
        Job(mode, shape, str(directory), args.threads, replace(common, budget_bytes=budget))
        for mode, budget in ((mode, parse_mode(mode).budget_bytes(held_bytes)) for mode in modes)
    ]


def held_if_needed(modes: Sequence[str], shape: Shape, directory: Path, threads: int) -> int | None:
    """What keep holds, counted in a process of its own, if any mode's budget is a share of it.

    On a card always: there it may be more than the drive has room for, see :func:`check_room`.
    """
    is_needed = shape.device == "cuda" or any(parse_mode(mode).is_relative for mode in modes)
    return measure_held(shape, directory, threads) if is_needed else None


def check_room(modes: Sequence[str], held_bytes: int | None, directory: Path) -> None:
    """See that the drive has room for what the modes write side by side, each into files of its own.

    Args:
        modes: names.
        held_bytes: what keep holds; ``None``: unknown, and nothing is checked.
        directory: on the drive.

    Raises:
        SystemExit: it has not.
    """
    if held_bytes is None:
        return
    needs = {mode: parse_mode(mode).disk_bytes(held_bytes) for mode in modes}
    free = shutil.disk_usage(directory).free
    if sum(needs.values()) > free:
        each = ", ".join(f"{mode} {nbytes / GIB:.1f}" for mode, nbytes in needs.items() if nbytes)
        sys.exit(
            f"{directory} has {free / GIB:.1f} GiB free, and the modes write, in GiB, {each}; name fewer --modes, a "
            "smaller --batch, or a --dir on a larger drive"
        )


def measure_held(shape: Shape, directory: Path, threads: int) -> int:
    """What plain PyTorch's saved activations take at their worst moment, in bytes."""
    child = Child(Job(BASELINE, shape, str(directory), threads))
    try:
        child.answer()
        return int(child.ask("account")["held_bytes"])
    finally:
        child.close()


def environment(recipe: str, threads: int, shape: Shape | None = None) -> dict[str, Any]:
    """What a reader needs to judge the numbers. No host name, no paths. Without a shape: no model is trained."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": f"python -m recipes.benchmarks.{recipe} " + shlex.join(_without_paths(sys.argv[1:])),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "malloc": malloc_name(),
        "free_page_reporting": reports_free_pages(),
        "device": torch.cuda.get_device_name() if shape is not None and shape.device == "cuda" else "cpu",
        "threads": threads,
        "load_average": os.getloadavg()[0],
        **({} if shape is None else {"shape": asdict(shape), "model": _model()}),
    }


def reports_free_pages() -> bool:
    """Whether this is a virtual machine that hands memory which stays free for two seconds back to its host.

    Mapping it again takes several times as long then. Processes that take turns pay for that, since what one of them
    has freed stays free while the others step; one that trains alone pays less. See ``--turn-steps``.
    """
    balloons = _BALLOONS.glob("virtio*/features")
    return any(path.read_text()[_FREE_PAGE_REPORTING] == "1" for path in balloons)


def commit() -> str:
    """Of the checkout; "unknown" where there is none, or no git."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _model() -> str:
    return (
        f"GPT-2 of transformers {version('transformers')}"
        if has_transformers()
        else "GPT-2 of recipes/benchmarks/harness/gpt.py"
    )


def _without_paths(arguments: Sequence[str]) -> list[str]:
    hidden = [
        value if before not in _PATH_OPTIONS else "..."
        for before, value in zip(["", *arguments], arguments, strict=False)
    ]
    return [value.partition("=")[0] + "=..." if value.partition("=")[0] in _PATH_OPTIONS else value for value in hidden]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--modes",
        help=f"of {', '.join(MODES)}; ours may end in @RATE, such as auto@50MB/s; default: {','.join(DEFAULT_MODES)}, "
        f"on a card {','.join(CARD_MODES)}".replace("%", "%%"),
    )
    parser.add_argument("--rounds", type=int, default=3, help="times that all processes start anew")
    parser.add_argument("--steps", type=int, default=4, help="timed turns per round")
    parser.add_argument(
        "--warmup", type=int, default=2, help=f"turns before these; for planned modes {PLANNED_WARMUP} at least"
    )
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="make fewer turns, but one timed one, where all takes longer"
    )
    parser.set_defaults(started_s=time.monotonic())
    parser.add_argument("--turn-steps", type=int, help="steps per turn, the first of several not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--verify", default="off", choices=("off", "sampled", "full"), help="for modes that are ours")
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on CUDA: only operations that repeat their bits; without, keep may differ from keep; default: yes",
    )
    add_shape_arguments(parser)
    parser.add_argument("--json", type=Path, help="write environment, samples and summary here")
    args = parser.parse_args(arguments)
    try:
        default = DEFAULT_MODES if args.profile == "cpu" else CARD_MODES
        args.modes = parse_modes(",".join(default) if args.modes is None else args.modes)
    except ValueError as error:
        parser.error(f"--modes has {error}")
    return args


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All rounds; prints the table."""
    shape = choose_shape(args)
    # A caching allocator has to be emptied for the next process, so that on a device the first step of a turn is lost.
    args.turn_steps = args.turn_steps or (4 if shape.device == "cuda" else 1)
    failed: dict[str, str] = {}
    held = None
    try:
        held = held_if_needed(args.modes, shape, directory, args.threads)
        check_room(args.modes, held, directory)
    except ChildOutOfMemoryError as error:
        tell(f"{error}; the others go on")
        shares = [mode for mode in args.modes if parse_mode(mode).is_relative]
        failed |= dict.fromkeys(shares, "not run: needs what keep holds") | dict.fromkeys(
            {BASELINE} & {*args.modes}, error.why
        )
    facts = environment("step", args.threads, shape)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n", flush=True)
    samples: list[Sample] = []
    for index in range(args.rounds):
        modes = [mode for mode in args.modes if mode not in failed]
        jobs = make_jobs(modes, shape, directory, args, held_bytes=held)
        samples += run_round(index, jobs, args, details=index == 0, failed=failed) if jobs else []
    rows = summarise(samples, args.modes, failed)
    show(rows)
    show_determinism(samples)
    return {"environment": facts, "summary": rows, "samples": [asdict(sample) for sample in samples]}


def show_determinism(samples: Sequence[Sample]) -> None:
    """How far bits can be compared; nothing where nothing had to be set."""
    for told in {sample.values.get("described", {}).get("determinism"): None for sample in samples}:
        if told:
            print(f"Bits: {told}")


@contextmanager
def spill_directory(given: Path | None, prefix: str) -> Iterator[Path]:
    """The directory that was named, or a temporary one."""
    with ExitStack() as stack:
        directory = given or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{prefix}-")))
        directory.mkdir(parents=True, exist_ok=True)
        yield directory


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when any mode's numbers differ from keep's, or one is out of memory."""
    args = parse_arguments(arguments)
    with spill_directory(args.dir, "bench_step") as directory:
        try:
            content = run(args, directory)
        except ChildDiedError as error:
            sys.exit(str(error))
    if args.json:
        args.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row.get("equal", True) for row in content["summary"]) else 1


if __name__ == "__main__":
    sys.exit(main())
