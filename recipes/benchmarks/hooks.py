"""What moving and not moving costs in Python, as one table: per saved tensor, per step, and beside a planning process.

    python -m recipes.benchmarks.hooks [--dir DIR] [--rounds 41] [--device cpu] [--json FILE]

Kinds take turns in each round, and numbers are medians over rounds. Of a saved tensor CPU time counts (of the training
thread, and of the process with its workers), beyond two hooks that do nothing: no library that uses saved-tensor hooks
can cost less. Python calls and locks are counted in passes of their own, in all threads. A backend in memory stands in
for the drive where hooks are measured, and answers at once; on a CUDA device the copies are real. What came back is
compared with plain PyTorch's, so that nothing is measured that is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lightning_ssd
from lightning_ssd.common.tensors import Region
from lightning_ssd.planning.plan import Machine, PlanObjective, TierRates
from lightning_ssd.planning.trace import Trace, TracedStorage
from lightning_ssd.scheduling.planner_process import make_plan_apart
from lightning_ssd.storage.spill_file import Arena
from recipes.benchmarks.harness.gpt import GPT
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from recipes.benchmarks.step import environment, spill_directory

__all__ = ["main", "measure", "table"]

CHAIN = 400
MOVED_BYTES = 16 << 10
ONCE_STORAGES, ONCE_PARAMETERS = 300, 576
WARM_UP = 8
NOT_MEASURED = "not measured"
Context = Callable[[], AbstractContextManager[Any]]
Chain = Callable[[Tensor], Tensor]
Seconds = tuple[float, float]
"""Of the training thread, and of the process."""


def _repeat(operation: Chain) -> Chain:
    def chain(x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = operation(x)
        return x

    return chain


def _catch_up(device: torch.device) -> None:
    """What is measured is Python, which a device that is behind would hold up."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class InstantBackend(WrappedBackend):
    """A drive that answers at once: bytes lie in host memory."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._chunks: dict[tuple[int, int], bytes] = {}

    @property
    def name(self) -> str:
        return "memory, in place of a drive"

    @property
    def register(self) -> None:
        return None  # whatever the inner one can: what is measured goes through staging buffers

    def write(self, arena: Arena, region: Region, offset: int) -> None:
        self._chunks[id(arena), offset] = ctypes.string_at(region.address, region.nbytes)

    def read(self, arena: Arena, region: Region, offset: int) -> None:
        ctypes.memmove(region.address, self._chunks[id(arena), offset], region.nbytes)


class _Kind:
    """Passes of one kind.

    Args:
        chain: what runs, one saved tensor per operation.
        x: what it begins with.
        context: around the forward.
        between: forward and backward.
        border: after backward.
    """

    def __init__(
        self,
        chain: Chain,
        x: Tensor,
        context: Context,
        between: Callable[[], None] = lambda: None,
        border: Callable[[], object] = lambda: None,
    ) -> None:
        self._chain, self._x, self._context, self._between, self._border = chain, x, context, between, border

    @property
    def gradient(self) -> Tensor | None:
        return self._x.grad

    def run(self) -> Seconds:
        self._x.grad = None
        thread_s, process_s = time.thread_time(), time.process_time()
        with self._context():
            y = self._chain(self._x)
        self._between()
        y.backward(torch.ones_like(y))
        seconds = time.thread_time() - thread_s, time.process_time() - process_s
        self._border()
        return seconds


def _identity() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _in_turns(kinds: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, run in kinds.items():
            seconds = run()
            if number >= 2:
                found[name].append(seconds)
    return found


def _opened(stack: ExitStack, hardware: lightning_ssd.HardwareProfile, device: str, **policy: Any) -> Any:
    return stack.enter_context(
        lightning_ssd.Offloader(
            policy=lightning_ssd.OffloadPolicy(**policy),
            hardware=hardware,
            device=device,
            _wrap_backend=InstantBackend,
        )
    )


def _moved_share(offloader: Any, run: Callable[[], object]) -> float:
    """Of what one pass saves: the part that leaves."""
    before = offloader.stats
    run()
    saved, kept = (getattr(offloader.stats, n) - getattr(before, n) for n in ("bytes_saved", "bytes_kept"))
    return (saved - kept) / max(saved, 1)


def _kinds(stack: ExitStack, hardware: lightning_ssd.HardwareProfile, device: str) -> tuple[dict[str, _Kind], set[str]]:
    """All kinds of saved tensors, and the names of those that do not do here what they are to do."""
    holder = nn.Linear(4, 4, bias=False, device=device).requires_grad_(False)
    sin, times = _repeat(torch.sin), _repeat(lambda x: x * holder.weight)

    def small() -> Tensor:
        return torch.full((4, 4), 0.5, device=device, requires_grad=True)

    def large() -> Tensor:
        return torch.linspace(0.1, 0.9, MOVED_BYTES // 4, device=device).requires_grad_()

    offload = partial(_opened, stack, hardware, device, activations="offload")
    few, all_of_it = offload(), offload(min_tensor_bytes=0)
    all_of_it.register_module(holder)
    keeping = _opened(stack, hardware, device, activations="keep", min_tensor_bytes=MOVED_BYTES)
    moving = _opened(stack, hardware, device, activations="auto", max_slowdown=1000.0, min_tensor_bytes=MOVED_BYTES)
    kinds = {
        "identity, small": _Kind(sin, small(), _identity),
        "identity, parameter": _Kind(times, small(), _identity),
        "identity, large": _Kind(sin, large(), _identity),
        "small": _Kind(sin, small(), few.saved_tensors, border=few.end_backward),
        "parameter": _Kind(times, small(), all_of_it.saved_tensors, border=all_of_it.end_backward),
        "large, stays": _Kind(sin, large(), keeping.saved_tensors, border=keeping.end_backward),
        "moved": _Kind(
            sin, large(), partial(moving.saved_tensors, signature="same"), moving.flush, border=moving.end_backward
        ),
    }
    for _ in range(WARM_UP):
        kinds["moved"].run()
        moving.wait_for_plan()
    kinds["identity, large"].run()
    gradients = [kinds[name].gradient for name in ("identity, large", "moved")]
    if not torch.equal(*gradients):  # type: ignore[arg-type]  # both have run
        raise RuntimeError("moved tensors gave other gradients than plain PyTorch; report this")
    others = {"moved"} if _moved_share(moving, kinds["moved"].run) < 0.5 else set()
    return kinds, others


def per_tensor(hardware: lightning_ssd.HardwareProfile, device: str, rounds: int) -> dict[str, Any]:
    """Microseconds of each kind beyond hooks that do nothing; ``None`` where the kind did something else."""
    with ExitStack() as stack:
        kinds, others = _kinds(stack, hardware, device)
        times = _in_turns({name: kind.run for name, kind in kinds.items()}, rounds)
    found: dict[str, Any] = {}
    base = {"small": "identity, small", "parameter": "identity, parameter"}
    for name in ("small", "parameter", "large, stays", "moved"):
        against = times[base.get(name, "identity, large")]
        pairs = zip(times[name], against, strict=True)
        beyond = [tuple((a - b) / CHAIN * 1e6 for a, b in zip(ours, none, strict=True)) for ours, none in pairs]
        thread_us, process_us = (statistics.median(column) for column in zip(*beyond, strict=True))
        found[name] = None if name in others else {"thread_us": thread_us, "process_us": process_us}
    return found


# -- calls and locks ---------------------------------------------------------------------------------------------------


class _CountingLock:
    """A lock that counts how often it is taken."""

    num_taken = 0
    _make = staticmethod(threading.Lock)

    def __init__(self) -> None:
        self._lock = self._make()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        _CountingLock.num_taken += 1
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class _Counted:
    """Python calls and locks, of all threads that begin while it is entered, and of this one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.is_on and frame.f_code.co_filename != __file__:
            self.num_calls += 1

    @contextmanager
    def entered(self) -> Iterator[None]:
        threading.Lock = _CountingLock  # type: ignore[assignment, misc]
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            threading.Lock = _CountingLock._make  # type: ignore[assignment]

    def of(self, run: Callable[[], object]) -> tuple[float, float]:
        """Calls and locks per tensor of one pass."""
        calls, locks = self.num_calls, _CountingLock.num_taken
        self.is_on = True
        run()
        self.is_on = False
        return (self.num_calls - calls) / CHAIN, (_CountingLock.num_taken - locks) / CHAIN


