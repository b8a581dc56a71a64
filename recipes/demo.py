"""Trains the same small GPT on real text twice, by plain Lightning and with all activations on SSD, and compares.

    python -m recipes.demo
    python -m recipes.demo trainer.max_steps=20 model=llama

The second one is ``SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))``; ``strategy="ssd_offload"`` alone
would plan, and may keep what fits. Each training is a process of its own with the same seed. Overrides are those of
``recipes.train``. Ends with a table and a verdict; the exit code is 1 if the weights of the two are not bit for bit
equal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.meter import NUM_WARMUP
from recipes.summary import RunSummary

__all__ = ["main", "table", "verdict"]

_ROOT = Path(__file__).resolve().parent.parent
_MIB = 1 << 20
_MODES = {"none": "plain Lightning", "ssd": 'activations="offload"'}
"""Heads of the table."""
_SPOKEN = {"none": "plain Lightning", "ssd": 'SSDOffloadStrategy(policy=OffloadPolicy(activations="offload"))'}


def _train(mode: str, overrides: Sequence[str], output_dir: Path) -> RunSummary:
    """In a child process, so that neither run sees memory that the other left behind."""
    place = output_dir / mode
    command = [sys.executable, "-m", "recipes.train", f"offload={mode}", f"hydra.run.dir={place}", *overrides]
    subprocess.run(command, cwd=_ROOT, check=True)
    return RunSummary.read(place / "summary.json")


def table(plain: RunSummary, offloaded: RunSummary) -> str:
    """What was saved and what it cost, side by side."""
    # Plain Lightning counts nothing; what it holds is what keeping everything would hold.
    rows = [
        ("process peak above rest, MiB", plain.peak_above_rest_bytes / _MIB, offloaded.peak_above_rest_bytes / _MIB),
        ("saved activations in memory, MiB", offloaded.saved_peak_bytes / _MIB, offloaded.resident_peak_bytes / _MIB),
        ("written to the SSD per step, MiB", 0.0, offloaded.written_bytes_per_step / _MIB),
        ("read from the SSD per step, MiB", 0.0, offloaded.read_bytes_per_step / _MIB),
        ("waited for the SSD per step, s", 0.0, offloaded.stall_s_per_step),
        ("step time (median), s", plain.step_s, offloaded.step_s),
        ("last loss", plain.losses[-1], offloaded.losses[-1]),
    ]
    lines = [f"{'':34}{_MODES['none']:>18}{_MODES['ssd']:>26}{'ratio':>8}"]
    for name, before, after in rows:
        digits = 0 if name.endswith("MiB") else 6 if "loss" in name else 2
        ratio = f"{after / before:.2f}" if before and "loss" not in name else ""
        lines.append(f"{name:34}{before:>18,.{digits}f}{after:>26,.{digits}f}{ratio:>8}")
    lines.append(f"{'hash of all weights':34}{plain.weights_digest[:12]:>18}{offloaded.weights_digest[:12]:>26}")
    return "\n".join(lines)


def verdict(plain: RunSummary, offloaded: RunSummary) -> str:
    """The same in words."""
    same = plain.weights_digest == offloaded.weights_digest and plain.losses == offloaded.losses
    exact = (
        "Losses and weights are bit for bit those of plain Lightning."
        if same
        else "LOSSES OR WEIGHTS DIFFER from plain Lightning. That must not happen; please report it with this output."
    )
    before, after = plain.peak_above_rest_bytes, offloaded.peak_above_rest_bytes
    share = f" ({100 * after / before:.0f} %)" if before else ""
    return (
        f"Verdict: {exact} The process grew {after / _MIB:,.0f} MiB above its resting level instead of "
        f"{before / _MIB:,.0f} MiB{share}: at most {offloaded.resident_peak_bytes / _MIB:,.0f} MiB of "
        f"{offloaded.saved_peak_bytes / _MIB:,.0f} MiB saved activations were in memory at a time. For that, each step "
        f"wrote {offloaded.written_bytes_per_step / _MIB:,.0f} MiB to the SSD, read "
        f"{offloaded.read_bytes_per_step / _MIB:,.0f} MiB back, waited {offloaded.stall_s_per_step:.2f} s for it, and "
        f"took {offloaded.step_s:.2f} s against {plain.step_s:.2f} s. (The runs went one after the other; on a busy "
        f"machine compare the waiting, not the step times.) {offloaded.plan} Storage: {offloaded.backend}. The first "
        f"{NUM_WARMUP} steps of both runs are left out."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=_ROOT / "outputs" / "demo", help="where the two runs write")
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
    plain, offloaded = summaries.values()
    print(f"\n{table(plain, offloaded)}\n\n{verdict(plain, offloaded)}")
    return 0 if (plain.weights_digest, plain.losses) == (offloaded.weights_digest, offloaded.losses) else 1


if __name__ == "__main__":
    sys.exit(main())
