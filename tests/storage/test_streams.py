"""The device path's ordering, tested without a device: copies that end late, on streams of their own."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy


class LateMark:
    """Passed when the stream gets there; ``honest=False`` claims to have passed at once."""

    def __init__(self, *, honest: bool) -> None:
        self.passed = threading.Event()
        self._honest = honest

    def synchronize(self) -> None:
        if self._honest:
            self.passed.wait()


class LateCopies:
    """Each stream is a thread that sleeps before each copy. Compute is "queued" too: a mark passes late."""

    def __init__(self, *, seed: int, max_delay_s: float, honest: bool = True) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._honest = honest
        self._streams = {name: self._start(name) for name in ("compute", "out", "in")}
        self.num_copies = 0
        self.waited_on: list[LateMark] = []

    def _start(self, name: str) -> queue.SimpleQueue[Callable[[], None] | None]:
        work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def run() -> None:
            while (item := work.get()) is not None:
                time.sleep(self._random.uniform(0, self._max_delay_s))
                item()

        threading.Thread(target=run, name=f"late-{name}", daemon=True).start()
        return work

    def close(self) -> None:
        for work in self._streams.values():
            work.put(None)

    def _queue(self, stream: str, action: Callable[[], None]) -> LateMark:
        mark = LateMark(honest=self._honest)

        def run() -> None:
            action()
            mark.passed.set()

        self._streams[stream].put(run)
        return mark

    def mark(self) -> LateMark:
        return self._queue("compute", lambda: None)

    def copy_out(self, host: torch.Tensor, device: torch.Tensor, after: LateMark) -> LateMark:
        return self._copy("out", host, device, after)

    def copy_in(self, device: torch.Tensor, host: torch.Tensor, after: LateMark) -> LateMark:
        return self._copy("in", device, host, after)

    def _copy(self, stream: str, target: torch.Tensor, source: torch.Tensor, after: LateMark) -> LateMark:
        self.num_copies += 1

        def copy() -> None:
            after.passed.wait()
            target.copy_(source)

        return self._queue(stream, copy)

    def protect(self, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu"

    def wait_on_current_stream(self, mark: LateMark) -> None:
        self.waited_on.append(mark)
        mark.synchronize()  # the CPU is its own stream


@contextmanager
def late_copies(*, max_delay_s: float = 0.004, honest: bool = True) -> Iterator[LateCopies]:
    copies = LateCopies(seed=0, max_delay_s=max_delay_s, honest=honest)
    try:
        yield copies
    finally:
        copies.close()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(320, 320), torch.nn.GELU()) for _ in range(6)))


def train(offloader: Offloader | None, *, steps: int = 3, drained: bool = True) -> list[torch.Tensor]:
    module, results = model(), []
    batch = torch.randn(64, 320, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        if offloader is None:
            loss = module(batch).square().mean()
        else:
            with offloader.saved_tensors():
                loss = module(batch).square().mean()
            if drained:
                offloader.flush()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        results += [parameter.grad.clone() for parameter in module.parameters()]
    return results


def offloader(directory: Path, copies: LateCopies, *, verify: str = "off") -> Offloader:
    return Offloader(
        policy=OffloadPolicy(activations="offload", min_tensor_bytes=0, verify=verify),
        hardware=HardwareProfile(paths=directory, host_memory="256KiB"),  # few buffers, so that they are reused soon
        _copies=copies,
    )


@pytest.mark.parametrize("drained", [True, False], ids=["all on disk", "forwarding"])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_exact_with_late_copies(spill_dir: Path, verify: str, drained: bool) -> None:
    expected = train(None)
    with late_copies() as copies, offloader(spill_dir, copies, verify=verify) as late:
        got = train(late, drained=drained)
        assert late.stats.bytes_written > 0
        assert copies.num_copies > 0
        if drained:
            assert late.stats.bytes_read > 0
            assert copies.waited_on, "the consuming stream never waited for a reload"
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_missing_wait_would_be_seen(spill_dir: Path) -> None:
    """The test above can fail: with marks that lie, buffers are written before they are filled, or used when freed."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.storage.test_streams", str(spill_dir)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode < 0 or child.stdout.strip() == "different", child.stderr


def run_with_lies(directory: Path) -> None:
    expected = train(None)
    with late_copies(honest=False) as copies, offloader(directory, copies) as late:
        got = train(late)
        equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        print("equal" if equal else "different", flush=True)
        time.sleep(0.5)  # so that late copies end before their buffers are freed


def test_close_while_copies_are_late(spill_dir: Path) -> None:
    """Nothing hangs and no memory is used after it was freed."""
    with late_copies(max_delay_s=0.02) as copies, offloader(spill_dir, copies) as late, late.saved_tensors():
        loss = model()(torch.randn(64, 320)).sum()
    del loss
    assert not late.is_open


if __name__ == "__main__":
    run_with_lies(Path(sys.argv[1]))
