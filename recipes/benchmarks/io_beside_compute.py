"""What reading and writing a drive costs a computation beside it, with nothing of ``lightning_ssd`` in either.

    python -m recipes.benchmarks.io_beside_compute --dir DIR [--rate 768MiB] [--seconds 1] [--rounds 7] [--json FILE]

One thread moves 16 MiB at a time with O_DIRECT between a file and one buffer in huge pages, at a steady rate. Threads
of PyTorch multiply matrices that lie in the processor's cache. In each round they do so alone, beside reads and beside
writes, once on one core and once on all; the order turns from round to round. What they lose is the least that moving
as many bytes costs a training step on this machine, whoever moves them: where no core is idle, the drive's interrupts
and copies take time of a thread for which the others wait.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.common.validation import parse_size
from lightning_ssd.memory.mmap import HUGE_PAGE_BYTES, address_of
from recipes.benchmarks.harness.tables import quartiles
from recipes.benchmarks.io import GIB, core_s, write_json
from recipes.benchmarks.step import environment

REQUEST_BYTES, FILE_BYTES = 16 << 20, 1 << 30
MATRIX = 1024
KINDS = ("alone", "read", "write")


@dataclass(frozen=True)
class Sample:
    """One kind in one round."""

    threads: int
    kind: str
    per_s: float
    """Products of matrices."""
    gib_per_s: float
    """Moved beside them."""
    core_s: float
    """Of this process, per second."""


class Mover(threading.Thread):
    """Reads or writes at a steady rate while it is told to.

    Args:
        descriptor: of a file of ``FILE_BYTES``, opened with O_DIRECT.
        rate: bytes per second at most.
    """

    def __init__(self, descriptor: int, rate: float) -> None:
        super().__init__(name="mover", daemon=True)
        self._descriptor, self._rate = descriptor, rate
        self._memory = mmap.mmap(-1, REQUEST_BYTES + HUGE_PAGE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = -address_of(self._memory) % HUGE_PAGE_BYTES
        self._view = memoryview(self._memory)[start : start + REQUEST_BYTES]
        self._view[:] = os.urandom(HUGE_PAGE_BYTES) * (REQUEST_BYTES // HUGE_PAGE_BYTES)
        self._calls = {"read": os.preadv, "write": os.pwritev}
        self._kind: str | None = "alone"
        self._doing: str | None = None
        self._changed = threading.Condition()
        self.nbytes = 0
        self.error: OSError | None = None

    def fill(self) -> None:
        """Write the whole file once, so that later writes allocate nothing."""
        for at in range(0, FILE_BYTES, REQUEST_BYTES):
            os.pwritev(self._descriptor, [self._view], at)

    def tell(self, kind: str | None) -> None:
        """Do this; ``None``: end. Returns when the request before it is over."""
        with self._changed:
            self._kind = kind
            self._changed.notify_all()
            self._changed.wait_for(lambda: kind in (None, self._doing) or self.error is not None)

    def run(self) -> None:
        at = 0
        while (call := self._next_call()) is not None:
            begin = time.perf_counter()
            try:
                self.nbytes += call(self._descriptor, [self._view], at)
            except OSError as error:
                self.error = error
            at = (at + REQUEST_BYTES) % FILE_BYTES
            pause_s = REQUEST_BYTES / self._rate - (time.perf_counter() - begin)
            if pause_s > 0:
                time.sleep(pause_s)

    def _next_call(self) -> Callable[..., int] | None:
        """Wait, without waking up, while there is nothing to do; ``None``: no more."""
        with self._changed:
            self._doing = self._kind
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._kind != "alone" and self.error is None) or self._kind is None)
            self._doing = self._kind
            self._changed.notify_all()
            return self._calls[self._kind] if self._kind is not None else None


def compute(seconds: float) -> float:
    """Products of two matrices per second."""
    left, right, out = (torch.ones(MATRIX, MATRIX) for _ in range(3))
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        torch.mm(left, right, out=out)
        number += 1
    return number / (time.perf_counter() - begin)


def measure(mover: Mover, threads: int, kind: str, seconds: float) -> Sample:
    """Compute beside it."""
    torch.set_num_threads(threads)
    mover.tell(kind)
    before, begin, cores = mover.nbytes, time.perf_counter(), core_s()
    per_s = compute(seconds)
    elapsed, moved = time.perf_counter() - begin, mover.nbytes - before
    mover.tell("alone")
    if mover.error is not None:
        raise SystemExit(f"the drive refuses to {kind}: {mover.error}; nothing was measured")
    return Sample(threads, kind, per_s, moved / GIB / elapsed, (core_s() - cores) / elapsed)


def summarise(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row for each number of threads and kind.

    ``lost_s_per_gib``: seconds that the computation takes longer for each GiB, by the rounds' own ratios.
    """
    rows = []
    for threads, kind in dict.fromkeys((s.threads, s.kind) for s in samples):
        mine = [s for s in samples if (s.threads, s.kind) == (threads, kind)]
        alone = [s for s in samples if (s.threads, s.kind) == (threads, "alone")]
        speeds = [one.per_s / other.per_s for one, other in zip(mine, alone, strict=True)]
        lost = [(1 - speed) / one.gib_per_s for speed, one in zip(speeds, mine, strict=True) if one.gib_per_s]
        rows.append(
            {
                "threads": threads,
                "kind": kind,
                "speed": statistics.median(speeds),
                "gib_per_s": statistics.median(s.gib_per_s for s in mine),
                "core_s": statistics.median(s.core_s for s in mine),
                "lost_s_per_gib": statistics.median(lost) if lost else None,
                "lost_quartiles": [*quartiles(lost)] if lost else None,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, in Markdown."""
    print("| threads | beside | GiB/s | speed / alone | seconds lost per GiB (quartiles) | cores busy |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        lost = (
            ""
            if row["lost_s_per_gib"] is None
            else "{:.2f} ({:.2f} to {:.2f})".format(row["lost_s_per_gib"], *row["lost_quartiles"])
        )
        print(
            f"| {row['threads']} | {row['kind']} | {row['gib_per_s']:.2f} | {row['speed']:.3f} | {lost} "
            f"| {row['core_s']:.2f} |"
        )


def race(mover: Mover, threads: Sequence[int], rounds: int, seconds: float) -> list[Sample]:
    """All kinds in every round, after one that warms up."""
    samples: list[Sample] = []
    for index in range(rounds + 1):
        turn = index % len(KINDS)
        for number in threads:
            measured = [measure(mover, number, kind, seconds) for kind in (*KINDS[turn:], *KINDS[:turn])]
            if index:
                samples += sorted(measured, key=lambda sample: KINDS.index(sample.kind))
    return samples


def with_file(directory: Path, work: Callable[[int], list[Sample]]) -> list[Sample]:
    """Call ``work`` with a file that is gone afterwards, whatever happens."""
    if shutil.disk_usage(directory).free < 2 * FILE_BYTES:
        raise SystemExit(f"{directory} has less than {2 * FILE_BYTES / GIB:.0f} GiB of room; name another with --dir")
    with tempfile.NamedTemporaryFile(dir=directory, prefix="io_beside_compute-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            raise SystemExit(f"{directory} takes no O_DIRECT ({error.strerror}); name another with --dir") from error
        try:
            return work(descriptor)
        finally:
            os.close(descriptor)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.io_beside_compute", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive to measure")
    parser.add_argument("--rate", default="768MiB", help="bytes per second that are moved, at most")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each sample")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write environment, samples and medians here")
    args = parser.parse_args(arguments)
    args.rate = parse_size(args.rate, name="--rate")
    if args.rounds < 1 or args.seconds <= 0 or not args.rate:
        parser.error("--rounds, --seconds and --rate have to be above 0")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is no directory; make it, or name another")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_arguments(arguments)
    threads = sorted({1, os.cpu_count() or 1})
    facts = environment("io_beside_compute", threads[-1])
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n")

    def work(descriptor: int) -> list[Sample]:
        mover = Mover(descriptor, args.rate)
        mover.fill()
        mover.start()
        try:
            return race(mover, threads, args.rounds, args.seconds)
        finally:
            mover.tell(None)
            mover.join()

    samples = with_file(args.dir, work)
    rows = summarise(samples)
    show(rows)
    if args.json:
        write_json(args.json, facts, rows, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
