"""The memory of a process over one training step: everything kept, and everything on the SSD. A picture.

    python -m recipes.benchmarks.memory_over_step --dir DIR --output docs/results/memory_over_step.png
    python -m recipes.benchmarks.memory_over_step --tiny

Each mode trains in a process of its own, one after the other: the same GPT-2 (``harness/gpt.py``), forward, backward
and AdamW. A thread reads the resident set every 20 milliseconds; the last step is drawn, above what the process held
before it once free heap had been given back. Times are shares of each mode's own step: how long a step takes is a
question for ``recipes.benchmarks.step``, where modes take turns. Also writes the numbers as JSON beside the picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
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

_EVERY_S = 0.02
_NUM_STEPS = 3
_SIZES = {"layers": 12, "width": 768, "heads": 12, "sequence": 512, "vocabulary": 16_384}
_TINY = {"layers": 2, "width": 64, "heads": 2, "sequence": 64, "vocabulary": 512}
_MODES = {"keep": ("plain PyTorch", "#555555"), "offload": ("activations on the SSD", "#0072B2")}
_MIB = 1 << 20


class _Sampler(threading.Thread):
    """Notes (seconds, resident bytes) until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self.sample()

    def sample(self) -> float:
        """Note what is resident now, and return when that was."""
        now_s = time.perf_counter()
        self.samples.append((now_s, level_bytes(torch.device("cpu"))))
        return now_s

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def train(mode: str, directory: Path, *, tiny: bool = False) -> dict[str, Any]:
    """Train a few steps in this process; the last one's memory, and when its phases began (seconds, bytes)."""
    torch.manual_seed(0)
    sizes, batch = (_TINY, 2) if tiny else (_SIZES, 8)
    model = GPT(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(sizes["vocabulary"], (batch, sizes["sequence"]))
    rest, marks, sampler = 0, [], _Sampler()
    policy = OffloadPolicy(activations="keep" if mode == "keep" else "offload")
    with Offloader(policy=policy, hardware=HardwareProfile(paths=[directory])) as offloader:
        offloader.register_module(model)
        for step in range(_NUM_STEPS):
            if step == _NUM_STEPS - 1:
                trim()  # what glibc holds of earlier steps is free, and would hide what this one takes
                rest = level_bytes(torch.device("cpu"))
                sampler.start()
            marks = [sampler.sample()]
            with offloader.saved_tensors():
                loss = model(tokens, tokens).loss
            marks.append(sampler.sample())
            loss.backward()
            offloader.end_backward()
            marks.append(sampler.sample())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(sampler.sample())
        sampler.stop()
    sampler.samples.sort()
    inside = [(round(at - marks[0], 3), nbytes - rest) for at, nbytes in sampler.samples if marks[0] <= at <= marks[-1]]
    return {"samples": inside, "marks": [mark - marks[0] for mark in marks], "loss": loss.item()}


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
        step_s = found["marks"][-1]
        axes.plot(
            [100 * at / step_s for at in times], [max(level, 0) / _MIB for level in levels], color=color, label=label
        )
        axes.axvline(100 * found["marks"][1] / step_s, color=color, linestyle=":", linewidth=1)
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
