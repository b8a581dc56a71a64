"""The largest batch that fits a memory budget: keeping everything, recomputing every block, offloading.

    python -m recipes.benchmarks.largest_batch --budget 8GiB --dir DIR [--modes keep,recompute,ssd]
    python -m recipes.benchmarks.largest_batch --tiny                # a toy size, to try the recipe itself
    python -m recipes.benchmarks.largest_batch --profile gpu --budget 60GiB --dir DIR  # one CUDA card

Each trial trains a few steps in a process of its own. The budget is one for everything in it: weights, states,
gradients, Python. The batch doubles until it does not fit, then the gap is halved. What holds the budget, in this
order: on CUDA PyTorch's own limit of the allocator; a memory control group, in which the kernel kills a process that
takes more; else nothing, and the measured peak is compared with the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lightning_ssd.common.validation import parse_size
from lightning_ssd.memory.readings import host_available_bytes
from recipes.benchmarks.harness.cgroups import GroupUnavailableError, control_group
from recipes.benchmarks.harness.mode_names import BASELINE, parse_mode, parse_modes
from recipes.benchmarks.harness.modes import Settings
from recipes.benchmarks.harness.process import Child, ChildDiedError
from recipes.benchmarks.harness.rounds import PLANNED_WARMUP
from recipes.benchmarks.harness.shapes import TINY_PLANNED, Shape, add_shape_arguments, choose_shape
from recipes.benchmarks.step import environment, spill_directory
from recipes.benchmarks.workers.step import Job

GIB = float(1 << 30)
MODES = "keep,recompute,ssd"
MAX_BATCH = 1 << 16
PLAIN_STEPS = 2
BUDGET, TINY_BUDGET = "8GiB", "1GiB"
Enforcement = Literal["allocator", "group", "measured"]
ENFORCED = {
    "allocator": "PyTorch's limit of the CUDA allocator: what does not fit is an out-of-memory error",
    "group": "a memory control group: the kernel kills a process that takes more",
    "measured": "nothing holds the budget; the measured peak of the process is compared with it",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One batch size of one mode."""

    mode: str
    batch: int
    fits: bool
    peak_bytes: int | None = None
    """``None``: the process did not live to tell."""
    step_s: float | None = None
    """Of the last step."""
    why: str = ""


def largest(fits: Callable[[int], bool], *, limit: int = MAX_BATCH) -> int:
    """The largest number that fits, by doubling and then halving the gap; 0 if not even 1 does.

    Args:
        fits: must be monotone: if a number fits, all smaller ones do.
        limit: nothing larger is tried.
    """
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class Bench:
    """Runs trials and remembers them.

    Args:
        shape: the model; its batch is replaced.
        directory: on the drive.
        budget_bytes: for the whole process, or the device.
        enforcement: what holds it.
        threads: of each process.
        max_batch: nothing larger is tried.
        verbose: show what the processes say that do not fit.
    """

    def __init__(
        self,
        shape: Shape,
        directory: Path,
        *,
        budget_bytes: int,
        enforcement: Enforcement,
        threads: int,
        max_batch: int = MAX_BATCH,
        verbose: bool = False,
    ) -> None:
        self._shape, self._directory = shape, directory
        self._budget_bytes, self._enforcement = budget_bytes, enforcement
        self._threads, self._max_batch, self._verbose = threads, max_batch, verbose
        self.trials: list[Trial] = []

    def search(self, mode: str) -> int:
        """The largest batch of one mode."""
        return largest(lambda batch: self._try(mode, batch).fits, limit=self._max_batch)

    def best(self, mode: str) -> Trial | None:
        """The trial of the largest batch that fits."""
        return max((t for t in self.trials if t.mode == mode and t.fits), key=lambda t: t.batch, default=None)

    def _try(self, mode: str, batch: int) -> Trial:
        with _memory_group(self._budget_bytes if self._enforcement == "group" else None) as procs:
            trial = self._train(mode, batch, procs)
        self.trials.append(trial)
        peak = "" if trial.peak_bytes is None else f", peak {trial.peak_bytes / GIB:.2f} GiB"
        verdict = "fits" if trial.fits else f"does not fit ({trial.why})"
        print(f"{mode}: batch {batch} {verdict}{peak}", file=sys.stderr, flush=True)
        return trial

    def _train(self, mode: str, batch: int, procs: Path | None) -> Trial:
        settings = Settings(
            memory_budget_bytes=self._budget_bytes,
            device_limit_bytes=self._budget_bytes if self._enforcement == "allocator" else None,
        )
        job = Job(mode, replace(self._shape, batch=batch), str(self._directory), self._threads, settings)
        child = Child(job, procs=procs, quiet=not self._verbose)
        try:
            child.answer()
            # A planned mode profiles first: with everything kept if that fits, else with everything moved.
            steps = [child.ask("step") for _ in range(PLAIN_STEPS + PLANNED_WARMUP * parse_mode(mode).is_planned)]
        except ChildDiedError as error:
            return Trial(mode=mode, batch=batch, fits=False, why=error.why)
        finally:
            child.close()
        peak = max(step["device_peak_bytes"] or step["host_peak_bytes"] for step in steps)
        fits = self._enforcement != "measured" or peak <= self._budget_bytes
        why = "" if fits else "above the budget"
        return Trial(mode=mode, batch=batch, fits=fits, peak_bytes=peak, step_s=steps[-1]["step_s"], why=why)


