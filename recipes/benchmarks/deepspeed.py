"""Optimizer states on the drive, against DeepSpeed's ZeRO-3 with its optimizer on NVMe, on the same model and drive.

    python -m recipes.benchmarks.deepspeed --dir DIR [--steps 5] [--json FILE]
    python -m recipes.benchmarks.deepspeed --part odd            # widths at which biases are no multiple of 512 bytes
    python -m recipes.benchmarks.deepspeed --tiny                # a toy size, to try the recipe itself

DeepSpeed is not among this project's requirements: ``pip install deepspeed`` into an environment that has this project
as well (its parts are compiled at first use, which takes a C++ compiler and libaio's headers), and run the recipe
there; or leave it out with ``--modes torch,ours``. A GPT-2 trains with AdamW in a process for each mode; the processes
take turns, step by step. "update" is the optimizer's step up to its last write. DeepSpeed's AdamW rounds otherwise than
PyTorch's, so that its losses differ in late digits where all is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.benchmarks.harness.process import Child, ChildDiedError
from recipes.benchmarks.harness.shapes import TINY, Shape
from recipes.benchmarks.step import environment, spill_directory
from recipes.benchmarks.workers.deepspeed import MODES, RivalJob

PARTS: dict[str, list[Shape]] = {
    "main": [Shape(layers=16, width=1024, heads=16, sequence=128, batch=2, vocabulary=65_536)],
    "odd": [
        Shape(layers=4, width=320, heads=5, sequence=64, batch=2, vocabulary=4_096),
        Shape(layers=2, width=960, heads=15, sequence=64, batch=2, vocabulary=4_096),
    ],
}
OURS = ("ours", "ours_cached")
MIB = 1 << 20


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.deepspeed", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--part", choices=list(PARTS), default="main")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    parser.add_argument("--json", type=Path, help="write environment and rows here")
    args = parser.parse_args(arguments)
    args.modes = [mode.strip() for mode in args.modes.split(",") if mode.strip()]
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown or not args.modes:
        parser.error(f"--modes has {', '.join(unknown) or 'nothing'}; allowed: {', '.join(MODES)}")
    if args.steps < 1 or args.warmup < 0:
        parser.error(f"--steps {args.steps} --warmup {args.warmup}; allowed: at least one step, no negative warm-up")
    if "deepspeed" in args.modes and importlib.util.find_spec("deepspeed") is None:
        parser.error(
            "DeepSpeed is not installed here; `pip install deepspeed` (it needs a C++ compiler and libaio's headers), "
            "or leave it out: --modes torch,ours"
        )
    return args


def measure(shape: Shape, directory: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All modes on one shape, in turns; a row each."""
    samples: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    with ExitStack() as stack:
        children = []
        for mode in args.modes:
            folder = directory / mode
            folder.mkdir()
            child = Child(
                RivalJob(mode, shape, str(folder), args.threads), module="recipes.benchmarks.workers.deepspeed"
            )
            stack.callback(child.close)
            child.answer()
            children.append(child)
        for turn in range(args.warmup + args.steps):
            # In an order that rotates, so that nobody always comes after the same one.
            for child in [*children[turn % len(children) :], *children[: turn % len(children)]]:
                answer = child.ask("step")
                samples[child.mode].append(answer)
                print(f"turn {turn + 1}: {child.mode:10} update {answer['settled_s']:.2f} s", file=sys.stderr)
    return [summarise(mode, found, args.warmup) for mode, found in samples.items()]


def summarise(mode: str, samples: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Medians of the timed steps; the peak, loss and weights of the whole run."""
    timed = samples[warmup:]
    medians = {
        name: statistics.median(sample[name] for sample in timed)
        for name in ("forward_s", "backward_s", "update_s", "settled_s", "step_s")
    }
    return {
        "mode": mode,
        **medians,
        "peak_bytes": max(sample["host_peak_bytes"] for sample in timed),
        "losses": [sample["loss"] for sample in samples],
        "weights": [sample["weights"] for sample in samples],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, and what it says of the bits."""
    print(f"\n| mode | forward s | backward s | update s | step s | peak MiB | last loss |\n{'|---' * 7}|")
    for row in rows:
        seconds = " | ".join(f"{row[name]:.2f}" for name in ("forward_s", "backward_s", "settled_s", "step_s"))
        print(f"| {row['mode']} | {seconds} | {row['peak_bytes'] / MIB:,.0f} | {row['losses'][-1]:.6f} |")
    found = {row["mode"]: row for row in rows}
    print()
    for mode in OURS:
        if {"torch", mode} <= set(found):
            equal = all(found["torch"][name] == found[mode][name] for name in ("losses", "weights"))
            print(f"{mode}: losses and weights {'equal' if equal else 'NOT EQUAL'} to torch's, bit for bit")
        if {mode, "deepspeed"} <= set(found):
            ratio = found["deepspeed"]["settled_s"] / found[mode]["settled_s"]
            print(f"update of {mode}: {ratio:.2f} times as fast as DeepSpeed's")
    if {"torch", "deepspeed"} <= set(found):
        pairs = zip(found["torch"]["losses"], found["deepspeed"]["losses"], strict=True)
        print(f"largest difference of a loss of DeepSpeed's: {max(abs(a - b) for a, b in pairs):.2e}")


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Every shape of a part."""
    tables = []
    for shape in PARTS[args.part]:
        shape = replace(TINY, width=shape.width // 16) if args.tiny else shape
        facts = environment("deepspeed", args.threads, shape)
        print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            rows = measure(shape, Path(folder), args)
        show(rows)
        tables.append({"environment": facts, "rows": rows})
    return {"tables": tables}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when our bits differ from PyTorch's. Speed is only reported."""
    args = parse_arguments(arguments)
    with spill_directory(args.dir, "bench_deepspeed") as directory:
        try:
            content = run(args, directory)
        except ChildDiedError as error:
            sys.exit(str(error))
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=1))
    for table in content["tables"]:
        found = {row["mode"]: (row["losses"], row["weights"]) for row in table["rows"]}
        if "torch" in found and any(found[mode] != found["torch"] for mode in OURS if mode in found):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
