"""A model in too little memory, by us and by what users would take instead: bits, peak and time on one drive.

    python -m recipes.benchmarks.rivals --dir DIR --limit 1.5GiB [--steps 4] [--json FILE]
    python -m recipes.benchmarks.rivals --dir DIR --part adapters      # LoRA: all but small adapters is frozen
    python -m recipes.benchmarks.rivals --dir DIR --part states        # optimizer states alone on the drive
    python -m recipes.benchmarks.rivals --modes plain,ours,swap,fsdp2  # what needs no other package
    python -m recipes.benchmarks.rivals --tiny                         # a toy size, to try the recipe itself

A GPT-2 trains with AdamW in a process for each mode; the processes take turns, step by step, in an order that rotates.
After each step whatever the page cache has taken is written (``sync``), and counts: "step" is the time until all bytes
are on the drive, "update" the optimizer's part of it. The peak is that of the process. With ``--limit`` a row
``ours:limited`` trains in a memory control group of that size, whose page cache counts as well, so that it cannot stand
in for the drive. At the end the weights are compared with plain PyTorch's, bit for bit. DeepSpeed's AdamW rounds
otherwise than PyTorch's; its weights differ where all is right, and its loss tells whether it has learnt the same.

accelerate and DeepSpeed are not among this project's requirements: ``pip install accelerate deepspeed`` into an
environment that has this project as well (DeepSpeed's parts are compiled at first use, which takes a C++ compiler,
libaio's headers and minutes), and run the recipe there.
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

from lightning_ssd.common.validation import parse_size
from lightning_ssd.errors import ConfigError
from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.harness.process import Child, ChildDiedError
from recipes.benchmarks.harness.shapes import TINY, Shape
from recipes.benchmarks.memory_limit import memory_group
from recipes.benchmarks.step import environment, spill_directory
from recipes.benchmarks.workers.contenders import CONTENDERS, PACKAGES
from recipes.benchmarks.workers.rivals import RivalsJob

SHAPE = Shape(layers=16, width=1024, heads=16, sequence=128, batch=2, vocabulary=16_384)
PARTS = {
    "all": ("plain", "swap", "fsdp2", "accelerate", "deepspeed", "ours"),
    "adapters": ("plain", "accelerate", "ours"),
    "states": ("plain", "deepspeed_states", "ours_states", "ours_states_cached"),
}
"""What is trained or waits, and by default by whom."""
LIMITED = "ours:limited"
_MIB = 1 << 20


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.rivals", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--part", choices=list(PARTS), default="all", help="what is trained or waits")
    parser.add_argument("--modes", help=f"of {', '.join(CONTENDERS)}; default: by the part")
    parser.add_argument("--limit", help=f"adds a row {LIMITED} in a control group of so much memory, such as 1.5GiB")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    parser.add_argument("--json", type=Path, help="write environment and rows here")
    args = parser.parse_args(arguments)
    names = ",".join(PARTS[args.part]) if args.modes is None else args.modes
    args.modes = [mode.strip() for mode in names.split(",") if mode.strip()]
    unknown = [mode for mode in args.modes if mode not in CONTENDERS]
    if unknown or not args.modes:
        parser.error(f"--modes has {', '.join(unknown) or 'nothing'}; allowed: {', '.join(CONTENDERS)}")
    if args.steps < 1 or args.warmup < 0:
        parser.error(f"--steps {args.steps} --warmup {args.warmup}; allowed: at least one step, no negative warm-up")
    try:
        args.limit_bytes = None if args.limit is None else parse_size(args.limit, name="--limit")
    except ConfigError as error:
        parser.error(str(error))
    if missing := missing_packages(args.modes):
        others = ",".join(mode for mode in args.modes if package_of(mode) not in missing)
        parser.error(
            f"not installed: {', '.join(missing)}; pip install {' '.join(missing)} (DeepSpeed needs a C++ compiler and "
            f"libaio's headers), or leave it out: --modes {others}"
        )
    return args


def package_of(mode: str) -> str | None:
    """What a mode needs besides this project; ``None``: nothing."""
    return PACKAGES.get(mode.partition("_")[0])


def missing_packages(modes: Sequence[str]) -> list[str]:
    """Those that are not installed here, without repetition."""
    needed = dict.fromkeys(package for mode in modes if (package := package_of(mode)) is not None)
    return [package for package in needed if importlib.util.find_spec(package) is None]


class Racer:
    """A mode, its process as long as that lives, and what it has told."""

    def __init__(self, mode: str, shape: Shape, folder: Path, args: argparse.Namespace, stack: ExitStack) -> None:
        self.mode = mode
        self.fate = "trained"
        self.rest_bytes = 0
        self.samples: list[dict[str, Any]] = []
        self.weights: dict[str, str] | None = None
        folder.mkdir()
        procs = stack.enter_context(memory_group(args.limit_bytes)).procs if mode == LIMITED else None
        job = RivalsJob(mode, shape, str(folder), args.threads, adapters=args.part == "adapters")
        self._child = Child(job, module="recipes.benchmarks.workers.rivals", procs=procs)
        stack.callback(self._child.close)
        # As soon as it is ready, so that two are not built at once.
        self.rest_bytes = (self._ask(None) or {}).get("rest_bytes", 0)

    def step(self) -> None:
        """One step, unless it has failed before."""
        if (answer := self._ask("step")) is not None:
            self.samples.append(answer)
            print(f"{self.mode:20} {answer['step_s']:.2f} s + {answer['sync_s']:.2f} s", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Have its weights hashed."""
        self.weights = self._ask("weights")

    def _ask(self, command: str | None) -> dict[str, Any] | None:
        if self.fate != "trained":
            return None
        try:
            return self._child.answer() if command is None else self._child.ask(command)
        except ChildDiedError as error:
            when = "at its start" if not self.rest_bytes else f"in step {len(self.samples) + 1}"
            self.fate = f"{error.why} {when}"
            return None