def counts(hardware: lightning_ssd.HardwareProfile, device: str) -> dict[str, Any]:
    """Python calls and locks per tensor; entering, leaving and the end of backward are shared out among them."""
    counted = _Counted()
    with counted.entered(), ExitStack() as stack:
        kinds, others = _kinds(stack, hardware, device)
        found = {}
        for name in ("large, stays", "moved"):
            kinds[name].run()
            found[name] = (
                None if name in others else dict(zip(("calls", "locks"), counted.of(kinds[name].run), strict=True))
            )
    return found


# -- steps -------------------------------------------------------------------------------------------------------------


def tiny_gpt(hardware: lightning_ssd.HardwareProfile, device: str, rounds: int) -> dict[str, float]:
    """Wall time of a step of a GPT of 24 tiny blocks over plain PyTorch's: everything moved, and by default."""
    torch.manual_seed(0)
    model = GPT(layers=24, width=32, heads=2, sequence=32, vocabulary=128).to(device)
    tokens = torch.randint(0, 128, (2, 32), device=device)

    def step(context: Context, border: Callable[[], object]) -> float:
        model.zero_grad()
        _catch_up(tokens.device)
        begin = time.perf_counter()
        with context():
            loss = model(tokens, tokens).loss
        loss.backward()
        border()
        _catch_up(tokens.device)
        return time.perf_counter() - begin

    with ExitStack() as stack:
        kinds: dict[str, Callable[[], float]] = {"plain": partial(step, nullcontext, lambda: None)}
        policies = {
            "everything moved": lightning_ssd.OffloadPolicy(activations="offload", min_tensor_bytes=1),
            "default": lightning_ssd.OffloadPolicy(),
        }
        for name, policy in policies.items():
            offloader = stack.enter_context(lightning_ssd.Offloader(policy=policy, hardware=hardware, device=device))
            offloader.register_module(model)
            kinds[name] = partial(step, partial(offloader.saved_tensors, signature="same"), offloader.end_backward)
            for _ in range(WARM_UP):
                kinds[name]()
                offloader.wait_for_plan()
        times = _in_turns(kinds, rounds)
    plain = statistics.median(times.pop("plain"))
    return {name: statistics.median(seconds) / plain for name, seconds in times.items()}


