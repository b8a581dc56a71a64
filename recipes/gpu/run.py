"""The first ten minutes on a CUDA card: one command, one table.

    make gpu DIR=/mnt/nvme0 OUT=outputs/gpu                    # in the environment of this checkout
    python3 -m recipes.gpu --dir /mnt/nvme0 --out outputs/gpu  # in any that has torch, Lightning, xxhash and pytest
    python3 -m recipes.gpu --rehearse --dir /tmp               # the same script, small, on the CPU

Needs no git, no plugins of pytest, no transformers. Each experiment is a process of its own with a limit of its own: a
failure or a time-out is a row of the table, and the next one runs. Sizes follow from what memory, disk and drive there
is. All together take nine minutes at most; what there is no time for is not run, and says so. After each experiment
``results.json`` and ``results.md`` are written anew, so that whoever ends the run loses nothing but what was running;
each one's output lies beside them in a log of its own. Warnings are shown and are no errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from recipes.gpu.experiments import Experiment, allot, command_line, make_experiments, of_facts
from recipes.gpu.marks import files_with_gpu_tests
from recipes.gpu.table import Row, as_json, as_markdown, read_result

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_WITHIN_S = 540.0
_GRACE_S = 8.0
"""Between the first and the second signal to a process that takes too long."""
_TABLE_S = 2.0
"""Left for the table."""


@dataclass
class Results:
    """What is known so far, and its files."""

    out: Path
    head: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Row, content: Any = None) -> None:
        """One more row; the files have it at once, whole."""
        self.rows.append(row)
        if content is not None:
            self.found[row.name] = content
        self._write("results.json", as_json(self.head, self.facts, self.rows, self.found))
        self._write("results.md", as_markdown(self.head, self.rows))

    def _write(self, name: str, text: str) -> None:
        part = self.out / f".{name}.part"
        part.write_text(text)
        part.replace(self.out / name)


def run(experiment: Experiment, limit_s: float, directory: Path, out: Path) -> tuple[Row, Any]:
    """One experiment in a process of its own; what it has written as JSON comes back as well."""
    stem = experiment.name.replace(", ", "-").replace(" ", "_")
    result = out / f"{stem}.{'xml' if experiment.kind == 'tests' else 'json'}"
    result.unlink(missing_ok=True)
    command = command_line(experiment, result, limit_s)
    # pytest's temporary files go to the drive, and Python shows its output as it comes.
    environment = os.environ | {"TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"} | dict(experiment.environment)
    begin = time.monotonic()
    with (out / f"{stem}.log").open("w") as log:
        code = _run(command, environment, log, limit_s)
    seconds = time.monotonic() - begin
    status = "timed out" if code is None else "failed" if code else "done"
    content = None
    try:
        answer = read_result(experiment.kind, result)
        content = None if experiment.kind == "tests" else json.loads(result.read_text())
    except Exception as error:  # whatever a process has left behind: it is told, and the next experiment runs
        status = status if status != "done" else "failed"
        answer = f"{_last_line(out / f'{stem}.log')} ({type(error).__name__} in its result)"
    hidden = {str(directory): "DIR", str(out): "OUT", sys.executable: "python3"}
    shown = shlex.join([*(f"{key}={value}" for key, value in experiment.environment.items()), *command])
    for text, name in hidden.items():
        shown, answer = shown.replace(text, name), answer.replace(text, name)
    row = Row(
        name=experiment.name,
        question=experiment.question,
        status=status,
        answer=answer,
        command=shown,
        seconds=seconds,
        limit_s=limit_s,
    )
    return row, content


def _run(command: Sequence[str], environment: dict[str, str], log: Any, limit_s: float) -> int | None:
    """The exit status; ``None`` after the limit. Nothing of the process stays, whatever happens here."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        process_group=0,
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        # As from the keyboard: pytest then tells of the tests that have run.
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed below
            child.wait(_GRACE_S)
        return None
    finally:
        _kill_group(child.pid)
        child.wait()


def _kill_group(pid: int) -> None:
    """All processes that the child has started, too."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it has said nothing"


def run_all(args: argparse.Namespace, directory: Path, results: Results) -> None:
    """Every experiment for which there is time and what it needs."""
    end = time.monotonic() + args.within
    first = of_facts(directory, rehearse=args.rehearse)
    _tell(first)
    row, content = run(first, min(first.limit_s, args.within), directory, args.out)
    results.facts = content or {"missing": row.answer}
    results.head |= _versions(results.facts)
    results.add(row)
    files = [str(path.relative_to(ROOT)) for path in files_with_gpu_tests(ROOT / "tests")]
    for experiment in make_experiments(results.facts, directory, files, rehearse=args.rehearse):
        if args.only and experiment.name not in args.only:
            continue
        left_s = end - time.monotonic() - _TABLE_S - _GRACE_S
        limit_s = allot(experiment, left_s)
        skip = experiment.skip
        if not skip and limit_s is None:
            skip = f"{max(0.0, left_s):.0f} s were left, and it takes {experiment.least_s:.0f} at least"
        if skip or limit_s is None:
            results.add(Row(name=experiment.name, question=experiment.question, status="not run", answer=skip))
            continue
        _tell(experiment, limit_s)
        results.add(*run(experiment, limit_s, directory, args.out))


def _versions(facts: Mapping[str, Any]) -> dict[str, str]:
    """Of what the numbers depend on, as far as it is known."""
    packages = ", ".join(f"{name} {number}" for name, number in facts.get("packages", {}).items() if number)
    driver = str(facts.get("driver", "unknown")).splitlines()[-1:]
    return {
        "machine": f"{facts.get('device', 'no CUDA device')}, {facts.get('cores', '?')} cores",
        "kernel": str(facts.get("kernel", "unknown")),
        "driver": f"{' '.join(driver)}; CUDA of PyTorch: {facts.get('cuda')}",
        "software": packages or "unknown",
        "commit": str(facts.get("commit", "unknown")),
    }


def _tell(experiment: Experiment, limit_s: float | None = None) -> None:
    within = "" if limit_s is None else f", {limit_s:.0f} s at most"
    print(f"{experiment.name}: {experiment.question}{within}", file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(), help="on the drive to measure; default: here")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu"), help="for results and logs; default: outputs/gpu"
    )
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; its numbers mean nothing")
    parser.add_argument("--within", type=float, default=_WITHIN_S, help="seconds for all; default: %(default)g")
    parser.add_argument("--only", action="append", metavar="NAME", help="this experiment alone; again: this one too")
    args = parser.parse_args(arguments)
    args.dir, args.out = args.dir.resolve(), args.out.resolve()
    return args


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # through every "finally", so that no process stays


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments; 1 if any has failed or timed out."""
    args = parse_arguments(arguments)
    args.dir.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    flags = [*(["--rehearse"] if args.rehearse else []), *(f"--only={name}" for name in args.only or ())]
    head = {
        "command": shlex.join(["python3", "-m", "recipes.gpu", *flags, "--dir", "DIR", "--out", "OUT"]),
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "kind": "a rehearsal on the CPU: the numbers mean nothing" if args.rehearse else "a CUDA card",
    }
    results = Results(args.out, head)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-", dir=args.dir) as directory:
            run_all(args, Path(directory), results)
    finally:
        signal.signal(signal.SIGTERM, before)
        print("\n" + as_markdown(head, results.rows))
    broken = [row.name for row in results.rows if row.status in ("failed", "timed out")]
    without = not results.facts.get("has_cuda") and not args.rehearse
    return 1 if broken or without else 0


if __name__ == "__main__":
    sys.exit(main())