def measure(shape: Shape, directory: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All modes, in turns; a row each."""
    modes = [*args.modes, *([LIMITED] if args.limit_bytes else [])]
    with ExitStack() as stack:
        racers = [Racer(mode, shape, directory / mode.replace(":", "_"), args, stack) for mode in modes]
        for turn in range(args.warmup + args.steps):
            # In an order that rotates, so that nobody always comes after the same one.
            for racer in [*racers[turn % len(racers) :], *racers[: turn % len(racers)]]:
                racer.step()
        for racer in racers:
            racer.finish()
    plain = next((racer for racer in racers if racer.mode == "plain"), None)
    return [summarise(racer, plain, args.warmup) for racer in racers]


def summarise(racer: Racer, plain: Racer | None, warmup: int) -> dict[str, Any]:
    """Medians of the timed steps, the highest peak of theirs, and how its weights compare with plain PyTorch's."""
    timed = racer.samples[warmup:]
    row: dict[str, Any] = {
        "mode": racer.mode,
        "fate": racer.fate,
        "losses": [sample["loss"] for sample in racer.samples],
        "rest_bytes": racer.rest_bytes,
        "bits": None,
    }
    if timed:
        row["step_s"] = statistics.median(sample["step_s"] + sample["sync_s"] for sample in timed)
        row["sync_s"] = statistics.median(sample["sync_s"] for sample in timed)
        row["update_s"] = statistics.median(sample["update_s"] for sample in timed)
        row["steps_s"] = [sample["step_s"] + sample["sync_s"] for sample in timed]
        row["peak_bytes"] = max(sample["peak_bytes"] for sample in timed)
    if plain is not None and plain.weights and racer.weights:
        # FSDP2 and accelerate know a tied weight by one of its names.
        names = plain.weights.keys() & racer.weights.keys()
        equal = sum(plain.weights[name] == racer.weights[name] for name in names)
        row["bits"] = {"equal": equal, "of": len(plain.weights)}
    return row


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    heads = ("mode", "step s", "of it update s", "of it sync s", "peak MiB", "weights equal", "last loss", "fate")
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in rows:
        numbers = "| | | | "
        if "step_s" in row:
            seconds = " | ".join(f"{row[name]:.2f}" for name in ("step_s", "update_s", "sync_s"))
            numbers = f"| {seconds} | {row['peak_bytes'] / _MIB:,.0f} "
        bits = "" if row["bits"] is None else f"{row['bits']['equal']} of {row['bits']['of']}"
        loss = f"{row['losses'][-1]:.6f}" if row["losses"] else ""
        print(f"| {row['mode']} {numbers}| {bits} | {loss} | {row['fate']} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when our bits differ from PyTorch's. Speed is only reported."""
    args = parse_arguments(arguments)
    shape = replace(TINY, width=512) if args.tiny else SHAPE  # matrices large enough to leave
    facts = environment("rivals", args.threads, shape)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
    with spill_directory(args.dir, "bench_rivals") as directory, tempfile.TemporaryDirectory(dir=directory) as folder:
        try:
            rows = measure(shape, Path(folder), args)
        except GroupUnavailableError as error:
            sys.exit(f"--limit: no memory control group can be made here ({error}); run as root, or leave it out")
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
    return 0 if all(is_right(row) for row in rows if row["mode"].startswith("ours")) else 1


def is_right(row: dict[str, Any]) -> bool:
    """Whether it has trained, and every weight has the bits of plain PyTorch's, if that was asked to train as well."""
    return row["fate"] == "trained" and (row["bits"] is None or row["bits"]["equal"] == row["bits"]["of"])


if __name__ == "__main__":
    sys.exit(main())
