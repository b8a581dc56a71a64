"""What our hooks cost per saved tensor, of those that are not moved and of those that are.

A chain of small operations, each of which saves one tensor, runs forward and backward with and without our context, in
turns. The difference of the two times, divided by the number of saved tensors, is what packing and unpacking one of
them costs beyond plain PyTorch. "identity hooks" are two Python functions that do nothing at all: no library that uses
saved-tensor hooks can cost less. The library's in-place check is part of ours; identity hooks have none. Entering and
leaving the context happens once for each pass, however many tensors it saves, and is told separately.

A moved tensor costs time on the training thread and in workers, which share Python's lock with it. To see that alone, a
backend in memory stands in for the drive and answers at once; on a CUDA device the copies are real. Backward begins
when all writes have ended. What came back is compared with plain PyTorch's, so that nothing is measured that is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_ssd
from lightning_ssd.common.tensors import Region, StorageKey
from lightning_ssd.memory.readings import level_bytes
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.recorder import Recorder
from lightning_ssd.storage.backend import WrappedBackend
from lightning_ssd.storage.spill_file import Arena

CHAIN = 400
PLAIN_CHAIN = 2000
PLAIN_TURN = 5
"""Passes that are timed before another kind has its turn; the one before them finds cold caches."""
ROUNDS = 101
MOVED_BYTES = 16 << 10
TARGET_US = 3.0
Context = Callable[[], AbstractContextManager[Any]]
Chain = Callable[[Tensor], Tensor]


def _repeat(operation: Chain) -> Chain:
    def chain(x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = operation(x)
        return x

    return chain


def cost_us(chain: Chain, context: Context, *, device: str = "cpu", rounds: int = ROUNDS) -> float:
    """Median over rounds of (with - without) / tensors, in microseconds."""
    x = torch.full((4, 4), 0.5, device=device, requires_grad=True)
    differences = []
    for _ in range(rounds):
        without, with_hooks = (_time_s(chain, x, used) for used in (nullcontext, context))
        differences.append((with_hooks - without) / CHAIN * 1e6)
    return statistics.median(differences)


def _time_s(chain: Chain, x: Tensor, context: Context) -> float:
    _catch_up(x.device)
    with context():
        begin = time.perf_counter()
        y = chain(x)
        forward_s = time.perf_counter() - begin
    ones = torch.ones_like(y)
    _catch_up(x.device)
    begin = time.perf_counter()
    y.backward(ones)
    return forward_s + time.perf_counter() - begin


def _catch_up(device: torch.device) -> None:
    """What is measured is Python, which a device that is behind would hold up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pass_us(context: Context, *, device: str = "cpu", rounds: int = ROUNDS) -> float:
    """Median of entering and leaving the context, between passes of the usual length, in microseconds."""
    x, chain, costs = torch.full((4, 4), 0.5, device=device, requires_grad=True), _repeat(torch.sin), []
    for _ in range(rounds):
        begin = time.perf_counter()
        with context():
            entered = time.perf_counter()
            y = chain(x)
            leaving = time.perf_counter()
        costs.append((time.perf_counter() - leaving + entered - begin) * 1e6)
        y.backward(torch.ones_like(y))
    return statistics.median(costs)


