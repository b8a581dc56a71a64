"""One round of ``recipes.benchmarks.step``: a process for each mode, which step in turns."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_ssd.memory.readings import host_available_bytes
from recipes.benchmarks.harness.mode_names import BASELINE, parse_mode
from recipes.benchmarks.harness.process import Child, ChildOutOfMemoryError
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.workers.step import Job

__all__ = ["PLANNED_WARMUP", "run_round", "tell"]

GIB = float(1 << 30)
MIN_FREE_BYTES = 1 << 30
PLANNED_WARMUP = 3
MAX_EXTRA_WARMUP = 8


def run_round(
    index: int,
    jobs: Sequence[Job],
    args: argparse.Namespace,
    *,
    details: bool,
    failed: dict[str, str],
) -> list[Sample]:
    """Start all modes, warm them up and let them step in turns; then see what they hold between steps.

    Args:
        index: number of the round; steps are compared within one.
        jobs: one per mode.
        args: ``steps``, ``warmup``, ``turn_steps``, ``within`` and ``started_s``.
        details: also what plain PyTorch holds.
        failed: takes the modes that run out of memory, and what to say of them; the others go on, and no sample of
            those comes back.

    Raises:
        ChildDiedError: a mode's process has failed.
    """
    samples: list[Sample] = []
    descriptions: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        children = []
        for job in jobs:
            children.append(Child(job))
            stack.callback(children[-1].close)
        for child in children:
            with _noting(failed, child):
                descriptions[child.mode] = child.answer()
        samples += _take_turns(index, children, args, failed)
        for child in _alive(children, failed):
            with _noting(failed, child):
                _note_details(child, samples, descriptions[child.mode])
        if details:
            account = _account(_alive(children, failed))
            for sample in samples:
                sample.values["account"] = account
    return [sample for sample in samples if sample.mode not in failed]


@contextmanager
def _noting(failed: dict[str, str], child: Child) -> Iterator[None]:
    """A child that runs out of memory in here ends, and is left out from then on."""
    try:
        yield
    except ChildOutOfMemoryError as error:
        tell(f"{error}; the others go on")
        failed[child.mode] = error.why
        child.close()  # now, since the others are about to need what it had


def _alive(children: Sequence[Child], failed: dict[str, str]) -> list[Child]:
    return [child for child in children if child.mode not in failed]


def _note_details(child: Child, samples: Sequence[Sample], described: dict[str, Any]) -> None:
    rest = child.ask("rest")
    mine = [sample for sample in samples if sample.mode == child.mode]
    for sample in mine:
        sample.values["rest"] = rest
    mine[-1].values["described"] = described


def _take_turns(
    index: int, children: Sequence[Child], args: argparse.Namespace, failed: dict[str, str]
) -> list[Sample]:
    """Take turns, and warm up until each planned mode follows its plan.

    Where time is short, half of it is for the start and the warm-up.
    """
    samples: list[Sample] = []
    planned = {child.mode for child in children if parse_mode(child.mode).is_planned}
    num_warmup = max(args.warmup, PLANNED_WARMUP) if planned else args.warmup
    turn, num_left = 0, 0 if num_warmup else args.steps
    unplanned = set(planned)
    while turn < num_warmup or num_left:
        warmup = turn < num_warmup
        for child in _alive([*children[turn % len(children) :], *children[: turn % len(children)]], failed):
            with _noting(failed, child):
                result: dict[str, Any] = {}
                for repeat in range(args.turn_steps):
                    timed = not warmup and (repeat > 0 or args.turn_steps == 1)
                    result = child.ask("step")
                    samples.append(Sample(child.mode, index, turn * args.turn_steps + repeat, timed, result, warmup))
                child.ask("release")
                if "plan" in result:
                    unplanned.discard(child.mode)
                tell(f"round {index + 1} turn {turn + 1}: {child.mode:16} {result['step_s']:.2f} s")
        _check_memory(_alive(children, failed))
        unplanned -= set(failed)
        turn += 1
        spent = 0.0 if args.within is None else (time.monotonic() - args.started_s) / args.within
        if spent > 0.5:
            num_warmup = min(num_warmup, turn)
        elif turn == num_warmup and unplanned and num_warmup < args.warmup + MAX_EXTRA_WARMUP:
            num_warmup += 1
        num_left = args.steps if turn == num_warmup else 0 if spent > 1 else max(0, num_left - 1)
    if unplanned:
        tell(f"no plan was followed by {', '.join(sorted(unplanned))}; their rows tell nothing about planning")
    return samples


def _account(children: Sequence[Child]) -> dict[str, Any]:
    for child in children:
        if child.mode == BASELINE:
            try:
                return child.ask("account")
            except ChildOutOfMemoryError as error:
                tell(f"{error}; what it holds is not known")  # its steps were made all the same
    return {}


def _check_memory(children: Sequence[Child]) -> None:
    free = host_available_bytes()
    if free is not None and free < MIN_FREE_BYTES:
        modes = ",".join(child.mode for child in children)
        sys.exit(f"only {free / GIB:.1f} GiB of memory are left with {modes} side by side; run fewer --modes at once")


def tell(line: str) -> None:
    """Progress, on the standard error."""
    print(line, file=sys.stderr, flush=True)
