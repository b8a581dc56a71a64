"""What our hooks cost per saved tensor that is not moved.

A chain of small operations, each of which saves one tensor, runs forward and backward with and without our context, in
turns. The difference of the two times, divided by the number of saved tensors, is what packing and unpacking one of
them costs beyond plain PyTorch. "identity hooks" are two Python functions that do nothing at all: no library that uses
saved-tensor hooks can cost less. The library's in-place check is part of ours; identity hooks have none. Entering and
leaving the context happens once for each pass, however many tensors it saves, and is told separately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_ssd
from lightning_ssd.clock import HostClock
from lightning_ssd.memory import level_bytes
from lightning_ssd.recorder import Recorder
from lightning_ssd.tensors import StorageKey

CHAIN = 400
ROUNDS = 101
TARGET_US = 3.0
Context = Callable[[], AbstractContextManager[Any]]
Chain = Callable[[Tensor], Tensor]


def _repeat(operation: Chain) -> Chain:
    def chain(x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = operation(x)
        return x

    return chain


def cost_us(chain: Chain, context: Context) -> float:
    """Median over rounds of (with - without) / tensors, in microseconds."""
    x = torch.full((4, 4), 0.5, requires_grad=True)
    differences = []
    for _ in range(ROUNDS):
        without, with_hooks = (_time_s(chain, x, used) for used in (nullcontext, context))
        differences.append((with_hooks - without) / CHAIN * 1e6)
    return statistics.median(differences)


def _time_s(chain: Chain, x: Tensor, context: Context) -> float:
    with context():
        begin = time.perf_counter()
        y = chain(x)
        forward_s = time.perf_counter() - begin
    ones = torch.ones_like(y)
    begin = time.perf_counter()
    y.backward(ones)
    return forward_s + time.perf_counter() - begin


def pass_us(context: Context) -> float:
    """Median of entering and leaving the context, between passes of the usual length, in microseconds."""
    x, chain, costs = torch.full((4, 4), 0.5, requires_grad=True), _repeat(torch.sin), []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        with context():
            entered = time.perf_counter()
            y = chain(x)
            leaving = time.perf_counter()
        costs.append((time.perf_counter() - leaving + entered - begin) * 1e6)
        y.backward(torch.ones_like(y))
    return statistics.median(costs)


def recording_us() -> float:
    """What a profiled pass costs per storage that is large enough to move: told of pack, unpack and death."""
    tensors = [torch.empty(16) for _ in range(CHAIN)]
    keys = [StorageKey(tensor.untyped_storage()) for tensor in tensors]
    device, costs = torch.device("cpu"), []
    for _ in range(ROUNDS):
        recorder = Recorder(HostClock(), partial(level_bytes, device))
        begin = time.perf_counter()
        for key in keys:
            recorder.packed(64, key)
            recorder.sample(0)
        recorder.forward_ended()
        for index in reversed(range(CHAIN)):
            recorder.wanted(index)
            recorder.sample(0)
            recorder.freed(index)
        recorder.trace(time.perf_counter())
        costs.append((time.perf_counter() - begin) / CHAIN * 1e6)
    return statistics.median(costs)


def bench_hooks(directory: Path) -> dict[str, Any]:
    """Measure, print and return the table."""
    torch.set_num_threads(1)
    holder = nn.Linear(4, 4, bias=False).requires_grad_(False)
    weight = holder.weight
    chains = {
        "small result of an operation": _repeat(torch.sin),
        "parameter": _repeat(lambda x: x * weight),
        "view of a parameter": _repeat(lambda x: x * weight.t()),
    }
    hardware = lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    policies = {
        "small result of an operation": lightning_ssd.OffloadPolicy(activations="offload"),
        "parameter": lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes=0),
        "view of a parameter": lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes=0),
    }
    rows = []
    for name, chain in chains.items():
        identity = cost_us(chain, lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        with lightning_ssd.Offloader(policy=policies[name], hardware=hardware) as offloader:
            offloader.register_module(holder)
            ours = cost_us(chain, offloader.saved_tensors)
            written = offloader.stats.bytes_saved
            if name == "small result of an operation":
                once = pass_us(offloader.saved_tensors)
                if written:
                    raise RuntimeError(f"{written} bytes were not kept; this measures something else")
        rows.append(
            {"saved tensor": name, "ours_us": ours, "identity_us": identity, "ours_without_python_us": ours - identity}
        )
    print(f"| saved tensor | ours, us | identity hooks, us | target, us |\n{'|---' * 4}|")
    for row in rows:
        print(f"| {row['saved tensor']} | {row['ours_us']:.2f} | {row['identity_us']:.2f} | {TARGET_US} |")
    recording = recording_us()
    print(f"\nEach pass costs {once:.0f} us more, however many tensors it saves.")
    print(f"A profiled pass costs {recording:.1f} us more per storage of at least min_tensor_bytes.")
    return {"summary": rows, "pass_us": once, "recording_us": recording}
