"""Weights, gradients and states that wait on a drive, against keeping them: step time, bytes moved, peak, equality.

    python -m recipes.benchmarks.parameters --dir DIR [--part compute,drive] [--task full,lora] [--json FILE]
    python -m recipes.benchmarks.parameters --tiny            # a toy size, to try the recipe itself

A GPT is trained with AdamW in float32 on a CPU, whole (``full``) or by adapters alone (``lora``). Saved activations are
kept in all modes. Each mode is a process of its own; they take turns in an order that rotates, and a step is compared
with keep's step of the same turn.

- ``compute``: memory for all of it and many tokens, so that computing takes the time. ``states`` has states of the
  optimizer alone on the drive, ``away`` weights and gradients as well; ``keep_again`` is a second keep.
- ``drive``: few tokens, in a control group whose memory does not hold the weights, so that bytes must move; ``keep``
  has no limit. The drive's rate is measured in each turn, both directions at once and one after the other; the bound
  is the sooner of the two, for the bytes that the drive has moved. A turn is several steps, of which the first is not
  timed: what the page cache has deferred of one step is written in the next.

Bytes are the kernel's: of the process, and of the whole drive (leave it alone meanwhile). A peak is that of the
resident set (VmHWM: anonymous memory and mapped files, not the page cache) above what the process held before it made
the model.

Exit codes: 0; 1: losses or weights differ from keep's; 3: this machine, or this user, can make no memory control group.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lightning_ssd.common.validation import parse_size
from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.harness.drive import DriveMeter
from recipes.benchmarks.harness.process import Child
from recipes.benchmarks.harness.tables import quartiles
from recipes.benchmarks.memory_limit import NO_GROUP, memory_group
from recipes.benchmarks.step import environment, spill_directory
from recipes.benchmarks.workers.parameters import ParametersJob, Sizes

__all__ = ["bound_bytes", "expected_bytes", "main", "summarise"]

PARTS, TASKS = ("compute", "drive"), ("full", "lora")
_SIZES = {
    "compute": Sizes(layers=8, width=768, heads=12, sequence=512, batch=4),
    "drive": Sizes(layers=14, width=1280, heads=8, sequence=64, batch=1),
    "tiny": Sizes(layers=4, width=512, heads=4, sequence=32, batch=1, vocabulary=512),
}
_MODES = {
    ("compute", "full"): ("keep", "states", "away", "keep_again"),
    ("compute", "lora"): ("keep", "frozen_away", "keep_again"),
    ("drive", "full"): ("keep", "away"),
    ("drive", "lora"): ("keep", "frozen_away"),
}
_STATE_RATIO = 2
"""Bytes of AdamW's states for each byte of a float32 weight."""
_MIB, _MB = 1 << 20, 1e6
_TOLERANCE = 1.1
Values = dict[str, Any]


def expected_bytes(facts: Mapping[str, Any], mode: str) -> tuple[int, int]:
    """Read and written by a step of which nothing stays in the page cache: the formula of ``docs/parameters.md``.

    Args:
        facts: of the model.
        mode: name.
    """
    weights, trained = facts["parameter_bytes"] - facts["small_bytes"], facts["trained_bytes"]
    if mode == "frozen_away":
        return 2 * weights, 0
    states = _STATE_RATIO * trained
    return 3 * weights + weights + states, weights + weights + states


def bound_bytes(facts: Mapping[str, Any], rest: Mapping[str, Any], activation_bytes: int, mode: str) -> int:
    """What may be in memory at a time: two units' weights, slots, what is small, activations.

    Where gradients wait, two units of them and those of what is small; else all of them and their states, which stay.
    """
    units, stays = 2 * facts["largest_unit_bytes"] + facts["small_bytes"], (1 + _STATE_RATIO) * facts["trained_bytes"]
    if mode == "away":
        stays = units
    return round(_TOLERANCE * (units + stays + rest["slots_bytes"] + activation_bytes))