class InstantBackend(WrappedBackend):
    """A drive that answers at once: bytes lie in host memory."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._chunks: dict[tuple[int, int], bytes] = {}

    @property
    def name(self) -> str:
        return "memory, in place of a drive"

    @property
    def moves_device_memory(self) -> bool:
        return False  # whatever the inner one can: what is measured goes through staging buffers

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._chunks[id(arena), offset] = ctypes.string_at(region.address, region.nbytes)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        ctypes.memmove(region.address, self._chunks[id(arena), offset], region.nbytes)


def moved_us(hardware: lightning_ssd.HardwareProfile, *, device: str = "cpu", rounds: int = ROUNDS) -> dict[str, Any]:
    """Medians of what a moved tensor costs beyond plain PyTorch, in microseconds; CPU seconds are its own, not beyond.

    Raises:
        RuntimeError: gradients differ from plain PyTorch's, or less than half of the tensors were moved.
    """
    chain = _repeat(torch.sin)
    policy = lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes=MOVED_BYTES)
    costs: list[dict[str, float]] = []
    with lightning_ssd.Offloader(
        policy=policy, hardware=hardware, device=device, _wrap_backend=InstantBackend
    ) as offloader:
        for index in range(rounds):
            # Another size in each round: of a pass like an earlier one, what is wanted back soonest would stay.
            x = torch.linspace(0.1, 0.9, MOVED_BYTES // 4 + index, device=device).requires_grad_()
            plain, expected = _clocked(chain, x, nullcontext, lambda: None)
            before = offloader.stats
            ours, found = _clocked(chain, x, offloader.saved_tensors, offloader.flush)
            offloader.end_backward()
            # Not by the bytes written: the edges of a tensor that is no multiple of pages stay.
            saved, kept = (getattr(offloader.stats, n) - getattr(before, n) for n in ("bytes_saved", "bytes_kept"))
            moved = (saved - kept) / x.nbytes
            if not torch.equal(found, expected):
                raise RuntimeError("moved tensors gave other gradients than plain PyTorch; report this")
            if moved < CHAIN / 2:
                raise RuntimeError(f"{moved:.0f} of {CHAIN} tensors were moved; this measures something else")
            names = ("forward", "backward")
            costs.append({f"{name}_us": (ours[name] - plain[name]) / moved * 1e6 for name in names})
            costs[-1] |= {f"{name}_us": ours[name] / moved * 1e6 for name in ("thread", "process")}
    return {name: statistics.median(cost[name] for cost in costs) for name in costs[0]}


def _clocked(chain: Chain, x: Tensor, context: Context, between: Callable[[], None]) -> tuple[dict[str, float], Tensor]:
    """Wall times of both directions; CPU time of this thread, and of the process with workers; the gradient."""
    x.grad = None
    _catch_up(x.device)
    thread, process = time.thread_time(), time.process_time()
    begin = time.perf_counter()
    with context():
        y = chain(x)
    forward_s = time.perf_counter() - begin
    between()
    ones = torch.ones_like(y)
    _catch_up(x.device)
    begin = time.perf_counter()
    y.backward(ones)
    _catch_up(x.device)
    times = {"forward": forward_s, "backward": time.perf_counter() - begin}
    times |= {"thread": time.thread_time() - thread, "process": time.process_time() - process}
    if x.grad is None:
        raise RuntimeError("backward has left no gradient")
    return times, x.grad


def plain_pass_ratios(hardware: lightning_ssd.HardwareProfile, rounds: int = ROUNDS) -> dict[str, float]:
    """Median time of passes that run without hooks, their borders included, over that of plain PyTorch.

    What a pass saves is counted once for its kind; then nothing but entering, leaving and the end of backward is left.
    Turns of several passes come in random order; ``"plain again"`` tells what the ratios of such turns scatter by.
    """
    x = torch.full((4, 4), 0.5, requires_grad=True)

    def one(context: Context, border: Callable[[], None]) -> float:
        begin = time.perf_counter()
        with context():
            y = x
            for _ in range(PLAIN_CHAIN):
                y = y.sin()
        y.backward(torch.ones_like(y))
        border()
        return time.perf_counter() - begin

    with ExitStack() as stack:
        plain = partial(one, nullcontext, lambda: None)
        kinds, offloaders = {"plain": plain, "plain again": plain}, []
        for activations in ("keep", "auto"):
            policy = lightning_ssd.OffloadPolicy(activations=activations)  # type: ignore[arg-type]
            offloader = stack.enter_context(lightning_ssd.Offloader(policy=policy, hardware=hardware))
            ours = partial(offloader.saved_tensors, signature="always the same")
            kinds[activations] = partial(one, ours, offloader.end_backward)
            kinds[activations]()  # with hooks, to be counted
            offloaders.append(offloader)
        before = [offloader.stats.num_plain_passes for offloader in offloaders]
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        order = random.Random(0)
        for _ in range(rounds):
            for kind in order.sample(list(kinds), len(kinds)):
                times[kind] += [kinds[kind]() for _ in range(1 + PLAIN_TURN)][1:]
        num_passes, num_counted = rounds * (1 + PLAIN_TURN), 2 + rounds * (1 + PLAIN_TURN) // 64
        for offloader, count in zip(offloaders, before, strict=True):
            if offloader.stats.num_plain_passes - count < num_passes - num_counted:
                raise RuntimeError("these passes had hooks; this measures something else")
    typical = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    return {kind: seconds / typical["plain"] for kind, seconds in typical.items() if kind != "plain"}


def recording_us(rounds: int = ROUNDS) -> float:
    """What a profiled pass costs per storage that is large enough to move: told of pack, unpack and death."""
    tensors = [torch.empty(16) for _ in range(CHAIN)]
    keys = [StorageKey(tensor.untyped_storage()) for tensor in tensors]
    device, costs = torch.device("cpu"), []
    for _ in range(rounds):
        recorder = Recorder(HostClock(), partial(level_bytes, device))
        begin = time.perf_counter()
        for key in keys:
            recorder.packed(64, key)
        recorder.forward_ended()
        for index in reversed(range(CHAIN)):
            recorder.wanted(index)
            recorder.freed(index)
        recorder.trace(time.perf_counter())
        costs.append((time.perf_counter() - begin) / CHAIN * 1e6)
    return statistics.median(costs)


def bench_hooks(directory: Path, *, device: str = "cpu", rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure, print and return the table."""
    torch.set_num_threads(1)
    holder = nn.Linear(4, 4, bias=False, device=device).requires_grad_(False)
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
        nothing = partial(saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor)
        identity = cost_us(chain, nothing, device=device, rounds=rounds)
        with lightning_ssd.Offloader(policy=policies[name], hardware=hardware, device=device) as offloader:
            offloader.register_module(holder)
            ours = cost_us(chain, offloader.saved_tensors, device=device, rounds=rounds)
            written = offloader.stats.bytes_saved
            if name == "small result of an operation":
                once = pass_us(offloader.saved_tensors, device=device, rounds=rounds)
                if written:
                    raise RuntimeError(f"{written} bytes were not kept; this measures something else")
        rows.append(
            {"saved tensor": name, "ours_us": ours, "identity_us": identity, "ours_without_python_us": ours - identity}
        )
    print(f"| saved tensor | ours, us | identity hooks, us | target, us |\n{'|---' * 4}|")
    for row in rows:
        print(f"| {row['saved tensor']} | {row['ours_us']:.2f} | {row['identity_us']:.2f} | {TARGET_US} |")
    moved = moved_us(hardware, device=device, rounds=max(3, rounds // 5))
    print(
        f"\n| moved tensor ({MOVED_BYTES >> 10} KiB, {device}) | us |\n|---|---|\n"
        f"| forward, beyond plain PyTorch | {moved['forward_us']:.1f} |\n"
        f"| backward, beyond plain PyTorch | {moved['backward_us']:.1f} |\n"
        f"| CPU time of the training thread | {moved['thread_us']:.1f} |\n"
        f"| CPU time of the process | {moved['process_us']:.1f} |"
    )
    recording = recording_us(rounds)
    print(f"\nEach pass costs {once:.0f} us more, however many tensors it saves.")
    plain = plain_pass_ratios(hardware, rounds)
    told = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in plain.items())
    print(f"A pass without hooks, over plain PyTorch's time at {PLAIN_CHAIN:,} saved tensors: {told}.")
    print(f"A profiled pass costs {recording:.1f} us more per storage of at least min_tensor_bytes.")
    return {
        "summary": rows,
        "moved": moved,
        "pass_us": once,
        "recording_us": recording,
        "plain_pass_ratios": plain,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the whole evidence: what tensors that stay and that move cost, what steps cost, calls and locks."""
    from recipes.benchmarks.hook_evidence import measure, table
    from recipes.benchmarks.step import environment, spill_directory  # which imports this module

    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.hooks", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41, help="of which medians are taken")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dir", type=Path, help="directory on the drive; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write environment and measurements here")
    args = parser.parse_args(arguments)
    facts = environment("hooks", 1)
    with spill_directory(args.dir, "bench_hooks") as directory:
        found = measure(directory, device=args.device, rounds=args.rounds)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({"environment": facts, **found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
