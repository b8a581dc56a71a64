"""Do plans keep their promises? Speed under a budget and on slow drives, budgets kept, predictions right, bits equal.

    python -m recipes.benchmarks.plan --dir DIR [--shape small|tall|wide] [--json FILE]
    python -m recipes.benchmarks.plan --parts budget,violations --steps 8
    python -m recipes.benchmarks.plan --tiny                   # a toy size, to try the recipe itself
    python -m recipes.benchmarks.plan --profile gpu --dir DIR  # one CUDA card: h100 or h200, by its memory

Parts:
    budget      at 40 % of what keep holds, against keep
    throttle    ``auto`` on a drive at 200 MB/s and at 50 MB/s, against keep, with whatever saving remains
    violations  many steps of a small model under three budgets: how often the resident peak is above
    mixed       a budget that moving alone cannot meet in time, since the drive is slow, against recomputing every block

Every mode trains in turns with a keep of its own, as in ``recipes.benchmarks.step``; its bits are compared with keep's
in every step. A slow drive is one that the kernel throttles, where this machine allows it
(``recipes.benchmarks.harness.throttle``). Predicted and measured are compared for every plan of every part.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipes.benchmarks.harness.groups import Measured, run_groups
from recipes.benchmarks.harness.mode_names import parse_mode
from recipes.benchmarks.harness.process import ChildDiedError
from recipes.benchmarks.harness.shapes import TINY_PLANNED, Shape, choose_shape
from recipes.benchmarks.harness.tables import Sample, show, summarise
from recipes.benchmarks.harness.targets import Verdict, judge, show_verdicts
from recipes.benchmarks.step import (
    add_run_arguments,
    complete,
    environment,
    show_determinism,
    show_throttles,
    spill_directory,
)

PARTS: dict[str, list[list[str]]] = {
    "budget": [["keep", "budget=40%"]],
    "throttle": [["keep", "auto@200MB/s"], ["keep", "auto@50MB/s"]],
    "violations": [["keep", "budget=40%", "budget=60%", "budget=80%"]],
    "mixed": [["keep", "recompute", "budget=30%@50MB/s"], ["keep", "ssd@50MB/s"]],
}
VIOLATION_STEPS = 200
TINY_VIOLATION_STEPS = 4
FEW_STEPS = 10


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--violation-steps", type=int, help=f"per budget; default: {VIOLATION_STEPS}")
    parser.add_argument("--json", type=Path, help="write environment, rows and verdicts here")
    add_run_arguments(parser, rounds=1, steps=5, warmup=2)
    args = parser.parse_args(arguments)
    args.parts = [part.strip() for part in args.parts.split(",") if part.strip()]
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown or not args.parts:
        parser.error(f"--parts has {', '.join(unknown) or 'nothing'}; allowed: {', '.join(PARTS)}")
    args.violation_steps = args.violation_steps or (TINY_VIOLATION_STEPS if args.tiny else VIOLATION_STEPS)
    return args


def small_model(shape: Shape) -> Shape:
    """For many steps: the toy model, on the same device with the same precision."""
    return replace(TINY_PLANNED, device=shape.device, autocast=shape.autocast)


def run_part(part: str, args: argparse.Namespace, shape: Shape, directory: Path) -> Measured:
    """One part; prints its tables."""
    print(f"\n## {part}\n", flush=True)
    if part != "violations":
        return run_groups(PARTS[part], shape, directory, args, rounds=args.rounds)
    many = copy(args)
    many.steps = math.ceil(args.violation_steps / args.turn_steps)
    return run_groups(PARTS[part], small_model(shape), directory, many)


def limits(args: argparse.Namespace, samples: Sequence[Sample]) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = []
    if args.tiny:
        found.append("a toy size: the numbers say that the recipe works, and nothing else")
    if args.rounds * args.steps < FEW_STEPS:
        found.append(f"{args.rounds * args.steps} timed turns per mode: single seconds mean little, paired ratios some")
    if os.getloadavg()[0] > (os.cpu_count() or 1) + args.threads:
        found.append("others use this machine at the same time")
    described = {sample.mode: sample.values["described"] for sample in samples if "described" in sample.values}
    wrapped = [mode for mode, said in described.items() if "token bucket" in (said.get("throttle") or "")]
    if wrapped:
        found.append(f"no control group could throttle the drive for {', '.join(wrapped)}; a wrapper of ours did")
    planned = {sample.mode for sample in samples if "plan" in sample.values and not sample.warmup}
    unplanned = [mode for mode in described if parse_mode(mode).is_planned and mode not in planned]
    if unplanned:
        found.append(f"no plan was in force for {', '.join(unplanned)}")
    return found


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All parts, then the verdicts."""
    shape = choose_shape(args, tiny=TINY_PLANNED)
    complete(args, shape)
    facts = environment("plan", args.threads, shape)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
    tables: dict[str, list[dict[str, Any]]] = {}
    samples: list[Sample] = []
    refused: dict[str, list[str]] = {}
    for part in args.parts:
        measured = run_part(part, args, shape, directory)
        tables[part] = summarise(measured.samples)
        show(tables[part])
        show_throttles(measured.samples)
        show_determinism(measured.samples)
        samples += measured.samples
        if measured.refused:
            refused[part] = measured.refused
            print(f"failed, see the messages above: {', '.join(measured.refused)}")
    verdicts: list[Verdict] = judge(tables, refused)
    notes = limits(args, samples)
    show_verdicts(verdicts)
    print(*("\nLimits:", *(f"- {note}" for note in notes)) if notes else "", sep="\n")
    return {
        "environment": facts,
        "parts": tables,
        "refused": refused,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "limits": notes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when bits differ, a budget was not kept, or a mode has failed. Speed is only reported."""
    args = parse_arguments(arguments)
    with spill_directory(args.dir, "bench_plan") as directory:
        try:
            content = run(args, directory)
        except ChildDiedError as error:
            sys.exit(str(error))
    if args.json:
        args.json.write_text(json.dumps(content, indent=1))
    broken = any(verdict["is_promise"] and not verdict["is_reached"] for verdict in content["verdicts"])
    return 1 if broken or content["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
