"""Faults on purpose, many trials of each: what happens to results, whether anything hangs, and what is left behind.

    python -m tests.faults.run --dir DIR                    # all: some 1,100 processes, about six minutes
    python -m tests.faults.run --only "kill,full disk" --scale 0.1
    python -m tests.faults.run --out docs/results/faults_table.md

Each trial trains a small random model beside its plain twin in a process of its own, forked from one that has imported
torch already, and compares every loss, gradient and weight bit for bit. Where root may mount, spill files lie on a file
system of their own whose every block must come back; where a C compiler is found, faults of the drive are injected
below Python by a library in front of the C library.

Exit codes: 0: as promised; 1: a wrong result, a hang, something left behind, or an end that is not documented.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import memory_group
from tests.faults.server import Order, Result, Server
from tests.faults.shim import ShimUnavailableError, build

__all__ = ["FAULTS", "Fault", "Row", "main", "markdown", "own_disk", "run_fault", "verdict"]

_MIB = 1 << 20
_DISK_MIB = 384
_GROUP_MIB = (8, 96)
_KILL_WITHIN_S = 0.4
_CRASH = "code -11"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    trial: str
    num_trials: int
    signal: int = 0
    pauses: int = 0
    needs_shim: bool = False
    needs_disk: bool = False
    needs_group: bool = False
    may_be_wrong: bool = False
    """Where nobody has promised to check: ``verify="off"`` and "sampled"."""
    has_next_run: bool = False
    """After each trial another run starts in the same directory, and must find nothing in its way."""


def _simple(name: str, num_trials: int, *, needs_shim: bool = False) -> Fault:
    return Fault(name=name, trial=name, num_trials=num_trials, needs_shim=needs_shim)


FAULTS: tuple[Fault, ...] = (
    _simple("EIO on writes", 30, needs_shim=True),
    _simple("EIO on reads", 30, needs_shim=True),
    _simple("EIO on growing", 10, needs_shim=True),
    _simple("ENOSPC on writes", 20, needs_shim=True),
    _simple("short writes and reads", 30, needs_shim=True),
    _simple("EINTR storm", 20, needs_shim=True),
    _simple("slow drive", 20, needs_shim=True),
    Fault(name="full disk", trial="full disk", num_trials=20, needs_disk=True),
    _simple("bit flip, verify=full", 60),
    _simple("bit flip in a state, verify=full", 30),
    Fault(name="bit flip, verify=sampled", trial="bit flip, verify=sampled", num_trials=96, may_be_wrong=True),
    Fault(name="bit flip, verify=off", trial="bit flip, verify=off", num_trials=10, may_be_wrong=True),
    _simple("directory goes", 20),
    _simple("directory read-only", 10),
    _simple("unsuitable path", 20),
    _simple("descriptors", 30),
    _simple("memlock", 5),
    _simple("file size", 15),
    _simple("address space", 20),
    _simple("no memory in unpack", 30),
    Fault(name="memory control group", trial="memory group", num_trials=12, needs_group=True),
    Fault(name="kill -9", trial="until killed", num_trials=80, signal=9, has_next_run=True),
    Fault(name="SIGTERM", trial="until killed", num_trials=60, signal=15, has_next_run=True),
    Fault(name="SIGINT", trial="until killed", num_trials=60, signal=2, has_next_run=True),
    Fault(name="stopped and continued", trial="stopped and continued", num_trials=10, pauses=3),
    _simple("wall clock jumps", 10),
    _simple("exit without teardown", 20),
    _simple("fork after setup", 20),
    _simple("two trainers", 15),
    _simple("two processes", 15),
    _simple("exception in forward", 20),
    _simple("exception in backward", 20),
    _simple("exception in the optimizer", 20),
    _simple("exception in a callback", 15),
    _simple("exception in a worker", 20),
)


@dataclass
class Row:
    """What came of the trials of one fault."""

    fault: Fault
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    injected: int = 0
    leftovers: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        """One more trial."""
        self.outcomes[result.outcome] += 1
        if result.note and result.outcome != "wrong":
            self.notes[result.note] += 1
        self.injected += result.injected
        self.leftovers += result.leftovers

    @property
    def is_good(self) -> bool:
        """Nothing that must not happen has happened."""
        wrong = 0 if self.fault.may_be_wrong else self.outcomes["wrong"]
        return not (wrong or self.outcomes["hang"] or self.outcomes["broken"] or self.leftovers)

    @property
    def cells(self) -> list[str]:
        """For the table."""
        count = self.outcomes
        if self.skipped:
            return [self.fault.name, "0", "", "", "", "", f"skipped: {self.skipped}"]
        trials = sum(count.values())
        wrong = f"{count['wrong']}{' (unchecked)' if self.fault.may_be_wrong else ''}"
        words = [f"{count[name]} {text}" for name, text in _WORDS.items() if count[name]]
        kinds = ", ".join(f"{note} ({number})" for note, number in self.notes.most_common(4))
        text = "; ".join(words) + (f": {kinds}" if kinds else "")
        numbers = [trials, wrong, count["hang"], len(self.leftovers), count["broken"]]
        return [self.fault.name, *map(str, numbers), text]


_WORDS = {
    "exact": "went on exactly",
    "raised": "raised, and went on exactly when the step was made anew",
    "ended": "ended by an error",
    "refused": "refused before training",
    "killed": "ended by the signal or the kernel",
}
_HEAD = ["fault", "trials", "wrong results", "hangs", "leftovers", "other ends", "what happened"]


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [_HEAD, ["---"] * len(_HEAD), *(row.cells for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def verdict(rows: Sequence[Row]) -> str:
    """What was found, in words."""
    outcomes = sum((row.outcomes for row in rows), Counter[str]())
    missed = sum(row.outcomes["wrong"] for row in rows if row.fault.may_be_wrong)
    bad = {
        "wrong results where every byte is checked": outcomes["wrong"] - missed,
        "hangs": outcomes["hang"],
        "leftovers": sum(len(row.leftovers) for row in rows),
        "ends that are not documented": outcomes["broken"],
    }
    found = ", ".join(f"{number or 'no'} {what}" for what, number in bad.items())
    text = f"Verdict: {'as promised' if all(row.is_good for row in rows) else 'NOT AS PROMISED'}. "
    text += f"{sum(outcomes.values())} trials of {sum(not row.skipped for row in rows)} faults: {found}."
    if missed:
        text += (
            f' {missed} wrong results "(unchecked)" are expected: verify="off" checks nothing, and verify="sampled" '
            'a part; verify="full" is what promises to find every flipped bit.'
        )
    if skipped := sum(bool(row.skipped) for row in rows):
        text += f" {skipped} faults were skipped, for the reasons above."
    return text


@contextmanager
def own_disk(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file system that nobody else writes to, and ""; or a plain directory, and why there is no other."""
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if not shutil.which(name)]:
        yield directory, f"no {missing[0]}"
        return
    image, mounted = directory / "image", directory / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(_DISK_MIB * _MIB)
    commands: tuple[list[str | Path], ...] = (
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image],
        ["mount", "-o", "loop", image, mounted],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            image.unlink()
            yield directory, f"{command[0]}: {done.stderr.strip()}"
            return
    try:
        yield mounted, ""
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
        image.unlink()