def once_per_step(hardware: lightning_ssd.HardwareProfile, device: str, rounds: int) -> dict[str, float]:
    """CPU milliseconds of the training thread that a step costs once, by what it is for."""
    model = nn.ModuleList(nn.Linear(4, 4, device=device) for _ in range(ONCE_PARAMETERS // 2))
    x = torch.linspace(0.1, 0.9, MOVED_BYTES // 4, device=device).requires_grad_()
    spent: dict[str, list[float]] = {name: [] for name in ("enter", "leave", "end of backward", "metrics")}
    with ExitStack() as stack:
        offloader = _opened(
            stack, hardware, device, activations="auto", max_slowdown=1000.0, min_tensor_bytes=MOVED_BYTES
        )
        offloader.register_module(model)
        for number in range(WARM_UP + rounds):
            moments = [time.thread_time()]
            with offloader.saved_tensors(signature="same"):
                moments.append(time.thread_time())
                y = x
                for _ in range(ONCE_STORAGES):
                    y = y.sin()
                leaving = time.thread_time()
            moments.append(time.thread_time())
            y.backward(torch.ones_like(y))
            ending = time.thread_time()
            offloader.end_backward()
            moments.append(time.thread_time())
            offloader.drain_metrics()
            moments.append(time.thread_time())
            if number < WARM_UP:
                offloader.wait_for_plan()
                continue
            spans = (moments[0], moments[1]), (leaving, moments[2]), (ending, moments[3]), (moments[3], moments[4])
            for name, (begin, end) in zip(spent, spans, strict=True):
                spent[name].append((end - begin) * 1e3)
    return {name: statistics.median(values) for name, values in spent.items()}


def beside_planner(rounds: int) -> float:
    """Median wall time of a step of many short operations beside a process that plans, over the same alone."""
    count, step_s = 300, 0.05
    unit = step_s / (2 * count)
    trace = Trace(
        storages=tuple(
            TracedStorage(
                nbytes=20_000_000,
                packed_s=i * unit,
                last_used_s=(i + 0.5) * unit,
                wanted_s=(2 * count - 1 - i) * unit,
                freed_s=(2 * count - 0.5 - i) * unit,
            )
            for i in range(count)
        ),
        order=tuple(reversed(range(count))),
        forward_end_s=step_s / 2,
        end_s=step_s,
    )
    machine = Machine(ssd=TierRates(write_bytes_per_s=3e9, read_bytes_per_s=3e9))
    goal = PlanObjective(max_slowdown=1.05)
    kind = _Kind(_repeat(torch.sin), torch.full((4, 4), 0.5, requires_grad=True), nullcontext)

    def wall() -> float:
        begin = time.perf_counter()
        kind.run()
        return time.perf_counter() - begin

    alone: list[float] = []
    beside: list[float] = []
    for _ in range(max(3, rounds // 5)):
        alone += [wall() for _ in range(10)]
        planner = threading.Thread(target=make_plan_apart, args=(trace, machine, goal))
        planner.start()
        while planner.is_alive():
            beside.append(wall())
        planner.join()
    return statistics.median(beside) / statistics.median(alone)


# -- the table ---------------------------------------------------------------------------------------------------------


def measure(directory: Path, *, device: str, rounds: int) -> dict[str, Any]:
    """Measure all rows.

    Args:
        directory: on the drive, for the steps of a GPT.
        device: "cpu" or "cuda".
        rounds: of which the medians are taken.
    """
    torch.set_num_threads(1)
    hardware = lightning_ssd.HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    return {
        "device": device,
        "rounds": rounds,
        "per_tensor": per_tensor(hardware, device, rounds),
        "counts": counts(hardware, device),
        "tiny_gpt": tiny_gpt(hardware, device, rounds),
        "once_per_step_ms": once_per_step(hardware, device, rounds),
        "beside_planner": beside_planner(rounds),
    }


def table(found: dict[str, Any]) -> str:
    """The measurements as a Markdown table."""
    tensors, counted, gpt = found["per_tensor"], found["counts"], found["tiny_gpt"]

    def us(name: str, *columns: str) -> str:
        row = tensors[name]
        return NOT_MEASURED if row is None else " / ".join(f"{row[column]:.1f}" for column in columns)

    def per(name: str) -> str:
        row = counted[name]
        return NOT_MEASURED if row is None else f"{row['calls']:.1f} / {row['locks']:.2f}"

    once = found["once_per_step_ms"]
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in once.items())
    where = "CPU" if found["device"] == "cpu" else found["device"]
    rows = [
        ("small tensor, us beyond identity hooks", us("small", "thread_us"), "2.5"),
        ("parameter, us beyond identity hooks", us("parameter", "thread_us"), "2.5"),
        (f"large, stays ({where}), us", us("large, stays", "thread_us"), "5"),
        ("moved to a drive, training thread / process, us", us("moved", "thread_us", "process_us"), "30 / 60"),
        ("Python calls / locks per kept tensor", per("large, stays"), "4 / 0"),
        ("Python calls / locks per moved tensor", per("moved"), "15 / 0"),
        (
            "tiny GPT of 24 blocks, everything moved (min_tensor_bytes=1): step / plain",
            f"{gpt['everything moved']:.2f}",
            "1.8",
        ),
        ("the same, default policy: step / plain", f"{gpt['default']:.2f}", "1.03"),
        (
            f"once per step at {ONCE_STORAGES} storages, {ONCE_PARAMETERS} parameters, ms",
            f"{sum(once.values()):.2f} ({parts})",
            "0.5",
        ),
        ("step beside a planning process / alone", f"{found['beside_planner']:.2f}", "1.1 where a core is free"),
    ]
    lines = ["| evidence | measured | target, at most |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
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
