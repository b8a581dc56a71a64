"""Modes that cannot all train side by side, for want of memory: groups of them, each with a keep of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.benchmarks.harness.mode_names import BASELINE
from recipes.benchmarks.harness.process import ChildDiedError
from recipes.benchmarks.harness.rounds import run_round
from recipes.benchmarks.harness.shapes import Shape
from recipes.benchmarks.harness.tables import Sample
from recipes.benchmarks.step import check_room, held_if_needed, make_jobs
from recipes.benchmarks.workers.step import Job

__all__ = ["Measured", "run_groups", "split"]


@dataclass
class Measured:
    """What the groups gave."""

    samples: list[Sample] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Modes whose process failed, for example since no plan meets their budget; it has said why."""


def split(modes: Sequence[str], size: int) -> list[list[str]]:
    """Groups of at most ``size`` modes, keep first in each."""
    others = [mode for mode in modes if mode != BASELINE]
    width = max(1, size - 1)
    return [[BASELINE, *others[start : start + width]] for start in range(0, len(others), width)] or [[BASELINE]]


def run_groups(
    groups: Sequence[Sequence[str]], shape: Shape, directory: Path, args: argparse.Namespace, *, rounds: int = 1
) -> Measured:
    """Run the groups one after the other; a step is compared with keep's of the same group, round and turn.

    A mode that fails is left out and its group begins anew.

    Raises:
        ChildDiedError: keep itself has failed.
        SystemExit: the drive has no room for what a group writes.
    """
    measured = Measured()
    modes = [mode for group in groups for mode in group]
    held = held_if_needed(modes, shape, directory, args.threads)
    for group in groups:
        check_room(group, held, directory)
    index = 0
    for group in groups:
        for number in range(rounds):
            jobs = make_jobs(group, shape, directory, args, held_bytes=held)
            measured.samples += _run_group(index, jobs, args, measured.refused, details=number == 0)
            index += 1
    return measured


def _run_group(
    index: int, group: Sequence[Job], args: argparse.Namespace, refused: list[str], *, details: bool
) -> list[Sample]:
    jobs = [job for job in group if job.mode not in refused]
    while len(jobs) > 1 or len(group) == 1:
        try:
            return run_round(index, jobs, args, details=details)
        except ChildDiedError as error:
            if error.mode == BASELINE:
                raise
            print(f"{error}; it is left out", file=sys.stderr, flush=True)
            refused.append(error.mode)
            jobs = [job for job in jobs if job.mode != error.mode]
    return []