def _why_not(fault: Fault, *, shim: str, disk: str) -> str:
    if fault.needs_shim and shim:
        return shim
    if fault.needs_disk and disk:
        return disk
    if fault.needs_group:
        try:
            with memory_group(_GROUP_MIB[1] * _MIB):
                pass
        except GroupUnavailableError as error:
            return str(error)
    return ""


def run_fault(fault: Fault, server: Server, directory: Path, *, seed: int, owns_space: bool) -> Row:
    """All trials of one fault.

    Args:
        fault: which.
        server: carries them out.
        directory: empty, and empty again between trials.
        seed: of everything random.
        owns_space: see :class:`Order`.
    """
    row = Row(fault)
    dice, begin_s = random.Random(f"{seed} {fault.name}"), time.monotonic()
    for _ in range(fault.num_trials):
        order = Order(
            trial=fault.trial,
            seed=dice.randrange(1 << 30),
            directory=str(directory),
            signal=fault.signal,
            after_s=dice.uniform(0, _KILL_WITHIN_S),
            pauses=fault.pauses,
            owns_space=owns_space,
            stays=fault.has_next_run,
        )
        with ExitStack() as stack:
            if fault.needs_group:
                group = stack.enter_context(memory_group(dice.randint(*_GROUP_MIB) * _MIB))
                order = replace(order, procs=str(group.procs))
            _add(row, server.ask(order), order)
        if fault.has_next_run:
            order = replace(order, trial="next run", signal=0, stays=False)
            result = server.ask(order)
            if result.outcome != "exact":
                _add(row, replace(result, outcome="broken", note=f"the next run: {result.note}"), order)
            row.leftovers += result.leftovers
    row.seconds = time.monotonic() - begin_s
    return row


def _add(row: Row, result: Result, order: Order) -> None:
    if row.fault.may_be_wrong and result.outcome == "broken" and result.note.endswith(_CRASH):
        result = replace(result, outcome="wrong")  # an index that nobody has checked, outside of all memory
    row.add(result)
    bad = result.outcome in ("hang", "broken") or result.leftovers
    if bad or (result.outcome == "wrong" and not row.fault.may_be_wrong):
        print(f"{row.fault.name}: {result} with seed {order.seed}", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--only", default="", help="parts of the names of faults, separated by commas")
    parser.add_argument("--skip", default="", help="likewise: what is left out")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as many trials, at least one of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    if not 0 < args.scale < float("inf"):
        parser.error(f"--scale={args.scale}; allowed: a number above 0")
    only, skip = ([word.strip() for word in text.split(",") if word.strip()] for text in (args.only, args.skip))
    args.faults = [fault for fault in FAULTS if not only or any(word in fault.name for word in only)]
    args.faults = [fault for fault in args.faults if not any(word in fault.name for word in skip)]
    if not args.faults:
        parser.error(f"--only={args.only!r} names no fault; there are: {', '.join(fault.name for fault in FAULTS)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.

    Returns:
        The exit code, see the top of this file.
    """
    args = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing stays mounted
    rows = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir, prefix="faults-"))).resolve()
        library, why_no_shim = None, ""
        try:
            library = build(scratch)
        except ShimUnavailableError as error:
            why_no_shim = str(error)
        place, why_no_disk = stack.enter_context(own_disk(scratch))
        directory = place / "trials"
        directory.mkdir()
        server = stack.enter_context(Server.start(library))
        print(f"{'time':>8}  {' | '.join(_HEAD)}", flush=True)
        for fault in args.faults:
            why = _why_not(fault, shim=why_no_shim, disk=why_no_disk)
            fault = replace(fault, num_trials=max(1, round(fault.num_trials * args.scale)))
            owns = not why_no_disk
            row = (
                Row(fault, skipped=why) if why else run_fault(fault, server, directory, seed=args.seed, owns_space=owns)
            )
            rows.append(row)
            print(f"{row.seconds:6.1f} s  {' | '.join(row.cells)}", flush=True)
    print(f"\n{verdict(rows)}")
    if args.out is not None:
        args.out.write_text(markdown(rows) + "\n")
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
