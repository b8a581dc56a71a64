"""A worker process of the benchmarks, and the pipe to it: a line of JSON for the job, then a line for each command.

Each line is answered with one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from lightning_ssd.memory.malloc import PAGES_VARIABLE
from recipes.benchmarks.harness.mode_names import AS_IT_COMES

__all__ = ["Child", "ChildDiedError", "ChildOutOfMemoryError", "answer_parent"]

_CLOSED_WITHIN_S = 60
_OUT_OF_MEMORY = "out_of_memory"
"""Key of a worker's last answer."""
_MEMORY_TEXTS = ("out of memory", "can't allocate memory")
"""In PyTorch's errors about the memory of a device, pinned memory, and that of the host."""
_Job = TypeVar("_Job")


class Job(Protocol):
    """What a worker is told first: a dataclass of what JSON has, and of such dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def mode(self) -> str:
        """Its name in tables."""

    @property
    def threads(self) -> int:
        """For computing."""


class ChildDiedError(Exception):
    """A worker has ended before it had answered. Its own message, if any, is on the standard error.

    Args:
        mode: which one.
        code: its exit code; negative: the signal that killed it.
    """

    def __init__(self, mode: str, code: int) -> None:
        super().__init__(f"the process of mode {mode} ended with code {code}; see its message above")
        self.mode = mode
        self.code = code

    @property
    def why(self) -> str:
        """In a few words."""
        return "killed" if self.code < 0 else f"ended with code {self.code}"


class ChildOutOfMemoryError(ChildDiedError):
    """A worker had not enough memory, and has ended.

    Args:
        mode: which one.
        message: of its error.
    """

    def __init__(self, mode: str, message: str) -> None:
        super().__init__(mode, 1)
        self.args = (f"the process of mode {mode} is out of memory: {message}",)

    @property
    def why(self) -> str:
        return "out of memory"


def _variables(job: Job) -> dict[str, str]:
    pages = {PAGES_VARIABLE: "0"} if job.mode == AS_IT_COMES else {}
    return {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"} | pages


class Child:
    """One worker.

    Args:
        job: what it does.
        module: that runs in it: answers its first line and every command with a line.
        procs: the ``cgroup.procs`` of a control group that it starts in.
        quiet: throw its messages away, where it is expected to fail.
    """

    def __init__(
        self,
        job: Job,
        *,
        module: str = "recipes.benchmarks.workers.step",
        procs: Path | None = None,
        quiet: bool = False,
    ) -> None:
        self.mode = job.mode
        self._process = subprocess.Popen(
            _command(module, procs),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
            env=os.environ | _variables(job),
            cwd=Path(__file__).resolve().parents[3],
        )
        self._send(json.dumps(asdict(job)))

    def ask(self, command: str) -> dict[str, Any]:
        """Have a command carried out, and wait for it.

        Raises:
            ChildDiedError: it ended instead; :class:`ChildOutOfMemoryError`: for want of memory.
        """
        self._send(command)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the child. Raises as :meth:`ask`."""
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise ChildDiedError(self.mode, self._process.wait())
        result: dict[str, Any] = json.loads(line)
        if _OUT_OF_MEMORY in result:
            raise ChildOutOfMemoryError(self.mode, result[_OUT_OF_MEMORY])
        return result

    def close(self) -> None:
        """End the child; it closes its files itself. Idempotent."""
        if self._process.stdin is not None:
            # It may have ended already, with a line of ours unread.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=_CLOSED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is None:
            return
        # It may have ended; whoever waits for the answer is told so.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line + "\n")
            stdin.flush()


def _command(module: str, procs: Path | None) -> Sequence[str]:
    command = [sys.executable, "-m", module]
    if procs is None:
        return command
    # The shell enters the group and becomes the worker, whose every byte then counts against the group.
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command]


def answer_parent(kind: type[_Job], opened: Callable[[_Job], AbstractContextManager[Any]]) -> int:
    """Be the other end of a :class:`Child`: the whole program of a worker.

    Args:
        kind: of the job, which is the first line.
        opened: makes of a job what works. Its ``description()`` answers the job, and each further line names a method.
            Where it runs out of memory, the parent is told so; its other errors end the process as they are.

    Returns:
        The exit status.
    """
    # Whatever else prints, a plan's report for one, goes to the standard error: this pipe carries answers only.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def answer(result: dict[str, Any]) -> None:
            print(json.dumps(result), file=answers, flush=True)

        try:
            with opened(_made(kind, json.loads(sys.stdin.readline()))) as worker:
                answer(worker.description())
                for line in sys.stdin:
                    answer(getattr(worker, line.strip())())
        except Exception as error:
            cause = _want_of_memory(error)
            if cause is None:
                raise
            traceback.print_exc()
            answer({_OUT_OF_MEMORY: (str(cause) or type(cause).__name__).splitlines()[0]})
            return 1
    return 0


def _made(kind: type[_Job], fields: dict[str, Any]) -> _Job:
    """Undo ``asdict``."""
    kinds = get_type_hints(kind)
    return kind(
        **{name: _made(kinds[name], value) if is_dataclass(kinds[name]) else value for name, value in fields.items()}
    )


def _want_of_memory(error: BaseException | None) -> BaseException | None:
    """This error, or the one in whose handling it came (closing may fail as well), if it is one of memory."""
    while error is not None:
        is_torchs = isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_TEXTS)
        if is_torchs or isinstance(error, MemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None
