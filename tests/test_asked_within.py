"""Signal handlers and finalizers run between any two lines of ours. Those that ask for numbers get some, and go on."""

from __future__ import annotations

import ast
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lightning_ssd
from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common import held_locks
from lightning_ssd.common.held_locks import may_hold_lock
from lightning_ssd.scheduling.scheduler import Scheduler
from lightning_ssd.telemetry.stats import OffloadStats
from tests.support.helpers import EAGER, open_offloader, within
from tests.support.offloader_steps import step

PACKAGE = Path(lightning_ssd.__file__).parent
GIB = 1 << 30
KINDS = {
    "activations": OffloadPolicy(activations="offload", min_tensor_bytes=0),
    "plans": OffloadPolicy(activations="auto", min_tensor_bytes=0, max_slowdown=9.0),
    "everything": OffloadPolicy(
        activations="offload",
        optimizer_states="offload",
        parameters="offload",
        gradients="offload",
        min_tensor_bytes=0,
    ),
}
_EVERY = 7
"""Lines of ours from one question to the next; no divisor of what loops have."""


class Asking:
    """As a dashboard of a signal handler asks, at lines of ours in all threads."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._num_lines = 0
        self.num_asked = self.num_within = 0
        self.written_gib = 0.0
        self.least = 0.0

    def ask(self) -> None:
        """Everything there is to be asked for."""
        offloader = self._offloader
        assert offloader.stats.num_saved >= 0
        assert all(one.num_steps >= 0 for one in offloader.optimizer_stats)
        assert offloader.plan_report is None or offloader.plan_report.num_plans > 0
        assert offloader.drive_rates is None or offloader.drive_rates.write_bytes_per_s >= 0
        drained = offloader.drain_metrics()
        self.written_gib += drained["io/write_gib"]
        self.least = min(self.least, *drained.values())
        self.num_asked += 1

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """For ``sys.settrace``."""
        return self._line if frame.f_code.co_filename.startswith(str(PACKAGE)) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self._num_lines += 1
        if event == "line" and self._num_lines % _EVERY == 0:
            self.num_within += may_hold_lock()
            self.ask()
        return self._line

    @contextmanager
    def at_lines(self) -> Iterator[None]:
        """Of this thread."""
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)


def _train(directory: Path, policy: OffloadPolicy | None, asks: list[Asking]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(3)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    data = [torch.randn(16, 40) for _ in range(4)]
    if policy is None:
        for x in data:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    with Offloader(policy=policy, hardware=hardware) as offloader:
        offloader.register_module(model)
        optimizer = offloader.offload_optimizer(optimizer)
        offloader.expect_no_optimizer()
        asking = Asking(offloader)
        with asking.at_lines():
            for x in data:
                with offloader.saved_tensors():
                    loss = model(x).square().sum()
                loss.backward()
                del loss
                offloader.end_backward()
                optimizer.step()
                optimizer.zero_grad()
        offloader.flush()
        asking.ask()
        written_bytes = offloader.stats.with_optimizers(offloader.optimizer_stats).bytes_written
        assert asking.written_gib * GIB == pytest.approx(written_bytes)
        asks.append(asking)
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_asks_between_any_two_lines_gets_numbers(kind: str, spill_dir: Path) -> None:
    """Training goes on with the bits of plain PyTorch, and what is drained adds up."""
    asks: list[Asking] = []
    mine: list[torch.Tensor] = []
    within(120, lambda: mine.extend(_train(spill_dir, KINDS[kind], asks)))
    assert asks[0].num_within > 100
    assert asks[0].num_asked - asks[0].num_within > 20
    assert asks[0].least >= 0
    for one, other in zip(mine, _train(spill_dir, None, []), strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def at_a_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Offloader, list[Callable[[], object]]]]:
    """An offloader, and what is called while a pack holds the lock of its accounting."""
    calls: list[Callable[[], object]] = []
    with open_offloader(tmp_path, EAGER) as offloader:
        accounting = offloader._opened().accounting
        opened = accounting.opened

        def wrapped(record: Any) -> None:
            assert accounting.lock.locked()
            while calls:
                calls.pop()()
            opened(record)

        monkeypatch.setattr(accounting, "opened", wrapped)
        yield offloader, calls


def test_a_signal_handler_in_the_middle_of_a_pack(
    at_a_lock: tuple[Offloader, list[Callable[[], object]]],
) -> None:
    offloader, calls = at_a_lock
    step(offloader)
    known, found = offloader.stats, list[OffloadStats]()
    calls.append(lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(offloader.stats))
    try:
        with offloader.saved_tensors():
            torch.randn(64, 64, requires_grad=True).exp().sin().sum()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [known]
    assert offloader.stats.num_saved > known.num_saved


def test_a_finalizer_in_the_middle_of_a_pack(at_a_lock: tuple[Offloader, list[Callable[[], object]]]) -> None:
    offloader, calls = at_a_lock
    found: list[object] = []

    class Dashboard:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            found.append((offloader.stats, offloader.optimizer_stats, offloader.drain_metrics()["io/write_gib"]))

    def die() -> None:
        Dashboard()
        gc.collect()

    calls.append(die)
    within(60, lambda: step(offloader))
    assert found == [(OffloadStats(), (), 0.0)]


def test_a_lock_that_comes_later_in_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that holds it asks, while the thread that trains holds the first one and waits for the second."""
    found: list[OffloadStats] = []
    with open_offloader(tmp_path, EAGER) as offloader:
        cache = offloader._opened()
        queue, accounting = cache._tiers.ssd._writes, cache.accounting  # type: ignore[union-attr]
        claim, claims, holds, asks = queue._claim, threading.Event(), threading.Event(), threading.Event()

        def claimed() -> Any:
            if not found:
                claims.set()
                holds.wait(30)  # the other thread, the first lock
                asks.wait(30)
                found.append(offloader.stats)
            return claim()

        monkeypatch.setattr(queue, "_claim", claimed)
        within(60, lambda: _save_and_hold(offloader, accounting.lock, queue, claims, holds, asks))
    assert len(found) == 1


