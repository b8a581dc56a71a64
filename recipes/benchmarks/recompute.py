"""What the proof that a repetition is exact costs, at the shape of a block of GPT-2 small.

    python -m recipes.benchmarks.recompute [--batch 8] [--length 512] [--width 768] [--rounds 7] [--threads 1]

One block runs forward, again, and backward under PyTorch's own checkpoint. In turns with it, what the proof does is
done alone: samples of all that the block saves, twice, and their comparison; and looking at what the block depends
on, before the call, after it, before its repetition and after that. Times are seconds of this process' cores, which
other processes disturb less than the clock on the wall; shares are paired within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from lightning_ssd.recompute.call_state import CallState
from lightning_ssd.recompute.fingerprint import Fingerprint

__all__ = ["main", "shares"]


def _seconds(run: Callable[[], object]) -> float:
    begin_s = time.process_time()
    run()
    return time.process_time() - begin_s


def _first(result: Any) -> Tensor:
    tensor = result[0] if isinstance(result, tuple) else result
    assert isinstance(tensor, Tensor)
    return tensor


def _compare(saved: Sequence[Tensor], state: CallState, *, full: bool) -> None:
    first = Fingerprint(full=full, weights=state.addresses)
    for tensor in saved:
        first.add(tensor)
    first.close()
    again = Fingerprint(full=full, frontier=first.frontier)
    for tensor in saved:
        again.add(tensor)
    again.close()
    if first.difference(again) is not None:
        raise RuntimeError("the same tensors were found to differ")


def _look(block: nn.Module) -> None:
    state = CallState([block])
    state.settle()
    if state.change() is not None:
        raise RuntimeError("a block that nobody touched was found to have changed")
    state.as_before(int)


def shares(*, batch: int, length: int, width: int, rounds: int) -> dict[str, float]:
    """Medians: seconds of the block, and the shares of it that the parts of the proof take."""
    config = GPT2Config(n_embd=width, n_head=max(width // 64, 1), n_positions=length, attn_implementation="sdpa")
    block = GPT2Block(config, layer_idx=0)
    x = torch.randn(batch, length, width, requires_grad=True)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        block(x)
    state = CallState([block])
    state.settle()

    def step() -> None:
        _first(checkpoint(block, x, use_reentrant=False)).sum().backward()

    rows = []
    for number in range(rounds + 1):
        block_s = _seconds(step)
        look_s = _seconds(partial(_look, block))
        sampled_s, full_s = (_seconds(partial(_compare, saved, state, full=full)) for full in (False, True))
        if number:  # the first one warms up
            rows.append((block_s, look_s / block_s, sampled_s / block_s, full_s / block_s))
    names = ("block_s", "looking", "comparing", "comparing_every_byte")
    return dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"batch": 8, "length": 512, "width": 768, "rounds": 7, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args(arguments))
    torch.set_num_threads(options.pop("threads"))
    found = shares(**options)
    print(f"forward, repetition and backward of one block: {found['block_s']:.3f} core-seconds; of that take")
    print(f"  looking at what it depends on: {100 * found['looking']:.2f} %")
    print(f"  comparing what it saves: {100 * found['comparing']:.2f} %")
    print(f'  comparing every byte of it (verify="full"): {100 * found["comparing_every_byte"]:.2f} %')


if __name__ == "__main__":
    main()
