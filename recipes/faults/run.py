"""Faults on purpose, many trials of each: what happens to results, whether anything hangs, and what is left behind.

    python -m recipes.faults.run --dir DIR                    # all: some 1,100 processes, about six minutes
    python -m recipes.faults.run --only "kill,full disk" --scale 0.1

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
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import memory_group
from recipes.faults.server import Order, Result, Server
from recipes.faults.shim import ShimUnavailableError, build

__all__ = ["FAULTS", "Fault", "Row", "main", "own_disk", "run_fault"]

_MIB = 1 << 20
_DISK_MIB = 384
_GROUP_MIB = (8, 96)
_KILL_WITHIN_S = 0.4
_CRASH = "code -11"


@dataclass(frozen=True)
class Fault:
    """One row of the table."""

    name: str
    num_trials: int
    trial: str = ""
    """Of ``TRIALS``, where it has another name."""
    signal: int = 0
    pauses: int = 0
    needs: str = ""
    """"shim", "disk" or "group"."""
    may_be_wrong: bool = False
    """``verify="off"`` and "sampled" do not promise to check every byte."""
    has_next_run: bool = False
    """After each trial another run starts in the same directory, and must find nothing in its way."""


FAULTS: tuple[Fault, ...] = (
    Fault("EIO on writes", 30, needs="shim"),
    Fault("EIO on reads", 30, needs="shim"),
    Fault("EIO on growing", 10, needs="shim"),
    Fault("ENOSPC on writes", 20, needs="shim"),
    Fault("short writes and reads", 30, needs="shim"),
    Fault("EINTR storm", 20, needs="shim"),
    Fault("slow drive", 20, needs="shim"),
    Fault("full disk", 20, needs="disk"),
    Fault("bit flip, verify=full", 60),
    Fault("bit flip in a state, verify=full", 30),
    Fault("bit flip, verify=sampled", 96, may_be_wrong=True),
    Fault("bit flip, verify=off", 10, may_be_wrong=True),
    Fault("directory goes", 20),
    Fault("directory read-only", 10),
    Fault("unsuitable path", 20),
    Fault("descriptors", 30),
    Fault("memlock", 5),
    Fault("file size", 15),
    Fault("address space", 20),
    Fault("no memory in unpack", 30),
    Fault("memory control group", 12, "memory group", needs="group"),
    Fault("kill -9", 80, "until killed", signal=9, has_next_run=True),
    Fault("SIGTERM", 60, "until killed", signal=15, has_next_run=True),
    Fault("SIGINT", 60, "until killed", signal=2, has_next_run=True),
    Fault("stopped and continued", 10, pauses=3),
    Fault("wall clock jumps", 10),
    Fault("exit without teardown", 20),
    Fault("fork after setup", 20),
    Fault("two trainers", 15),
    Fault("two processes", 15),
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
        """Return the row of the table."""
        count = self.outcomes
        if self.skipped:
            return [self.fault.name, "0", "", "", "", "", f"skipped: {self.skipped}"]
        wrong = f"{count['wrong']}{' (unchecked)' if self.fault.may_be_wrong else ''}"
        words = ", ".join(f"{name} {count[name]}" for name in _ENDS if count[name])
        kinds = ", ".join(f"{note} ({number})" for note, number in self.notes.most_common(4))
        numbers = [sum(count.values()), wrong, count["hang"], len(self.leftovers), count["broken"]]
        return [self.fault.name, *map(str, numbers), f"{words}: {kinds}" if kinds else words]


_ENDS = ("exact", "raised", "ended", "refused", "killed")
_HEAD = ["fault", "trials", "wrong results", "hangs", "leftovers", "other ends", "what happened"]


@contextmanager
def own_disk(directory: Path, mebibytes: int = _DISK_MIB) -> Iterator[tuple[Path, str]]:
    """A file system that nobody else writes to, and ""; or a plain directory, and why there is no other."""
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if not shutil.which(name)]:
        yield directory, f"no {missing[0]}"
        return
    image, mounted = directory / f"image{mebibytes}", directory / f"mounted{mebibytes}"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(mebibytes * _MIB)
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
    if fault.needs == "group":
        try:
            with memory_group(_GROUP_MIB[1] * _MIB):
                return ""
        except GroupUnavailableError as error:
            return str(error)
    return {"shim": shim, "disk": disk}.get(fault.needs, "")


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
    dice = random.Random(f"{seed} {fault.name}")
    for _ in range(fault.num_trials):
        order = Order(
            trial=fault.trial or fault.name,
            seed=dice.randrange(1 << 30),
            directory=str(directory),
            signal=fault.signal,
            after_s=dice.uniform(0, _KILL_WITHIN_S),
            pauses=fault.pauses,
            owns_space=owns_space,
            stays=fault.has_next_run,
        )
        with ExitStack() as stack:
            if fault.needs == "group":
                group = stack.enter_context(memory_group(dice.randint(*_GROUP_MIB) * _MIB))
                order = replace(order, procs=str(group.procs))
            _add(row, server.ask(order), order)
        if fault.has_next_run:
            order = replace(order, trial="next run", signal=0, stays=False)
            result = server.ask(order)
            if result.outcome != "exact":
                _add(row, replace(result, outcome="broken", note=f"the next run: {result.note}"), order)
            row.leftovers += result.leftovers
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
    parser = argparse.ArgumentParser(prog="python -m recipes.faults.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--only", default="", help="parts of the names of faults, separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as many trials, at least one of each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if not 0 < args.scale < float("inf"):
        parser.error(f"--scale={args.scale}; allowed: a number above 0")
    only = args.only.split(",")
    args.faults = [fault for fault in FAULTS if any(word in fault.name for word in only)]
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
        print("\n".join(f"| {' | '.join(cells)} |" for cells in (_HEAD, ["---"] * len(_HEAD))), flush=True)
        for fault in args.faults:
            why = _why_not(fault, shim=why_no_shim, disk=why_no_disk)
            fault = replace(fault, num_trials=max(1, round(fault.num_trials * args.scale)))
            owns = not why_no_disk
            row = (
                Row(fault, skipped=why) if why else run_fault(fault, server, directory, seed=args.seed, owns_space=owns)
            )
            rows.append(row)
            print(f"| {' | '.join(row.cells)} |", flush=True)
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
