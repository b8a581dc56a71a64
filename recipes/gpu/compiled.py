"""Trains blocks that ``torch.compile`` has compiled, with and without the library: bits, bytes moved, time, peak.

    python -m recipes.gpu.compiled --device cuda --mode reduce-overhead --dir DIR --json FILE

``mode="reduce-overhead"`` makes CUDA graphs, whose memory PyTorch manages by itself: this finds out whether the library
keeps, refuses or breaks there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightning_ssd
from recipes.benchmarks.harness.gpt import Block
from recipes.determinism import make_deterministic
from recipes.gpu.training import Training

__all__ = ["main"]

NUM_STEPS = 6


def train(
    args: argparse.Namespace, forward: Callable[[], AbstractContextManager[Any]], end: Callable[[], None]
) -> Training:
    """Some steps of a stack of compiled blocks, the same in every call."""
    torch.compiler.reset()
    gc.collect()  # else the model before lives in cycles, and its memory is in the peak of this one
    torch.manual_seed(0)
    device = torch.device(args.device)
    blocks = nn.Sequential(*(Block(args.width, args.width // 64) for _ in range(args.layers))).to(device)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    settings = {"backend": args.backend} if args.backend else {"mode": args.mode}
    for block in blocks:
        block.compile(**settings)
    done = Training()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(NUM_STEPS):
        x = torch.randn(args.batch, args.sequence, args.width, generator=torch.Generator().manual_seed(step)).to(device)
        begin = time.perf_counter()
        if args.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with forward():
            loss = blocks(x).square().mean()
        loss.backward()
        end()
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(loss.detach().cpu())
        done.step_s.append(time.perf_counter() - begin)
    done.weights = [parameter.detach().cpu() for parameter in blocks.parameters()]
    if device.type == "cuda":
        done.peak_bytes = torch.cuda.max_memory_allocated(device)
    return done


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Plain, plain again, and with everything moved."""
    make_deterministic(args.device)
    plain, again = (train(args, nullcontext, lambda: None) for _ in range(2))
    policy = lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes=args.min_tensor_bytes)
    hardware = lightning_ssd.HardwareProfile(paths=[args.dir], allow_unsuitable_paths=True)
    with lightning_ssd.Offloader(policy=policy, hardware=hardware, device=args.device) as offloader:
        ours = train(args, offloader.saved_tensors, offloader.end_backward)
        stats = offloader.stats
    return {
        "equal": plain.is_same(ours),
        "repeats": plain.is_same(again),
        "step_s": statistics.median(ours.step_s[-3:]),
        "plain_step_s": statistics.median(plain.step_s[-3:]),
        "peak_bytes": ours.peak_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "again_peak_bytes": again.peak_bytes,
        "bytes_saved": stats.bytes_saved,
        "bytes_written": stats.bytes_written,
        "bytes_kept": stats.bytes_kept,
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.gpu.compiled", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--backend", help="of torch.compile, instead of a mode; aot_eager needs no C++ compiler")
    for name, default in (("layers", 4), ("width", 1024), ("batch", 8), ("sequence", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--min-tensor-bytes", default="1MiB")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 1 where bits differ although plain training repeats its own."""
    args = parse_arguments(arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compare(args)
    found["warnings"] = sorted({f"{w.category.__name__}: {w.message}"[:300] for w in caught})
    args.json.write_text(json.dumps(found, indent=1))
    print(*(f"{key}: {value}" for key, value in found.items()), sep="\n")
    return 1 if found["repeats"] and not found["equal"] else 0


if __name__ == "__main__":
    sys.exit(main())
