"""A training step that offloads, against keeping, recomputing and naive disk hooks: time, memory, bytes, equality.

    python -m recipes.bench_step --dir DIR [--modes keep,ssd,recompute,naive,save_on_cpu] [--rounds 3] [--json FILE]
    python -m recipes.bench_step --hooks                  # what our hooks cost per tensor that is not moved
    python -m recipes.bench_step --profile h200 --dir DIR # one CUDA card

Each mode trains in a process of its own. The processes take turns, step by step, in an order that rotates, so that a
machine which slows down slows all of them down: a step is compared with keep's step of the same turn, and the table
shows medians of these ratios. Every step's loss, gradients and weights are hashed and compared with keep's. A mode
with the suffix "+mmap" runs with glibc's mmap threshold fixed, as lightning_ssd fixes it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.memory import host_available_bytes
from recipes.bench_hooks import bench_hooks
from recipes.bench_modes import MAPPED, MODES, Shape
from recipes.bench_table import Sample, show, summarise
from recipes.bench_worker import Job

GIB = float(1 << 30)
MIN_FREE_BYTES = 1 << 30
TINY = Shape(layers=2, width=64, heads=4, sequence=32, batch=2, vocabulary=211)
PROFILES = {
    "cpu": Shape(),
    "h200": Shape(
        layers=36, width=1280, heads=20, sequence=1024, batch=16, vocabulary=50_304, autocast=True, device="cuda"
    ),
}


class Child:
    """A worker process and the pipe to it."""

    def __init__(self, job: Job) -> None:
        self.mode = job.mode
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recipes.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parents[1],
        )
        self._send(job.to_json())

    def ask(self, command: str) -> dict[str, Any]:
        """Have a command carried out, and wait for it."""
        self._send(command)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line of the child."""
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            sys.exit(f"the process of mode {self.mode} ended with code {self._process.wait()}; see its message above")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the child; it closes its files itself."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _send(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write(line + "\n")
            stdin.flush()


def run_round(index: int, jobs: Sequence[Job], args: argparse.Namespace) -> list[Sample]:
    """Start all modes, warm them up and let them step in turns; then see what they hold between steps."""
    samples: list[Sample] = []
    with ExitStack() as stack:
        children = []
        for job in jobs:
            children.append(Child(job))
            stack.callback(children[-1].close)
        for child in children:
            child.answer()
        for turn in range(args.warmup + args.steps):
            order = [*children[turn % len(children) :], *children[: turn % len(children)]]
            for child in order:
                for repeat in range(args.turn_steps):
                    timed = turn >= args.warmup and (repeat > 0 or args.turn_steps == 1)
                    result = child.ask("step")
                    samples.append(Sample(child.mode, index, turn * args.turn_steps + repeat, timed, result))
                child.ask("release")
                _tell(f"round {index + 1} turn {turn + 1}: {child.mode:16} {result['step_s']:.2f} s")
            _check_memory(children)
        for child in children:
            rest = child.ask("rest")
            for sample in samples:
                if sample.mode == child.mode:
                    sample.values["rest"] = rest
        if index == 0:
            account = _account(children)
            for sample in samples:
                sample.values["account"] = account
    return samples


def _account(children: Sequence[Child]) -> dict[str, Any]:
    for child in children:
        if child.mode == "keep":
            return child.ask("account")
    return {}


def _check_memory(children: Sequence[Child]) -> None:
    free = host_available_bytes()
    if free is not None and free < MIN_FREE_BYTES:
        modes = ",".join(child.mode for child in children)
        sys.exit(f"only {free / GIB:.1f} GiB of memory are left with {modes} side by side; run fewer --modes at once")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def environment(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What a reader needs to judge the numbers. No host name, no paths."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {
        "command": "python -m recipes.bench_step " + shlex.join(_without_paths(sys.argv[1:])),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": cpu[0] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if shape.device == "cuda" else "cpu",
        "threads": args.threads,
        "load_average": os.getloadavg()[0],
        "shape": asdict(shape),
    }


def _without_paths(arguments: Sequence[str]) -> list[str]:
    hidden = [
        value if before not in ("--dir", "--json") else "..."
        for before, value in zip(["", *arguments], arguments, strict=False)
    ]
    return [value.partition("=")[0] + "=..." if value.startswith(("--dir=", "--json=")) else value for value in hidden]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench_step", description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}; each may end in {MAPPED}")
    parser.add_argument("--rounds", type=int, default=3, help="times that all processes start anew")
    parser.add_argument("--steps", type=int, default=4, help="timed turns per round")
    parser.add_argument("--warmup", type=int, default=2, help="turns before these")
    parser.add_argument("--turn-steps", type=int, help="steps per turn, the first of several not timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--verify", default="off", choices=("off", "sampled", "full"), help="for mode ssd")
    parser.add_argument("--profile", default="cpu", choices=sorted(PROFILES))
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    parser.add_argument("--hooks", action="store_true", help="measure the cost of our hooks instead")
    parser.add_argument("--json", type=Path, help="write environment, samples and summary here")
    for name in ("layers", "width", "heads", "sequence", "batch", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args(arguments)
    args.modes = [mode.strip() for mode in args.modes.split(",") if mode.strip()]
    unknown = [mode for mode in args.modes if mode.removesuffix(MAPPED) not in MODES]
    if unknown or not args.modes:
        parser.error(
            f"--modes has {', '.join(unknown) or 'nothing'}; allowed: {', '.join(MODES)}, with or without {MAPPED}"
        )
    return args


def choose_shape(args: argparse.Namespace) -> Shape:
    """Profile, then ``--tiny``, then single sizes."""
    shape = PROFILES[args.profile]
    if args.tiny:
        shape = replace(TINY, autocast=shape.autocast)
    elif shape.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--profile {args.profile} needs a CUDA device and there is none here; with --tiny it runs on the CPU")
    sizes = {name: getattr(args, name) for name in ("layers", "width", "heads", "sequence", "batch", "vocabulary")}
    return replace(shape, **{name: value for name, value in sizes.items() if value is not None})


def run(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All rounds; prints the table."""
    shape = choose_shape(args)
    # A caching allocator has to be emptied for the next process, so that on a device the first step of a turn is lost.
    args.turn_steps = args.turn_steps or (4 if shape.device == "cuda" else 1)
    facts = environment(args, shape)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n", flush=True)
    jobs = [Job(mode, shape, str(directory), args.threads, args.verify) for mode in args.modes]
    samples = [sample for index in range(args.rounds) for sample in run_round(index, jobs, args)]
    rows = summarise(samples)
    show(rows)
    return {"environment": facts, "summary": rows, "samples": [asdict(sample) for sample in samples]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when any mode's numbers differ from keep's."""
    args = parse_arguments(arguments)
    with ExitStack() as stack:
        directory = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_step-")))
        directory.mkdir(parents=True, exist_ok=True)
        content = bench_hooks(directory) if args.hooks else run(args, directory)
    if args.json:
        args.json.write_text(json.dumps(content, indent=1))
    return 0 if all(row.get("equal", True) for row in content["summary"]) else 1


if __name__ == "__main__":
    sys.exit(main())