@contextmanager
def _memory_group(budget_bytes: int | None) -> Iterator[Path | None]:
    """Where a process is put so that it cannot take more; ``None`` without a limit."""
    with ExitStack() as stack:
        if budget_bytes is None:
            yield None
            return
        limit = str(budget_bytes)
        group = stack.enter_context(
            control_group(
                "memory",
                v1={"memory.limit_in_bytes": limit},
                v2={"memory.max": limit, "memory.swap.max": "0"},
            )
        )
        yield group.procs


def choose_enforcement(device: str, budget_bytes: int) -> tuple[Enforcement, str]:
    """The strictest that this machine allows, and why not a stricter one.

    Raises:
        SystemExit: nothing can hold the budget, and a trial that is too large might take the whole machine down.
    """
    if device == "cuda":
        return "allocator", ""
    try:
        with _memory_group(budget_bytes):
            return "group", ""
    except GroupUnavailableError as error:
        why = str(error)
    free = host_available_bytes()
    if free is not None and free < 2 * budget_bytes:
        sys.exit(
            f"--budget {budget_bytes / GIB:.1f} GiB: no control group can hold it ({why}), and a trial may take twice "
            f"that, while {free / GIB:.1f} GiB are free; allowed: at most {free / 2 / GIB:.1f} GiB"
        )
    return "measured", why


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.largest_batch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--budget", help=f"memory of the device, on a CPU of the whole process; default: {BUDGET}")
    parser.add_argument("--modes", default=MODES, help="as for recipes.benchmarks.step")
    parser.add_argument("--max-batch", type=int, default=MAX_BATCH, help="nothing larger is tried")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write environment, trials and summary here")
    parser.add_argument("--verbose", action="store_true", help="show what the processes say that do not fit")
    add_shape_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        args.modes = parse_modes(args.modes)
        args.budget_bytes = parse_size(args.budget or (TINY_BUDGET if args.tiny else BUDGET), name="--budget")
    except ValueError as error:
        parser.error(f"cannot be read: {error}")
    budgets = [mode for mode in args.modes if parse_mode(mode).budget is not None]
    if budgets:
        parser.error(f"--modes has {', '.join(budgets)}; allowed: modes without a budget of their own")
    return args


def summarise(bench: Bench, modes: Sequence[str]) -> list[dict[str, Any]]:
    """One row per mode."""
    batches = {mode: (bench.best(mode).batch if bench.best(mode) else 0) for mode in modes}  # type: ignore[union-attr]
    keep = batches.get(BASELINE)
    rows = []
    for mode in modes:
        best = bench.best(mode)
        rows.append(
            {
                "mode": mode,
                "largest_batch": batches[mode],
                "batch_ratio": batches[mode] / keep if keep else None,
                "peak_bytes": best.peak_bytes if best else None,
                "step_s": best.step_s if best else None,
                "samples_per_s": best.batch / best.step_s if best and best.step_s else None,
                "num_trials": sum(trial.mode == mode for trial in bench.trials),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, in Markdown."""
    print("| mode | largest batch | / keep | peak GiB there | step s | samples per s | trials |\n" + "|---" * 7 + "|")
    for row in rows:
        ratio = "" if row["batch_ratio"] is None else f"{row['batch_ratio']:.2f}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / GIB:.2f}"
        times = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("step_s", "samples_per_s")]
        print(
            f"| {row['mode']} | {row['largest_batch']} | {ratio} | {peak} | {times[0]} | {times[1]} "
            f"| {row['num_trials']} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; 1 when a mode could not train a batch of one."""
    args = parse_arguments(arguments)
    shape = choose_shape(args, tiny=replace(TINY_PLANNED, sequence=512, batch=1))
    enforcement, why = choose_enforcement(shape.device, args.budget_bytes)
    facts = environment("largest_batch", args.threads, shape) | {
        "budget_bytes": args.budget_bytes,
        "enforced_by": ENFORCED[enforcement] + (f" (no control group: {why})" if why else ""),
    }
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n", flush=True)
    with spill_directory(args.dir, "largest_batch") as directory:
        bench = Bench(
            shape,
            directory,
            budget_bytes=args.budget_bytes,
            enforcement=enforcement,
            threads=args.threads,
            max_batch=args.max_batch,
            verbose=args.verbose,
        )
        for mode in args.modes:
            bench.search(mode)
    rows = summarise(bench, args.modes)
    show(rows)
    if args.json:
        content = {"environment": facts, "summary": rows, "trials": [asdict(trial) for trial in bench.trials]}
        args.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row["largest_batch"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