def summarise(samples: Sequence[Values], facts: Mapping[str, Values]) -> list[Values]:
    """One row per mode.

    Args:
        samples: of timed turns; each has ``mode``, ``turn``, means of the turn's steps, and ``drive_s``.
        facts: by mode: sizes, the rest, the digest.
    """
    keep = {sample["turn"]: sample for sample in samples if sample["mode"] == "keep"}
    states = {sample["turn"]: sample for sample in samples if sample["mode"] == "states"}
    rows = []
    for mode, fact in facts.items():
        mine = [sample for sample in samples if sample["mode"] == mode]
        row: Values = {"mode": mode, "step_s": median(sample["step_s"] for sample in mine)}
        row |= _ratio("of_keep", [sample["step_s"] / keep[sample["turn"]]["step_s"] for sample in mine])
        if states and mode == "away":
            row |= _ratio("of_states", [sample["step_s"] / states[sample["turn"]]["step_s"] for sample in mine])
        for name in mine[0]:
            if name.endswith("_bytes") or name in ("forward_s", "backward_s", "update_s", "system_s", "major_faults"):
                row[name] = median(sample[name] for sample in mine)
        row["stall"] = sum(sample["stall_s"] for sample in mine) / sum(sample["step_s"] for sample in mine)
        row["peak_bytes"] = max(sample["peak_bytes"] for sample in mine) - fact["empty_bytes"]
        if mode in ("away", "frozen_away"):
            row["bound_bytes"] = bound_bytes(fact, fact, facts["keep"]["activation_bytes"], mode)
            row["expected_read_bytes"], row["expected_written_bytes"] = expected_bytes(fact, mode)
            if all("drive_s" in sample for sample in mine):
                bounds = [max(sample["drive_s"], keep[sample["turn"]]["step_s"]) for sample in mine]
                row |= _ratio("of_bound", [s["step_s"] / bound for s, bound in zip(mine, bounds, strict=True)])
                row["bound_s"] = median(bounds)
        row["equal"] = fact["losses"] == facts["keep"]["losses"] and fact["weights"] == facts["keep"]["weights"]
        rows.append(row)
    return rows


def _ratio(name: str, values: list[float]) -> Values:
    low, high = quartiles(values)
    return {name: median(values), f"{name}_low": low, f"{name}_high": high}


def show(title: str, rows: Sequence[Values]) -> None:
    """As a table in Markdown."""
    print(
        f"\n## {title}\n\n| mode | step, s | / keep (quartiles) | / states | / drive bound | stall | read, MB: "
        f"process, drive, formula | written, MB | peak, MiB | allowed | equal |\n{'|---' * 11}|"
    )
    for row in rows:
        ratios = [_shown(row, name) for name in ("of_keep", "of_states", "of_bound")]
        moved = [
            ", ".join(
                f"{row[name] / _MB:,.0f}"
                for name in (f"process_{way}_bytes", f"drive_{way}_bytes", f"expected_{way}_bytes")
                if name in row
            )
            for way in ("read", "written")
        ]
        allowed = f"{row['bound_bytes'] / _MIB:,.0f}" if "bound_bytes" in row else ""
        print(
            f"| {row['mode']} | {row['step_s']:.2f} | {' | '.join(ratios)} | {100 * row['stall']:.1f} % | {moved[0]} | "
            f"{moved[1]} | {row['peak_bytes'] / _MIB:,.0f} | {allowed} | {'yes' if row['equal'] else '**no**'} |"
        )


def _shown(row: Values, name: str) -> str:
    return f"{row[name]:.3f} ({row[f'{name}_low']:.2f}-{row[f'{name}_high']:.2f})" if name in row else ""


def _take_turn(child: Child, turn: int, args: argparse.Namespace, part: str) -> list[Values]:
    """Steps in a row; those that count, with the turn's number."""
    num_steps = args.turn_steps if part == "drive" else 1
    steps = [child.ask("step") for _ in range(num_steps)]
    for number, values in enumerate(steps):
        counts = turn >= args.warmup and (number > 0 or num_steps == 1)
        values |= {"mode": child.mode, "turn": turn, "is_timed": counts}
    print(
        f"turn {turn + 1}: {child.mode:12} " + ", ".join(f"{values['step_s']:.2f}" for values in steps) + " s",
        file=sys.stderr,
        flush=True,
    )
    return steps


def _of_turn(steps: Sequence[Values]) -> Values:
    """Means of a turn's timed steps; the peak is the largest."""
    timed = [values for values in steps if values["is_timed"]]
    numbers = {name for name, value in timed[0].items() if isinstance(value, (int, float))} - {"turn", "is_timed"}
    means = {name: sum(values[name] for values in timed) / len(timed) for name in sorted(numbers)}
    return means | {
        "mode": timed[0]["mode"],
        "turn": timed[0]["turn"],
        "peak_bytes": max(values["peak_bytes"] for values in timed),
    }


