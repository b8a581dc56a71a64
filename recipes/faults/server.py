"""A process that has imported torch already, and forks a child for each trial: hundreds of processes cost seconds.

    with Server.start(library) as server:
        result = server.ask(Order(trial="kill", seed=3, directory=str(directory), signal=9, after_s=0.2))

The server forks before any offloader exists. It watches each child: one that does not end in time is a hang, and what
it leaves behind (files, processes, locks, space that the file system does not get back) is told.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import json
import logging
import mmap
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SPILL", "Order", "Result", "Server", "leftovers", "main"]

_PR_SET_CHILD_SUBREAPER = 36
_ROOT = Path(__file__).resolve().parents[2]
_SPACE_BACK_WITHIN_S = 5.0
_PRESSED_AGAIN_S = 10.0
_STACKS_WITHIN_S = 0.5
SPILL = "spill"
"""What trials call the directory that they offload to, inside that of the order."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One trial: what the child does, and what is done to it."""

    trial: str
    seed: int
    directory: str
    signal: int = 0
    after_s: float = 0.0
    """The signal comes so long after the child's training has begun."""
    pauses: int = 0
    """So often the child is stopped and goes on: for it, the clock jumps."""
    timeout_s: float = 60.0
    procs: str = ""
    """The ``cgroup.procs`` of a control group that the child enters."""
    stays: bool = False
    """What is left in the directory stays for the next order."""
    owns_space: bool = False
    """Nobody else writes to the file system, so that its free blocks must come back."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How it went."""

    outcome: str
    """"exact"; "raised" (an error of a documented kind, after which the step was made anew and training went on
    exactly); "ended" (by such an error, nothing wrong before it); "refused" (before training); "killed"; "wrong";
    "hang"; "broken" (any other end)."""
    note: str = ""
    injected: int = 0
    leftovers: tuple[str, ...] = field(default_factory=tuple)
    steps: int = 0


class Server:
    """The client's side; use as a context manager.

    Args:
        process: that runs :func:`main`.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    def start(cls, library: Path | None = None) -> Server:
        """Start one; ``library`` stands between it and the C library, see ``recipes/faults/shim.py``."""
        preload = {} if library is None else {"LD_PRELOAD": str(library)}
        return cls(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "recipes.faults.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | preload,
            )
        )

    def ask(self, order: Order) -> Result:
        """Carry out a trial, and wait for its result."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the server was not started with pipes; use Server.start()")
        stdin.write(json.dumps(asdict(order)) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the fault server ended with code {self._process.wait()}; its message is above")
        facts: dict[str, Any] = json.loads(line)
        return Result(**facts | {"leftovers": tuple(facts["leftovers"])})

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()


# -- the server ------------------------------------------------------------------------------------------------------


class _Child:
    """A forked child, its pipes, and what happens to it while it runs."""

    def __init__(self, order: Order, pid: int, said: int, answers: int) -> None:
        self.order, self.pid = order, pid
        self._said, self._answers = said, answers
        self._dice = random.Random(order.seed)
        self._pending = b""
        self.begun_s: float | None = None
        self.report: dict[str, Any] | None = None
        self.code: int | None = None
        self.hangs = False

    def watch(self) -> None:
        """Until it has ended, by itself or because its time is over."""
        start_s = time.monotonic()
        events = self._events()
        while self.code is None:
            self._listen(0.002)
            now_s = time.monotonic()
            if self.begun_s is not None and events and now_s - self.begun_s >= events[0][0]:
                self._signal(events.pop(0)[1])
            late_s = now_s - start_s - self.order.timeout_s
            if late_s > 0 and not self.hangs:
                self.hangs = True
                self._signal(signal.SIGUSR1)
            elif late_s > _STACKS_WITHIN_S:
                self._signal(signal.SIGKILL)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        self._listen(0.0)
        os.close(self._said)
        os.close(self._answers)

    def _events(self) -> list[tuple[float, int]]:
        # Python drops an interrupt that comes while a finaliser runs, so that a user presses Ctrl-C again.
        again_s = self.order.after_s + _PRESSED_AGAIN_S
        events = [(s, self.order.signal) for s in (self.order.after_s, again_s)] if self.order.signal else []
        for _ in range(self.order.pauses):
            start_s = self._dice.uniform(0, 0.4)
            events += [(start_s, signal.SIGSTOP), (start_s + self._dice.uniform(0.01, 0.2), signal.SIGCONT)]
        # The last word is that it goes on.
        return sorted(events) + ([(0.7, signal.SIGCONT)] if self.order.pauses else [])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _listen(self, seconds: float) -> None:
        while select.select([self._said], [], [], seconds)[0]:
            data = os.read(self._said, 1 << 16)
            if not data:
                time.sleep(seconds)
                return
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))

    def _hear(self, word: dict[str, Any]) -> None:
        if "begun" in word:
            self.begun_s = time.monotonic()
        elif "flip" in word:
            _flip_from_outside(self.pid, word["flip"], self._dice)
            with contextlib.suppress(BrokenPipeError):
                os.write(self._answers, b".")
        else:
            self.report = word


