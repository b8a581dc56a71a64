"""Training on several streams: whoever reads what a stream has queued waits for it, whichever stream he is on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations import tensor_cache as module_under_test
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.planning.placement import Placement
from tests.support.late import SeveralStreams

NUM_ELEMENTS = 1 << 18
NBYTES = 4 * NUM_ELEMENTS
LATE_S = 0.5


@pytest.fixture
def streams() -> Iterator[SeveralStreams]:
    made = SeveralStreams()
    yield made
    made.close()


def offloader(directory: Path, streams: SeveralStreams, **policy: Any) -> Offloader:
    return Offloader(
        policy=OffloadPolicy(**({"activations": "offload", "min_tensor_bytes": 4096} | policy)),
        hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=0),
        _copies=streams,
    )


class Copied(torch.autograd.Function):
    """Saves a copy of its input that the current stream makes, sooner or later; its gradient is twice that copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: SeveralStreams, late_s: float) -> torch.Tensor:
        copied = torch.zeros_like(x)

        def kernel() -> None:
            time.sleep(late_s)
            copied.data.copy_(x.data)

        ctx.mark = streams.work(kernel)
        ctx.save_for_backward(copied)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.mark.synchronize()  # as the engine waits for the stream of the forward
        (copied,) = ctx.saved_tensors
        return gradients[0] * 2 * copied, None, None


def test_what_goes_later_waits_for_the_stream_that_made_it(
    spill_dir: Path, streams: SeveralStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept by a plan, then evicted from another stream, which has not waited for the first one yet."""
    place, seen = module_under_test.TensorCache._place, []

    def keep_two(self: Any, current: Any, nbytes: int) -> Any:
        seen.append(nbytes)
        return (Placement.KEEP, "plan") if len(seen) <= 2 else place(self, current, nbytes)

    monkeypatch.setattr(module_under_test.TensorCache, "_place", keep_two)
    x = torch.ones(NUM_ELEMENTS, requires_grad=True)
    with offloader(spill_dir, streams, activations="auto", activation_budget=5 * NBYTES // 2) as opened:
        with opened.saved_tensors():
            streams.current = "side"
            outputs = [Copied.apply(x, streams, LATE_S)]
            streams.current = "main"
            outputs += [Copied.apply(x, streams, 0.0) for _ in range(3)]
        streams.work(lambda: None, "side").synchronize()
        opened.flush()
        sum(outputs).sum().backward()
        assert opened.stats.bytes_written >= 3 * NBYTES
    assert torch.equal(x.grad, torch.full_like(x, 8.0))


def test_tensors_are_recorded_for_the_streams_that_use_them(spill_dir: Path, streams: SeveralStreams) -> None:
    x = torch.ones(NUM_ELEMENTS, requires_grad=True)
    with offloader(spill_dir, streams) as opened:
        streams.current = "side"
        with opened.saved_tensors():
            y = (x * 2).exp()
        opened.flush()
        assert streams.protected == [("side", y.untyped_storage().data_ptr())]
        del streams.protected[:]
        loss = y.sum()
        del y
        streams.current = "main"
        loss.backward()
    assert [stream for stream, _ in streams.protected] == ["main"]


def test_nothing_moves_while_a_graph_is_captured(spill_dir: Path, streams: SeveralStreams) -> None:
    x = torch.ones(NUM_ELEMENTS, requires_grad=True)
    with offloader(spill_dir, streams) as opened:
        for streams.is_recording in (True, False):
            with opened.saved_tensors():
                loss = (x * 2).exp().sum()
            opened.flush()
            loss.backward()
            opened.end_backward()
            assert (opened.stats.bytes_saved > 0) is not streams.is_recording
            assert (streams.protected != []) is not streams.is_recording


def test_memory_of_states_is_recorded_for_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self.nbytes, stream)))
    storage = torch.empty(64).untyped_storage()
    BufferPool(torch.device("cuda", 1)).used_here(storage)
    assert recorded == [(256, "stream of cuda:1")]
    BufferPool(torch.device("cpu")).used_here(storage)
    assert len(recorded) == 1


def test_a_graph_that_is_captured_asks_no_device(
    spill_dir: Path, streams: SeveralStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA fails a capture in which somebody asks how much memory there is, or how far a stream has got."""

    def ask(*_: Any) -> Any:
        raise AssertionError("the device was asked")

    monkeypatch.setattr(module_under_test, "available_bytes", ask)
    with offloader(spill_dir, streams) as opened:
        monkeypatch.setattr(type(opened._opened()._clock), "has_passed", staticmethod(ask))
        streams.is_recording = True
        x = torch.ones(NUM_ELEMENTS, requires_grad=True)
        with opened.saved_tensors():
            loss = (x * x).exp().sum()
        loss.backward()
        opened.end_backward()
        assert opened.stats.bytes_saved == 0
        streams.is_recording = False
        with pytest.raises(AssertionError, match="asked"), opened.saved_tensors():
            pass


def test_what_an_operation_fills_after_saving_it(spill_dir: Path, streams: SeveralStreams) -> None:
    """The next operation, before which it may not leave, is on another stream, which has not waited for it."""
    noise = torch.zeros(NUM_ELEMENTS)

    def draw() -> None:
        time.sleep(LATE_S)
        noise.data.fill_(2.0)

    class Fills(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "rrelu_with_noise" not in str(func):
                return func(*args, **(kwargs or {}))
            opened.flush()
            streams.work(draw)
            return args[0] * 1

    x, y = (torch.full((NUM_ELEMENTS,), -1.0, requires_grad=True) for _ in "xy")
    with offloader(spill_dir, streams) as opened:
        with opened.saved_tensors():
            with Fills():
                first = torch._C._nn.rrelu_with_noise(x, noise, 0.1, 0.3, True)
            streams.current = "other"
            second = y.exp()
            opened.flush()
        (first + second).sum().backward()
        assert opened.stats.bytes_written >= 2 * NBYTES
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