def measure(part: str, task: str, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One part of one task: all modes side by side.

    Raises:
        GroupUnavailableError: there can be no memory control group.
        ChildDiedError: a mode's process has failed.
    """
    sizes = _SIZES["tiny" if args.tiny else part]
    steps: list[Values] = []
    samples: list[Values] = []
    facts: dict[str, Values] = {}
    with ExitStack() as stack:
        meter = DriveMeter(directory, args.limit_bytes) if part == "drive" else None
        if meter is not None:
            stack.callback(meter.close)
        children = []
        for mode in _MODES[part, task]:
            procs = None
            if part == "drive" and mode != "keep":
                procs = stack.enter_context(memory_group(args.memory)).procs
            job = ParametersJob(mode, sizes, task == "lora", str(directory), args.threads)
            children.append(Child(job, module="recipes.benchmarks.workers.parameters", procs=procs))
            stack.callback(children[-1].close)
            facts[mode] = children[-1].answer()
        begin_s = time.monotonic()
        for turn in range(args.warmup + args.turns):
            if turn > args.warmup and time.monotonic() - begin_s > args.within:
                break
            rates = None if meter is None else meter.measure()
            for child in [*children[turn % len(children) :], *children[: turn % len(children)]]:
                taken = _take_turn(child, turn, args, part)
                steps += taken
                if turn >= args.warmup:
                    samples.append(_of_turn(taken))
                    if rates is not None:
                        moved = samples[-1]["drive_written_bytes"], samples[-1]["drive_read_bytes"]
                        soonest_s = min(rates.limit_s(*moved), rates.turned_limit_s(*moved))
                        samples[-1] |= {"rates": asdict(rates), "drive_s": soonest_s}
        for child in children:
            facts[child.mode] |= child.ask("rest") | child.ask("digest")
            facts[child.mode]["losses"] = [values["loss"] for values in steps if values["mode"] == child.mode]
        facts["keep"] |= children[0].ask("account")
    rows = summarise(samples, facts)
    show(f"{part}, {task}: {facts['keep']['parameter_bytes'] / _MIB:,.0f} MiB of weights", rows)
    return {"sizes": asdict(sizes), "facts": facts, "summary": rows, "turns": samples, "steps": steps}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.parameters", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--part", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--task", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--memory", help="of the control group of a part drive; default: 768MiB")
    parser.add_argument("--turns", type=int, default=8, help="timed ones")
    parser.add_argument("--warmup", type=int, default=2, help="turns before these")
    parser.add_argument("--turn-steps", type=int, default=3, help="in a part drive; the first is not timed")
    parser.add_argument("--within", type=float, default=1e9, help="begin no turn after so many seconds of a part")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    parser.add_argument("--json", type=Path, help="write environment, turns and summaries here")
    args = parser.parse_args(arguments)
    args.part, args.task = args.part.split(","), args.task.split(",")
    if not (set(args.part) <= set(PARTS) and set(args.task) <= set(TASKS)):
        parser.error(f"--part is of {', '.join(PARTS)}, --task of {', '.join(TASKS)}")
    if args.turns < 1 or args.warmup < 1 or args.turn_steps < 2:
        parser.error("--turns and --warmup begin at 1, --turn-steps at 2: the first step makes the states")
    args.memory = parse_size(args.memory or ("600MiB" if args.tiny else "768MiB"), name="--memory")
    args.limit_bytes = parse_size("16MiB" if args.tiny else "512MiB", name="the drive's files")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is told at the top of this file."""
    args = parse_arguments(arguments)
    content: dict[str, Any] = {"environment": environment("parameters", args.threads), "parts": {}}
    print(*(f"{key}: {value}" for key, value in content["environment"].items()), sep="\n", flush=True)
    with spill_directory(args.dir, "bench_parameters") as directory:
        for part in args.part:
            for task in args.task:
                try:
                    content["parts"][f"{part}, {task}"] = measure(part, task, directory, args)
                except GroupUnavailableError as error:
                    print(f"no memory control group can be made here: {error}", file=sys.stderr)
                    return NO_GROUP
    if args.json is not None:
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    rows = [row for found in content["parts"].values() for row in found["summary"]]
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
