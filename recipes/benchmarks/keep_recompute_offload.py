"""The recompute-offload-keep curve: throughput against the peak of saved activations, measured and predicted.

    python -m recipes.benchmarks.keep_recompute_offload --dir DIR --output DIR [--budgets 20%,30%,40%,60%,80%]
    python -m recipes.benchmarks.keep_recompute_offload --tiny --output DIR  # a few minutes, to try the recipe itself
    python -m recipes.benchmarks.keep_recompute_offload --profile gpu --dir DIR --output DIR  # on a CUDA card
    python -m recipes.benchmarks.keep_recompute_offload --draw DIR/rok.json --output DIR  # the picture anew

As in SSDTrain (arXiv 2408.10013, Fig. 7), each way to train is one point. Modes: everything kept, everything moved,
planned under several budgets, each block recomputed with its inputs kept or moved, and, on a throttled drive, a plan
that mixes all of these. Each trains next to a keep of its own, as in ``recipes.benchmarks.step``; its throughput is
that of all keeps times the median of its paired ratios. The lines are what the planner says for a range of budgets,
from one profiled pass and the measured rates of the drive. The peak of the two modes that recompute every block is what
was counted plus one block, since nobody can count what a checkpoint computes again. Writes ``rok.json`` and
``rok.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ssd.planning.plan import Machine, PlanObjective
from lightning_ssd.planning.planner import BudgetTooSmall, make_plan, smallest_budget
from lightning_ssd.planning.trace import Trace
from recipes.benchmarks.harness.curve_plot import draw
from recipes.benchmarks.harness.groups import run_groups, split
from recipes.benchmarks.harness.mode_names import BASELINE, parse_mode, parse_modes
from recipes.benchmarks.harness.process import ChildDiedError
from recipes.benchmarks.harness.profile_json import machine_from_json, trace_from_json
from recipes.benchmarks.harness.shapes import TINY_PLANNED, Shape, choose_shape
from recipes.benchmarks.harness.tables import Sample, show, summarise
from recipes.benchmarks.step import (
    add_run_arguments,
    complete,
    environment,
    show_determinism,
    show_throttles,
    spill_directory,
)

BUDGETS = "20%,30%,40%,60%,80%"
TINY_BUDGETS = "50%,75%"
RECOMPUTING = ("ours_recompute", "recompute_offload")
NUM_PREDICTED = 24
TINY_NUM_PREDICTED = 8


def sweep(budgets: Sequence[str], throttle: str) -> list[str]:
    """The modes: keep, all budgets on the drive as it is, and each on the throttled one, where plans must mix."""
    planned = [f"budget={budget}" for budget in budgets]
    mixed = [f"budget={budget}@{throttle}" for budget in budgets[: max(1, len(budgets) // 2)]] if throttle else []
    return [BASELINE, "ssd", "auto", *planned, "ours_recompute", "recompute_offload", *mixed]


def points(rows: Sequence[dict[str, Any]], num_tokens: int, block_bytes: int | None) -> list[dict[str, Any]]:
    """One per mode whose peak of saved activations is known.

    Args:
        rows: as ``tables.summarise`` gives them.
        num_tokens: per step.
        block_bytes: what the largest block saves. No hook sees what a checkpoint computes again, so this is added to
            what was counted where every block is recomputed; ``None``, unknown: those modes give no point.
    """
    keep_s = next(row["step_s"] for row in rows if row["mode"] == BASELINE)
    found = []
    for row in rows:
        unseen_bytes = block_bytes if parse_mode(row["mode"]).kind in RECOMPUTING else 0
        if row["resident_bytes"] is None or row["step_ratio"] is None or unseen_bytes is None:
            continue
        step_s = keep_s * row["step_ratio"]
        names = ("mode", "step_ratio", "step_ratio_quartiles", "equal", "num_over_budget", "step_error", "peak_error")
        found.append(
            {name: row[name] for name in names if name in row}
            | {"counted_bytes": row["resident_bytes"], "peak_bytes": row["resident_bytes"] + unseen_bytes}
            | {"step_s": step_s, "tokens_per_s": num_tokens / step_s}
        )
    return found


def largest_block_bytes(trace: Trace) -> int:
    """What the largest block saves beyond its inputs, which it keeps when it is recomputed."""
    inner = [0] * len(trace.blocks)
    for storage in trace.storages:
        if storage.block >= 0:
            inner[storage.block] += storage.nbytes
    return max(inner, default=0)


def predicted_curve(
    trace: Trace, machine: Machine, *, recompute: bool, other_s: float, num_tokens: int, num_points: int
) -> list[dict[str, Any]]:
    """What the planner says for budgets from the smallest possible one to keeping everything.

    Args:
        trace: the profiled pass.
        machine: the measured rates.
        recompute: whether plans may recompute blocks.
        other_s: seconds of a step outside of forward and backward.
        num_tokens: per step.
        num_points: budgets to try, evenly spaced.
    """
    goal = PlanObjective(recompute=recompute)
    low, high = smallest_budget(trace, machine, goal), trace.saved_peak_bytes
    curve = []
    for index in range(num_points):
        budget = round(low + (high - low) * index / max(1, num_points - 1))
        try:
            plan = make_plan(trace, machine, replace(goal, budget_bytes=budget))
        except BudgetTooSmall:
            continue  # between the least budget known and the next, some may be out of reach
        said = plan.prediction
        curve.append(
            {
                "budget_bytes": budget,
                "peak_bytes": said.peak_bytes,
                "tokens_per_s": num_tokens / (said.step_s + other_s),
                "step_s": said.step_s + other_s,
                "stall_s": said.stall_s,
                "written_bytes": said.written_bytes,
                "num_recomputed": len(plan.recompute),
            }
        )
    return curve


def profiles(samples: Sequence[Sample]) -> dict[str, tuple[Trace, Machine]]:
    """Per planned mode the profiled pass and the rates."""
    found = {}
    for sample in samples:
        profile = sample.values.get("described", {}).get("profile")
        if profile and sample.mode not in found:
            found[sample.mode] = (trace_from_json(profile["trace"]), machine_from_json(profile["machine"]))
    return found


def profiled_trace(found: Mapping[str, tuple[Trace, Machine]]) -> Trace | None:
    """The first one of a pass without recomputation, which is the only one that tells what every block saves."""
    return next((trace for trace, _ in found.values() if not trace.recomputed), None)


def curves(
    found: Mapping[str, tuple[Trace, Machine]], *, other_s: float, num_tokens: int, num_points: int
) -> list[dict[str, Any]]:
    """The predicted lines, all from one trace, two per drive; none without a trace.

    Args:
        found: profiles per mode.
        other_s: as for :func:`predicted_curve`.
        num_tokens: likewise.
        num_points: likewise.
    """
    trace = profiled_trace(found)
    if trace is None:
        print("no profiled pass without recomputation: nothing can be predicted", file=sys.stderr)
        return []
    # One machine per drive: the first mode that used it.
    drives = {parse_mode(mode).throttle: machine for mode, (_, machine) in reversed(found.items())}
    lines = []
    for throttle, machine in sorted(drives.items(), key=lambda item: item[0] or ""):
        for recompute in (False, True) if trace.blocks else (False,):
            curve = predicted_curve(
                trace, machine, recompute=recompute, other_s=other_s, num_tokens=num_tokens, num_points=num_points
            )
            what = "keep, offload, recompute" if recompute else "keep, offload"
            label = f"{what}; drive at {throttle}" if throttle else f"{what}; drive as it is"
            lines.append({"label": label, "throttle": throttle, "recompute": recompute, "points": curve})
    return lines


def seconds_besides(samples: Sequence[Sample]) -> float:
    """What a step of keep takes outside of forward and backward: median."""
    keep = [sample.values for sample in samples if sample.mode == BASELINE and sample.timed]
    return statistics.median(values["step_s"] - values["forward_s"] - values["backward_s"] for values in keep)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.keep_recompute_offload", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/rok"), help="where the results go")
    parser.add_argument("--budgets", help=f"sizes or shares of what keep holds; default: {BUDGETS.replace('%', '%%')}")
    parser.add_argument("--throttle", default="50MB/s", help="rate for the mixed plans; empty: none of them")
    parser.add_argument("--modes", help="instead of the sweep, as for recipes.benchmarks.step")
    parser.add_argument("--together", type=int, help="processes side by side; default: 2, with --tiny all")
    parser.add_argument("--draw", type=Path, help="a rok.json to draw, instead of measuring")
    add_run_arguments(parser, rounds=1, steps=3, warmup=1)
    args = parser.parse_args(arguments)
    budgets = (args.budgets or (TINY_BUDGETS if args.tiny else BUDGETS)).split(",")
    try:
        args.modes = parse_modes(args.modes or ",".join(sweep([budget.strip() for budget in budgets], args.throttle)))
    except ValueError as error:
        parser.error(f"the sweep has {error}")
    if BASELINE not in args.modes:
        parser.error(
            f"--modes={','.join(args.modes)}; allowed: a list with {BASELINE}, which all others are paired with"
        )
    return args


def measure(args: argparse.Namespace, shape: Shape, directory: Path) -> dict[str, Any]:
    """Run the sweep; prints the tables."""
    facts = environment("keep_recompute_offload", args.threads, shape)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n", flush=True)
    groups = split(args.modes, args.together or (len(args.modes) if args.tiny else 2))
    measured = run_groups(groups, shape, directory, args, rounds=args.rounds)
    rows = summarise(measured.samples)
    show(rows)
    show_throttles(measured.samples)
    show_determinism(measured.samples)
    found = profiles(measured.samples)
    trace = profiled_trace(found)
    lines = curves(
        found,
        other_s=seconds_besides(measured.samples),
        num_tokens=shape.num_tokens,
        num_points=TINY_NUM_PREDICTED if args.tiny else NUM_PREDICTED,
    )
    return {
        "environment": facts,
        "num_tokens": shape.num_tokens,
        "points": points(rows, shape.num_tokens, largest_block_bytes(trace) if trace is not None else None),
        "curves": lines,
        "refused": measured.refused,
        "summary": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and draw; 1 when any mode's numbers differ from keep's or one has failed."""
    args = parse_arguments(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.draw:
        content = json.loads(args.draw.read_text())
    else:
        shape = choose_shape(args, tiny=TINY_PLANNED)
        complete(args, shape)
        with spill_directory(args.dir, "rok") as directory:
            try:
                content = measure(args, shape, directory)
            except ChildDiedError as error:
                sys.exit(str(error))
        (args.output / "rok.json").write_text(json.dumps(content, indent=1))
    draw(content, args.output / "rok.png")
    for mode in content["refused"]:
        print(f"{mode}: failed, see its message above")
    print(f"written: {args.output / 'rok.png'}")
    return 1 if content["refused"] or not all(point["equal"] for point in content["points"]) else 0


if __name__ == "__main__":
    sys.exit(main())