def _flip_from_outside(pid: int, places: Sequence[Sequence[int]], dice: random.Random) -> None:
    """One bit in one of the extents (inode, offset, length) of the child's anonymous files, on the drive."""
    inode, offset, nbytes = dice.choice(list(places))
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if os.stat(path).st_ino == inode:
            break
    else:
        raise RuntimeError(f"process {pid} has no file with inode {inode}; please report this as a bug")
    page = mmap.PAGESIZE
    at = offset + dice.randrange(nbytes)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        with mmap.mmap(-1, page) as memory:
            os.preadv(fd, [memory], at - at % page)
            memory[at % page] ^= 1 << dice.randrange(8)
            os.pwritev(fd, [memory], at - at % page)
    finally:
        os.close(fd)


def leftovers(directory: Path) -> list[str]:
    """What is in a directory that should be empty."""
    return [f"{path.relative_to(directory)} stays" for path in directory.rglob("*") if path != directory / SPILL]


def _orphans() -> list[str]:
    """Processes that the child has left: the server inherits them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            found.append(f"process {pid} stays")
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
                os.waitpid(int(pid), 0)
    return found


def _locks(pid: int) -> list[str]:
    lines = Path("/proc/locks").read_text().splitlines()
    return [f"a lock of process {pid} stays" for line in lines if str(pid) in line.split()[4:5]]


def _missing_space(directory: Path, before: int) -> list[str]:
    deadline_s = time.monotonic() + _SPACE_BACK_WITHIN_S
    while (missing := before - os.statvfs(directory).f_bfree) > 0:
        if time.monotonic() > deadline_s:
            return [f"{missing} blocks are not given back"]
        time.sleep(0.01)
    return []


def _serve(order: Order) -> Result | None:
    """One trial; ``None`` in a child that has to leave the interpreter in the regular way."""
    directory = Path(order.directory)
    free = os.statvfs(directory).f_bfree
    said, say = os.pipe()
    hear, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.close(answers)
        _run(order, say, hear)
        return None
    os.close(say)
    os.close(hear)
    child = _Child(order, pid, said, answers)
    child.watch()
    left = leftovers(directory) + _orphans() + _locks(pid)
    if not order.stays:
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        left += _missing_space(directory, free) if order.owns_space else []
    return _judge(child, left)


def _judge(child: _Child, left: list[str]) -> Result:
    report, code = child.report, child.code
    if child.hangs:
        return Result(outcome="hang", note=f"not ended after {child.order.timeout_s:g} s", leftovers=tuple(left))
    if report is not None:
        left += report.pop("remains")
    if report is not None and code == 0:
        return Result(**report, leftovers=tuple(left))
    if code is not None and -code in (child.order.signal, signal.SIGKILL if child.order.procs else None):
        return Result(outcome="killed", note=signal.Signals(-code).name, leftovers=tuple(left))
    detail = "" if report is None else f" after {report}"
    return Result(outcome="broken", note=f"ended with code {code}{detail}", leftovers=tuple(left))


def _run(order: Order, say: int, hear: int) -> None:
    """In the child. Returns only where the interpreter is to end as it does for everybody."""
    from recipes.faults.models import many_subgroups  # takes seconds, and the client needs none of it
    from recipes.faults.trials import TRIALS
    from recipes.faults.world import World

    with contextlib.suppress(BrokenPipeError):
        # The server's own pipes are not the child's to read or write.
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger("lightning_ssd").setLevel(logging.ERROR)  # each second try is told of, and there are many
        # Asked for its stacks, and not by its own clock: to look at threads that run may end the process.
        faulthandler.register(signal.SIGUSR1)
        if order.procs:
            Path(order.procs).write_text(f"{os.getpid()}\n")
        world = World(Path(order.directory), random.Random(order.seed), say, hear)
        with many_subgroups():
            report = TRIALS[order.trial](world)
        if report is None:  # a fork of the trial's own, which tells nothing and ends as any program
            return
        remains = world.remains()
        world.tell(**report, remains=remains)
        if not world.ends_regularly:
            atexit._run_exitfuncs()
            os._exit(0)  # PyTorch's own end takes seconds in a fork


def _prepare() -> None:
    """What children shall find done: imports, but no threads."""
    import torch

    import recipes.faults.trials  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that children do not copy what they only look at
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), errno.errorcode.get(ctypes.get_errno(), ""))


def main() -> int:
    """Carry out the orders on the standard input, one per line, until it ends."""
    _prepare()
    own = os.getpid()
    for line in sys.stdin:
        result = _serve(Order(**json.loads(line)))
        if os.getpid() != own or result is None:
            return 0  # the child: from here the interpreter ends as it does for everybody
        print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
