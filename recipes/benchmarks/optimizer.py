"""Optimizer states on SSD: update time against the drive's limit, memory, bytes moved, checkpoints, equality.

    python -m recipes.benchmarks.optimizer --dir DIR [--size 350m|1b] [--optimizer adamw] [--steps 5] [--json FILE]
    python -m recipes.benchmarks.optimizer --part odd  # odd widths, five steps: are all bits those of PyTorch?
    python -m recipes.benchmarks.optimizer --tiny                # a toy size, to try the recipe itself
    python -m recipes.benchmarks.optimizer --profile gpu --dir DIR  # one CUDA card, bfloat16 parameters, master weights

Nothing is trained: parameters have the shapes of a GPT's, and each step's gradients come from a seed. Modes:
    torch       plain PyTorch
    ssd         states on the drive, nothing kept in memory between steps
    cache=50%   the same, with that share of the states kept in memory

Each mode runs in a process of its own. The processes take turns, step by step, in an order that rotates. In each turn
the drive is measured as well, by writing and reading a file past the page cache: both directions in flight, and each
alone. The limit of an update, taken up to the end of its last write, is the longer of its two directions at the first
pair of rates; "in turns" it is the sum of both at the second. Several drives are those of
``recipes.benchmarks.drives``. Where memory or disk do not suffice for all processes at once, groups of them run one
after the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.common.validation import parse_size
from lightning_ssd.memory.readings import host_available_bytes
from recipes.benchmarks.harness.drive import DriveMeter, DriveRates
from recipes.benchmarks.harness.optimizer_tables import broken, show, summarise
from recipes.benchmarks.harness.process import Child, ChildDiedError
from recipes.benchmarks.harness.shapes import PROFILES, Shape
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.step import environment, spill_directory
from recipes.benchmarks.workers.optimizer_job import (
    BASELINE,
    MODES,
    OPTIMIZERS,
    SIZES,
    Needs,
    OptimizerJob,
    Sizes,
    parse_modes,
)

PARTS = ("main", "odd")
ODD_HIDDEN = (320, 960)
ODD_LAYERS_TIMES_HIDDEN = 1280
ODD_STEPS = 5
USABLE_SHARE = 0.85
"""Of the memory and the disk that are free."""


def make_jobs(modes: Sequence[str], sizes: Sizes, directory: Path, args: argparse.Namespace) -> list[OptimizerJob]:
    """One per mode.

    Args:
        modes: names.
        sizes: of the parameters.
        directory: on the drive.
        args: ``optimizer``, ``threads`` and ``master_weights``.
    """
    return [
        OptimizerJob(
            mode=mode,
            sizes=sizes,
            optimizer=args.optimizer,
            directory=str(directory),
            threads=args.threads,
            master_weights=args.master_weights,
        )
        for mode in modes
    ]


def free_now(directory: Path, device: str) -> Needs:
    """What may be planned with, in bytes."""
    host = host_available_bytes()
    on_device = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    known = (host if host is not None else sys.maxsize, on_device, shutil.disk_usage(directory).free)
    return Needs(*(round(USABLE_SHARE * nbytes) for nbytes in known))


def split(jobs: Sequence[OptimizerJob], free: Needs) -> list[list[OptimizerJob]]:
    """Groups whose processes fit side by side, in order."""
    groups: list[list[OptimizerJob]] = []
    for job in jobs:
        joined = [*groups[-1], job] if groups else [job]
        totals = [sum(values) for values in zip(*(job.needs for job in joined), strict=True)]
        if groups and all(total <= limit for total, limit in zip(totals, free, strict=True)):
            groups[-1] = joined
        else:
            groups.append([job])
    return groups


def run_group(index: int, group: Sequence[OptimizerJob], meter: DriveMeter, args: argparse.Namespace) -> list[Sample]:
    """Start the processes of a group and let them step in turns; then each saves its states.

    Raises:
        ChildDiedError: a mode's process has failed.
    """
    samples: list[Sample] = []
    with ExitStack() as stack:
        children = []
        for job in group:
            children.append(Child(job, module="recipes.benchmarks.workers.optimizer"))
            stack.callback(children[-1].close)
        described = {child.mode: child.answer() for child in children}
        for turn in range(args.warmup + args.steps):
            is_timed = turn >= args.warmup
            rates = meter.measure() if is_timed else None
            for child in [*children[turn % len(children) :], *children[: turn % len(children)]]:
                values = child.ask("step")
                values |= limits_of(values, rates)
                samples.append(Sample(child.mode, index, turn, is_timed, values, not is_timed))
                _tell(f"group {index + 1} turn {turn + 1}: {child.mode:10} {values['step_s']:.3f} s")
        for child in children:
            last = next(sample for sample in reversed(samples) if sample.mode == child.mode)
            last.values.update({"described": described[child.mode]}, **child.ask("checkpoint"))
    return samples


def limits_of(values: dict[str, Any], rates: DriveRates | None) -> dict[str, Any]:
    """How soon the drive could have moved what a step moved, in seconds; empty where nothing tells."""
    if rates is None or "written_bytes" not in values:
        return {}
    moved = values["written_bytes"], values["read_bytes"]
    limits = {"limit_s": rates.limit_s(*moved), "turned_limit_s": rates.turned_limit_s(*moved)}
    return limits | {"drive": asdict(rates)}


def run_part(
    jobs: Sequence[OptimizerJob], meter: DriveMeter, directory: Path, args: argparse.Namespace
) -> tuple[list[Sample], list[str]]:
    """All groups of a part. A mode that fails is left out, and its group begins anew.

    Returns:
        Samples, and the modes that failed.

    Raises:
        ChildDiedError: plain PyTorch has failed.
    """
    samples: list[Sample] = []
    refused: list[str] = []
    for index, group in enumerate(split(jobs, free_now(directory, args.device))):
        while group:
            try:
                samples += run_group(index, group, meter, args)
                break
            except ChildDiedError as error:
                if error.mode == BASELINE:
                    raise
                _tell(f"{error}; it is left out")
                refused.append(error.mode)
                group = [job for job in group if job.mode != error.mode]
    return samples, refused


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.optimizer", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}; any share".replace("%", "%%"))
    parser.add_argument("--part", default="all", choices=(*PARTS, "all"))
    parser.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    parser.add_argument("--profile", default="cpu", choices=list(PROFILES))
    parser.add_argument(
        "--master-weights", action=argparse.BooleanOptionalAction, help="float32 copies of weights; default: on a card"
    )
    parser.add_argument("--size", choices=list(SIZES), help="of the parameters; default: 350m, on a card: 1b")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    for name in ("hidden", "layers", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--steps", type=int, default=5, help="timed turns")
    parser.add_argument("--warmup", type=int, default=2, help="turns before these; the first one makes the states")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--limit-bytes", help="size of the files that measure the drive; default: 1GiB")
    parser.add_argument("--json", type=Path, help="write environment, samples and tables here")
    args = parser.parse_args(arguments)
    try:
        args.modes = parse_modes(args.modes)
        args.limit_bytes = parse_size(args.limit_bytes or ("16MiB" if args.tiny else "1GiB"), name="--limit-bytes")
    except ValueError as error:
        parser.error(str(error))
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps and --warmup begin at 1: the first step makes the states and reads nothing")
    if args.master_weights is None:
        args.master_weights = args.profile != "cpu"
    if args.master_weights and args.profile == "cpu":
        parser.error("--master-weights is for half-precision parameters; name --profile gpu")
    args.device = "cpu" if args.tiny or args.profile == "cpu" else "cuda"
    return args


def choose_sizes(args: argparse.Namespace) -> Sizes:
    """Size, then type and device of the profile, then single sizes."""
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--profile {args.profile} needs a CUDA device and there is none here; with --tiny it runs on the CPU")
    name = "tiny" if args.tiny else args.size or ("350m" if args.profile == "cpu" else "1b")
    single = {key: getattr(args, key) for key in ("hidden", "layers", "vocabulary")}
    sizes = replace(SIZES[name], **{key: value for key, value in single.items() if value is not None})
    dtype = "float32" if args.profile == "cpu" else "bfloat16"
    return replace(sizes, dtype=dtype, device=args.device)


def odd_sizes(sizes: Sizes, hidden: int) -> Sizes:
    """Of a width that fills no block of anything, and just large enough that most states move."""
    return replace(sizes, hidden=hidden, layers=max(1, ODD_LAYERS_TIMES_HIDDEN // hidden), vocabulary=1_009)


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run all parts."""
    sizes = choose_sizes(args)
    facts = environment("optimizer", args.threads, Shape(device=sizes.device))
    del facts["model"]  # nothing is trained
    facts["shape"] = asdict(sizes) | {"num_parameters": sizes.num_parameters, "optimizer": args.optimizer}
    tables: dict[str, list[dict[str, Any]]] = {}
    samples: dict[str, list[Sample]] = {}
    refused: dict[str, list[str]] = {}
    with ExitStack() as stack:
        meter = DriveMeter(directory, args.limit_bytes)
        stack.callback(meter.close)
        facts |= {"drive": meter.name, "rates": asdict(meter.measure())}
        print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
        parts: dict[str, tuple[Sizes, Sequence[str], argparse.Namespace]] = {"main": (sizes, args.modes, args)}
        brief = argparse.Namespace(**vars(args) | {"steps": ODD_STEPS - 1, "warmup": 1})
        parts |= {f"odd {hidden}": (odd_sizes(sizes, hidden), MODES, brief) for hidden in ODD_HIDDEN}
        for part, (chosen, modes, settings) in parts.items():
            if args.part not in ("all", part.split()[0]):
                continue
            print(f"\n## {part}\n", flush=True)
            jobs = make_jobs(modes, chosen, directory, args)
            samples[part], failed = run_part(jobs, meter, directory, settings)
            refused |= {part: failed} if failed else {}
            tables[part] = summarise(samples[part])
            show(tables[part])
    return {
        "environment": facts,
        "parts": tables,
        "refused": refused,
        "samples": {part: [asdict(sample) for sample in found] for part, found in samples.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when bits differ or a mode has failed."""
    args = parse_arguments(arguments)
    with spill_directory(args.dir, "bench_optimizer") as directory:
        begin = time.perf_counter()
        try:
            content = run(args, directory)
        except ChildDiedError as error:
            sys.exit(str(error))
        print(f"\nTook {time.perf_counter() - begin:.0f} s.")
    if args.json:
        args.json.write_text(json.dumps(content, indent=1))
    wrong = broken(content["parts"], content["refused"])
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