def _save_and_hold(
    offloader: Offloader,
    lock: Any,
    queue: Any,
    claims: threading.Event,
    holds: threading.Event,
    asks: threading.Event,
) -> None:
    with offloader.saved_tensors():
        y = torch.randn(64, 64, requires_grad=True).exp()
    assert claims.wait(30), "else all may be over before the worker has begun"
    with lock:
        holds.set()
        asks.set()
        queue.progress()
    y.sum().backward()


def test_what_has_to_wait_is_refused(at_a_lock: tuple[Offloader, list[Callable[[], object]]]) -> None:
    offloader, calls = at_a_lock
    refused = {"close": offloader.close, "flush": offloader.flush}
    for name, call in refused.items():
        calls.append(call)
        with (
            pytest.raises(RuntimeError, match=rf"^{name}\(\) expects .* Set a flag there"),
            offloader.saved_tensors(),
        ):
            torch.randn(64, 64, requires_grad=True).exp()
    step(offloader)
    assert offloader.is_open


def test_waiting_for_a_plan_is_refused_where_one_is_put_in_force(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_offloader(spill_dir, KINDS["plans"]) as offloader:

        def border(scheduler: Scheduler) -> None:
            with pytest.raises(RuntimeError, match=r"^wait_for_plan\(\) expects .* Set a flag there"):
                offloader.wait_for_plan()
            num_asked.append(1)

        num_asked: list[int] = []
        monkeypatch.setattr(Scheduler, "border", border)
        step(offloader)
    assert num_asked


def _lock_names(trees: dict[str, ast.Module]) -> set[str]:
    names = {"lock"}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if ast.unparse(node.value.func).rpartition(".")[2] in ("Lock", "RLock", "Condition"):
                    names |= {ast.unparse(target).rpartition(".")[2] for target in targets}
    return names


def test_all_that_take_locks_are_known() -> None:
    trees = {
        ".".join(("lightning_ssd", *path.relative_to(PACKAGE).with_suffix("").parts)): ast.parse(
            path.read_text("utf-8")
        )
        for path in PACKAGE.rglob("*.py")
    }
    names, found = _lock_names(trees), set()
    assert {"_lock", "_changed", "_learning", "_exchange"} <= names
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "acquire":
                found.add(module)
            if isinstance(node, ast.With) and any(
                ast.unparse(item.context_expr).rpartition(".")[2] in names for item in node.items
            ):
                found.add(module)
                assert not any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node)), module
    exempt = {"lightning_ssd.recompute.global_modes", "lightning_ssd.common.uninterrupted"}
    assert found - exempt == held_locks._TAKE_LOCKS
    assert exempt <= found
