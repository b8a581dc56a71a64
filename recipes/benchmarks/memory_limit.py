"""The same small GPT in the same too small memory, twice: the kernel kills plain training, ours finishes.

    python -m recipes.benchmarks.memory_limit --dir DIR
    python -m recipes.benchmarks.memory_limit --limit 1.5GiB  # of your own; default: half of what the activations take
    python -m recipes.benchmarks.memory_limit --budget none        # without a budget: ours finds the limit itself
    python -m recipes.benchmarks.memory_limit --parameters         # 2 GiB of weights in 1 GiB, everything on the SSD
    python -m recipes.benchmarks.memory_limit --tiny               # a toy size, to try the recipe itself

First plain Lightning trains without a limit; this gives the losses to compare with, and what the training takes. Then
both train in a memory control group, whose every byte the kernel counts, and who takes more is killed. Each training
is a process of its own with the same seed. Spill files are read and written past the page cache (``O_DIRECT``), so
that they count for nothing in the group. Ours is ``SSDOffloadStrategy`` with a budget for activations and the
optimizer's states on SSD; the exact policy is printed. With ``--parameters`` weights and gradients wait, too: these go
through the page cache, whose pages count, and are dropped when the group is full.

Exit codes: 0: plain training was killed, ours finished with the same losses and weights bit for bit; 1: not so;
2: a mistake on the command line; 3: this machine, or this user, cannot make a memory control group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lightning_ssd.common.validation import parse_size
from lightning_ssd.errors import ConfigError
from recipes.benchmarks.harness.cgroups import Group, GroupUnavailableError, control_group

__all__ = ["NO_GROUP", "SIZES", "Job", "Trial", "choose_limit", "main", "memory_group", "run", "shown", "table"]

NO_GROUP = 3
_MIB = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]
_SHARE = 0.5
"""Of what plain training takes above its resting level, so much is allowed by default."""
_BUDGET_SHARE = 0.5
"""Of what is allowed above the resting level, saved activations may have so much; gradients and states want the rest.
"""
_NAMES = {"plain": "plain Lightning", "ssd": "SSDOffloadStrategy"}
_MIN_TENSOR = "256KiB"
_PEAK_FILES = ("memory.max_usage_in_bytes", "memory.peak")
_USAGE_FILES = ("memory.usage_in_bytes", "memory.current")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training."""

    mode: str
    directory: str
    steps: int
    layers: int
    width: int
    batch: int
    sequence: int
    vocabulary: int = 512
    heads: int = 4
    threads: int = 2
    activation_budget: int | None = None
    """Bytes of saved activations in memory, for ``mode="ssd"``; ``None``: no budget, the strategy finds the limit."""
    everything: bool = False
    """Whether weights and gradients wait on the drive, too, and all large activations."""

    @property
    def options(self) -> dict[str, Any]:
        """Of the policy of ``mode="ssd"``; those that are not the default."""
        if self.everything:
            return dict.fromkeys(("activations", "parameters", "gradients", "optimizer_states"), "offload")
        budget = {} if self.activation_budget is None else {"activation_budget": self.activation_budget}
        return budget | {"optimizer_states": "offload", "min_tensor_bytes": _MIN_TENSOR}

    @property
    def strategy(self) -> str:
        """Of ``mode="ssd"``, as a user would write it."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"SSDOffloadStrategy(policy=OffloadPolicy({options}))".replace("'", '"')


SIZES = {
    "small": Job(mode="plain", directory="", steps=6, layers=8, width=256, batch=16, sequence=256),
    "tiny": Job(mode="plain", directory="", steps=3, layers=6, width=256, batch=8, sequence=128),
    "parameters": Job(mode="plain", directory="", steps=5, layers=18, width=1536, batch=4, sequence=64, heads=8),
    "tiny parameters": Job(mode="plain", directory="", steps=2, layers=12, width=768, batch=2, sequence=64),
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How one training went."""

    mode: str
    limit_bytes: int | None
    losses: tuple[float, ...]
    step_s: tuple[float, ...]
    exit_code: int
    rest_bytes: int
    """In the group before the first step: Python, PyTorch, the weights."""
    peak_bytes: int | None
    """Of the group, at most the limit; ``None``: this kernel does not tell."""
    weights_digest: str = ""
    moved_bytes: int = 0
    """Written to the drive."""

    @property
    def finished(self) -> bool:
        """Whether all steps were made."""
        return self.exit_code == 0 and bool(self.weights_digest)

    @property
    def killed(self) -> bool:
        """Whether the kernel has killed it."""
        return self.exit_code == -9

    @property
    def fate(self) -> str:
        """In words."""
        if self.finished:
            return f"finished {len(self.losses)} steps"
        how = "killed by the kernel" if self.killed else f"ended with code {self.exit_code}"
        return f"{how} in step {len(self.losses) + 1}"

    @property
    def median_step_s(self) -> float | None:
        """Of the steps after the first."""
        times = sorted(self.step_s[1:])
        return times[len(times) // 2] if times else None


@contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[Group]:
    """A memory control group, version 1 or 2, with a limit or with none.

    Raises:
        GroupUnavailableError: there can be none.
    """
    v1, v2 = ({}, {}) if limit_bytes is None else _limits(limit_bytes)
    with control_group("memory", v1=v1, v2=v2) as group:
        if not any((group.directory / name).exists() for name in _USAGE_FILES):
            raise GroupUnavailableError("the group that was made has no memory controller")
        yield group


def _limits(limit_bytes: int) -> tuple[dict[str, str], dict[str, str]]:
    return {"memory.limit_in_bytes": str(limit_bytes)}, {"memory.max": str(limit_bytes), "memory.swap.max": "0"}


def _number(group: Group | None, names: Sequence[str]) -> int | None:
    for name in names:
        if group is not None and (group.directory / name).exists():
            return int((group.directory / name).read_text())
    return None


def run(job: Job, limit_bytes: int | None, *, verbose: bool = False, grouped: bool = True) -> Trial:
    """Train in a process and a control group of its own.

    Args:
        job: what to train.
        limit_bytes: of the group; ``None``: no limit, but counted all the same.
        verbose: show what the process says.
        grouped: without a group nothing limits the process, and its peak is that of its resident memory.

    Raises:
        GroupUnavailableError: there can be no group.
    """
    with memory_group(limit_bytes) if grouped else nullcontext() as group:
        # The shell enters the group and becomes the worker, whose every byte then counts.
        enter = [] if group is None else ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        command = [*enter, sys.executable, "-m", "recipes.benchmarks.workers.memory_limit", json.dumps(asdict(job))]
        environment = os.environ | {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1"}
        errors = None if verbose else subprocess.PIPE
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT, env=environment
        ) as child:
            lines, rest_bytes = _listen(child, group)
            message = "" if child.stderr is None else child.stderr.read()
        if child.returncode not in (0, -9):
            print(message, file=sys.stderr)
        peak_bytes = _number(group, _PEAK_FILES)
    end = next((line for line in lines if "weights_digest" in line), {})
    steps = [line for line in lines if "loss" in line]
    return Trial(
        mode=job.mode,
        limit_bytes=limit_bytes if grouped else None,
        losses=tuple(line["loss"] for line in steps),
        step_s=tuple(line["step_s"] for line in steps),
        exit_code=child.returncode,
        rest_bytes=rest_bytes,
        peak_bytes=peak_bytes if grouped else end.get("resident_peak_bytes"),
        weights_digest=end.get("weights_digest", ""),
        moved_bytes=end.get("moved_bytes", 0),
    )


def _listen(child: subprocess.Popen[str], group: Group | None) -> tuple[list[dict[str, Any]], int]:
    """All that the worker tells, line by line; it waits to be read before it trains, so that its rest can be seen."""
    lines: list[dict[str, Any]] = []
    rest_bytes = 0
    for line in child.stdout or ():
        if line.startswith("{"):
            lines.append(json.loads(line))
            if "ready" in lines[-1]:
                rest_bytes = _number(group, _USAGE_FILES) or 0
    return lines, rest_bytes


def choose_limit(free: Trial) -> int:
    """Half of what training without a limit took above its rest, on top of that rest.

    Raises:
        ValueError: the kernel does not tell the peak of a group.
    """
    if free.peak_bytes is None:
        raise ValueError("this kernel does not tell the peak of a control group; give --limit, such as --limit 1.5GiB")
    return free.rest_bytes + round(_SHARE * (free.peak_bytes - free.rest_bytes))


def table(trials: Sequence[Trial]) -> str:
    """One line per training."""
    lines = [f"{'':24}{'limit, MiB':>12}  {'fate':34}{'peak, MiB':>11}{'step, s':>9}  losses"]
    for trial in trials:
        limit = "none" if trial.limit_bytes is None else f"{trial.limit_bytes / _MIB:,.0f}"
        peak = "" if trial.peak_bytes is None else f"{trial.peak_bytes / _MIB:,.0f}"
        step = "" if trial.median_step_s is None else f"{trial.median_step_s:.2f}"
        losses = "" if not trial.losses else f"{trial.losses[0]:.6f} ... {trial.losses[-1]:.6f}"
        lines.append(f"{_NAMES[trial.mode]:24}{limit:>12}  {trial.fate:34}{peak:>11}{step:>9}  {losses}")
    return "\n".join(lines)


def shown(free: Trial, plain: Trial, ours: Trial) -> tuple[bool, str]:
    """Whether the claim has been shown, and a verdict in words."""
    same = ours.finished and (ours.losses, ours.weights_digest) == (free.losses, free.weights_digest)
    if plain.killed and same:
        return True, (
            f"Verdict: in {(plain.limit_bytes or 0) / _MIB:,.0f} MiB the kernel killed plain training in step "
            f"{len(plain.losses) + 1}; with SSDOffloadStrategy the same training finished, with losses and weights "
            f"bit for bit those without a limit. Past the page cache it wrote {ours.moved_bytes / _MIB:,.0f} MiB."
        )
    if not free.finished:
        return False, "Not shown: plain training without a limit did not finish; its message is above."
    if not plain.killed:
        return False, "Not shown: the limit is not too small for plain training; give a smaller one by --limit."
    if not ours.finished:
        return False, "Not shown: the limit is too small for SSDOffloadStrategy as well; give a larger one by --limit."
    return False, "LOSSES OR WEIGHTS DIFFER from plain Lightning. That must not happen; please report it."


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ``limit`` is in bytes."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.memory_limit", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument(
        "--limit",
        help="of the group, for example 1.5GiB; default: chosen after the first training; with --parameters 1GiB",
    )
    parser.add_argument(
        "--budget",
        choices=("half", "none"),
        default="half",
        help="of saved activations: half of what the limit leaves, or none: the strategy finds what there is",
    )
    parser.add_argument("--parameters", action="store_true", help="a model whose weights alone exceed the limit")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a toy size")
    parser.add_argument("--json", type=Path, help="write the trials here")
    parser.add_argument("--verbose", action="store_true", help="show what the trainings say")
    args = parser.parse_args(arguments)
    if args.parameters and args.limit is None:
        args.limit = "600MiB" if args.tiny else "1GiB"
    try:
        args.limit = None if args.limit is None else parse_size(args.limit, name="--limit")
    except ConfigError as error:
        parser.error(str(error))
    if args.limit == 0 or args.threads < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--limit, --steps and --threads must be above 0")
    return args


def _trials(args: argparse.Namespace, directory: Path) -> Iterator[Trial]:
    name = ("tiny parameters" if args.tiny else "parameters") if args.parameters else "tiny" if args.tiny else "small"
    size = SIZES[name]
    job = replace(size, directory=str(directory), threads=args.threads, steps=args.steps or size.steps)
    print("[1/3] plain Lightning, without a limit ...", flush=True)
    free = run(job, None, verbose=args.verbose)
    yield free
    if not free.finished:
        return
    limit = args.limit or choose_limit(free)
    print(f"[2/3] plain Lightning in {limit / _MIB:,.0f} MiB ...", flush=True)
    yield run(job, limit, verbose=args.verbose)
    budget = max(round(_BUDGET_SHARE * (limit - free.rest_bytes)), _MIB) if args.budget == "half" else None
    ours = replace(job, mode="ssd", activation_budget=budget, everything=args.parameters)
    print(f"[3/3] {ours.strategy} in {limit / _MIB:,.0f} MiB ...", flush=True)
    yield run(ours, limit, verbose=args.verbose)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.

    Returns:
        The exit code, see the top of this file.
    """
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="memory_limit-") as directory:
        try:
            trials = list(_trials(args, Path(directory)))
        except GroupUnavailableError as error:
            print(
                f"no memory control group can be made here: {error}. Run as root (in a container: with the control "
                "group file system mounted writable), or under `systemd-run --user --scope -p Delegate=yes`",
                file=sys.stderr,
            )
            return NO_GROUP
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    print(f"\n{table(trials)}\n")
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n")
    if len(trials) < len(_NAMES) + 1:
        print("Not shown: plain training without a limit did not finish; its message is above.")
        return 1
    is_shown, text = shown(*trials)
    print(text)
    return 0 if is_shown else 1


if __name__ == "__main__":
    sys.exit(main())
