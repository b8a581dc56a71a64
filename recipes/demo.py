"""Trains the same small GPT on real text by plain Lightning, with ``strategy="ssd_offload"``, and with all on SSD.

    python -m recipes.demo
    python -m recipes.demo trainer.max_steps=20 model=llama

``strategy="ssd_offload"`` moves as much as costs five per cent of the time: little on some machines;
``SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))`` moves all that is large. Each training is a process
of its own with the same seed and ``THP_MEM_ALLOC_ENABLE=1``. Overrides are those of ``recipes.train``. Ends with a
table and a verdict; the exit code is 1 if the weights are not bitwise equal.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_ssd.memory.malloc import PAGES_VARIABLE
from lightning_ssd.telemetry.stats import describe_held
from recipes.meter import NUM_WARMUP
from recipes.summary import RunSummary

__all__ = ["main", "table", "verdict"]

_ROOT = Path(__file__).resolve().parent.parent
_MIB = 1 << 20
_MODES = {"none": "plain Lightning", "auto": '"ssd_offload"', "ssd": 'activations="offload"'}
"""Heads of the table."""
_SPOKEN = {
    "none": "plain Lightning",
    "auto": 'Trainer(strategy="ssd_offload")',
    "ssd": 'SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))',
}


def _train(mode: str, overrides: Sequence[str], output_dir: Path) -> RunSummary:
    """In a child process, so that neither run sees memory that the other left behind."""
    place = output_dir / mode
    command = [sys.executable, "-m", "recipes.train", f"offload={mode}", f"hydra.run.dir={place}", *overrides]
    variables = {**os.environ, PAGES_VARIABLE: "1"}  # for plain training too: like is compared with like
    subprocess.run(command, cwd=_ROOT, check=True, env=variables)
    return RunSummary.read(place / "summary.json")


def table(runs: Mapping[str, RunSummary]) -> str:
    """What was saved and what it cost, side by side, by mode; plain Lightning first."""
    rows: list[tuple[str, int, list[float], bool]] = [
        (
            "process peak above rest, median step, MiB",
            0,
            [r.typical_peak_above_rest_bytes / _MIB for r in runs.values()],
            True,
        ),
        ("the same in the worst step, MiB", 0, [r.peak_above_rest_bytes / _MIB for r in runs.values()], True),
        ("step time (median), s", 2, [r.step_s for r in runs.values()], True),
        ("written to the SSD per step, MiB", 0, [r.written_bytes_per_step / _MIB for r in runs.values()], False),
        ("read from the SSD per step, MiB", 0, [r.read_bytes_per_step / _MIB for r in runs.values()], False),
        ("waited for the SSD per step, s", 2, [r.stall_s_per_step for r in runs.values()], False),
        ("last loss", 6, [r.losses[-1] for r in runs.values()], False),
    ]
    lines = [f"{'':42}" + "".join(f"{_MODES[mode]:>29}" for mode in runs)]
    for name, digits, values, is_compared in rows:
        told = [f"{value:,.{digits}f}" for value in values]
        if is_compared and values[0]:
            told[1:] = [f"{text} ({value / values[0]:.2f})" for text, value in zip(told[1:], values[1:], strict=True)]
        lines.append(f"{name:42}" + "".join(f"{text:>29}" for text in told))
    lines.append(f"{'hash of all weights':42}" + "".join(f"{r.weights_digest[:12]:>29}" for r in runs.values()))
    return "\n".join(lines)


def is_exact(plain: RunSummary, other: RunSummary) -> bool:
    """Whether losses and weights are bit for bit equal."""
    return (plain.weights_digest, plain.losses) == (other.weights_digest, other.losses)


def verdict(runs: Mapping[str, RunSummary]) -> str:
    """Return the same in words: a headline, and a line for each way of offloading."""
    plain = runs["none"]
    exact = (
        "Losses and weights are bit for bit those of plain Lightning."
        if all(is_exact(plain, run) for run in runs.values())
        else "LOSSES OR WEIGHTS DIFFER from plain Lightning. That must not happen; please report it with this output."
    )
    lines = [f"lightning_ssd: {exact}"]
    for mode, run in runs.items():
        if mode != "none":
            lines.append(
                f"  {_MODES[mode]}: saved activations {describe_held(run.settled_peak_bytes, run.saved_peak_bytes)}, "
                f"{run.step_s / plain.step_s:.2f} of the step time"
            )
    lines.append(f"  Left out: the first {NUM_WARMUP} steps of each run. The runs went one after the other.")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=_ROOT / "outputs" / "demo", help="where the runs write")
    parser.add_argument("overrides", nargs="*", help="key=value, as for recipes.train")
    given = parser.parse_args(arguments)
    overrides = list(given.overrides)
    if not any(override.startswith("experiment=") for override in overrides):
        overrides.insert(0, "experiment=demo")
    summaries = {}
    for number, (mode, name) in enumerate(_SPOKEN.items(), start=1):
        print(f"[{number}/{len(_SPOKEN)}] training by {name} ...", flush=True)
        try:
            summaries[mode] = _train(mode, overrides, given.output_dir.absolute())
        except subprocess.CalledProcessError as error:
            print(f"training by {name} ended with exit code {error.returncode}; its message is above", file=sys.stderr)
            return 1
    print(f"\n{table(summaries)}\n\n{verdict(summaries)}")
    return 0 if all(is_exact(summaries["none"], run) for run in summaries.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
