"""The memory of a process over one training step: everything kept, and everything on the SSD. A picture.

    python -m recipes.benchmarks.memory_over_step --dir DIR --output docs/results/memory_over_step.png
    python -m recipes.benchmarks.memory_over_step --tiny

Each mode trains in a process of its own, one after the other: the same GPT-2 (``harness/gpt.py``), forward, backward
and AdamW. The library's recorder reads the resident set some hundred times in the last step. The picture shows what was
held above what the process held before that step, once free heap had been given back. Times are shares of each mode's
own step: ``recipes.benchmarks.step`` compares how long steps take. The numbers are written as JSON beside the picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.memory.malloc import trim
from lightning_ssd.memory.readings import level_bytes
from recipes.benchmarks.harness.gpt import GPT
from recipes.benchmarks.step import environment

__all__ = ["draw", "main", "train"]

_NUM_STEPS = 3
_SIZES = {"layers": 12, "width": 768, "heads": 12, "sequence": 512, "vocabulary": 16_384}
_TINY = {"layers": 2, "width": 64, "heads": 2, "sequence": 64, "vocabulary": 512}
_MODES = {"keep": ("plain PyTorch", "#555555"), "offload": ("activations on the SSD", "#0072B2")}
_MIB = 1 << 20


def train(mode: str, directory: Path, *, tiny: bool = False) -> dict[str, Any]:
    """Train a few steps here; return the last one's memory (seconds, bytes), its length, and when backward begins."""
    torch.manual_seed(0)
    sizes, batch = (_TINY, 2) if tiny else (_SIZES, 8)
    model = GPT(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(sizes["vocabulary"], (batch, sizes["sequence"]))
    rest, step_s = 0, 1.0
    policy = OffloadPolicy(activations="keep" if mode == "keep" else "offload")
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[directory])) as offloader:
        offloader.register_module(model)
        for step in range(_NUM_STEPS):
            begin_s = time.perf_counter()
            if step == _NUM_STEPS - 1:
                trim()  # what glibc holds of earlier steps is free, and would hide what this one takes
                rest = level_bytes(torch.device("cpu"))
                offloader.begin_record(step, expected_s=step_s)
            with offloader.saved_tensors():
                loss = model(tokens, tokens).loss
            loss.backward()
            offloader.end_backward()
            optimizer.step()
            optimizer.zero_grad()
            step_s = time.perf_counter() - begin_s
        record = offloader.end_record()
    assert record is not None  # it has just begun
    samples = [(round(level.at_s, 3), level.nbytes - rest) for level in record.levels]
    backward_s = next(phase.start_s for phase in record.phases if phase.name == "backward")
    return {"samples": samples, "backward_s": backward_s, "step_s": record.length_s, "loss": loss.item()}


def draw(content: dict[str, dict[str, Any]], file: Path) -> None:
    """Draw one line per mode, over the share of its step."""
    import matplotlib  # in the extra "recipes"

    matplotlib.use("Agg")  # draws into files without a display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2), dpi=120)
    for mode, (name, color) in _MODES.items():
        found = content[mode]
        times, levels = zip(*found["samples"], strict=True)
        peak = max(levels) / _MIB
        label = f"{name}: {peak:,.0f} MiB at most"
        step_s = found["step_s"]
        axes.plot(
            [100 * at / step_s for at in times], [max(level, 0) / _MIB for level in levels], color=color, label=label
        )
        axes.axvline(100 * found["backward_s"] / step_s, color=color, linestyle=":", linewidth=1)
    axes.set_xlabel("per cent of the step; dotted: where backward begins")
    axes.set_ylabel("MiB above rest")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: command line; default: that of ``sys.argv``.

    Returns:
        1 if the losses of the two modes differ.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("outputs"), help="directory on the drive")
    parser.add_argument("--output", type=Path, default=Path("outputs/memory_over_step.png"))
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the recipe itself")
    parser.add_argument("--mode", choices=_MODES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.mode:
        print(json.dumps(train(args.mode, args.dir, tiny=args.tiny)))
        return 0
    content = {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for mode in _MODES:
        command = [sys.executable, "-m", "recipes.benchmarks.memory_over_step", "--mode", mode, "--dir", str(args.dir)]
        done = subprocess.run([*command, *["--tiny"][: args.tiny]], stdout=subprocess.PIPE, text=True, check=True)
        content[mode] = json.loads(done.stdout.splitlines()[-1])
        print(f"{_MODES[mode][0]}: {max(level for _, level in content[mode]['samples']) / _MIB:,.0f} MiB above rest")
    facts = environment("memory_over_step", torch.get_num_threads())
    args.output.with_suffix(".json").write_text(json.dumps({"environment": facts, "modes": content}))
    draw(content, args.output)
    return 0 if len({found["loss"] for found in content.values()}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
