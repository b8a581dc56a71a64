"""Stands for ``recipes.benchmarks.workers.step``: answers as it does, trains nothing.

It is out of memory when its mode says so.

No import of torch: the process starts at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

from recipes.benchmarks.harness.process import answer_parent

STEPS_UNTIL: dict[str, int] = {"recompute": 2, "ssd": 0}
"""Mode -> steps that it makes before it is out of memory; others never are."""


class Closing:
    """What closes after the error fails in its turn, as a flush may."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            raise OSError("closing has failed")


def step(mode: str, number: int) -> dict[str, Any]:
    names = ("step_s", "forward_s", "backward_s", "optimizer_s", "user_s", "system_s", "loss_value")
    hashes = {name: f"{name} {number}" for name in ("loss", "gradients", "weights")}
    return dict.fromkeys(names, 1.0) | hashes | {"page_faults": 0, "host_peak_bytes": 9, "device_peak_bytes": None}


def serve(lines: TextIO, answer: Callable[[dict[str, Any]], None]) -> None:
    mode = json.loads(lines.readline())["mode"]
    num_steps = 0
    if STEPS_UNTIL.get(mode) == 0:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")
    answer({})
    others = {"rest": {"host_bytes": 1, "device_bytes": None}, "account": {"held_bytes": 100}}
    for line in lines:
        command = line.strip()
        if command != "step":
            answer(others.get(command, {}))
            continue
        num_steps += 1
        if num_steps > STEPS_UNTIL.get(mode, num_steps):
            with Closing():
                raise MemoryError
        answer(step(mode, num_steps))


if __name__ == "__main__":
    sys.exit(answer_parent(serve))
