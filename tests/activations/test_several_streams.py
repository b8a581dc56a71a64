"""Training on several streams: whoever reads what a stream has queued waits for it, whichever stream he is on."""

import time
from contextlib import closing

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.activations.hooks import SavedTensorHooks
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.planning.placement import Placement
from tests.support.late import SeveralStreams
from tests.support.opened import offloader_in
from tests.support.weight_loops import passed

NUM_ELEMENTS = 1 << 18
NBYTES = 4 * NUM_ELEMENTS
LATE_S = 0.5


@pytest.fixture
def streams():
    with closing(SeveralStreams()) as made:
        yield made


def offloader(directory, streams, **policy):
    settings = {"activations": "offload", "min_tensor_bytes": 4096, "host_memory": 0} | policy
    return offloader_in(directory, **settings, _copies=streams)


class Copied(torch.autograd.Function):
    """Saves a copy of its input that the current stream makes, sooner or later; its gradient is twice that copy."""

    @staticmethod
    def forward(ctx, x, streams, late_s):
        copied = torch.zeros_like(x)

        def kernel():
            time.sleep(late_s)
            copied.data.copy_(x.data)

        ctx.mark = streams.work(kernel)
        ctx.save_for_backward(copied)
        return x * 1.0

    @staticmethod
    def backward(ctx, *gradients):
        ctx.mark.synchronize()  # as the engine waits for the stream of the forward
        (copied,) = ctx.saved_tensors
        return gradients[0] * 2 * copied, None, None


def test_what_goes_later_waits_for_the_stream_that_made_it(spill_dir, streams, monkeypatch):
    """Kept by a plan, then evicted from another stream, which has not waited for the first one yet."""
    place, seen = SavedTensorHooks._place, []

    def keep_two(self, current, nbytes):
        seen.append(nbytes)
        return (Placement.KEEP, "plan") if len(seen) <= 2 else place(self, current, nbytes)

    monkeypatch.setattr(SavedTensorHooks, "_place", keep_two)
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


def test_memory_of_states_is_recorded_for_the_stream_that_uses_it(monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self.nbytes, stream)))
    storage = torch.empty(64).untyped_storage()
    BufferPool(torch.device("cuda", 1)).used_here(storage)
    assert recorded == [(256, "stream of cuda:1")]
    BufferPool(torch.device("cpu")).used_here(storage)
    assert len(recorded) == 1


def test_a_graph_that_is_captured_asks_no_device(spill_dir, streams, monkeypatch):
    """CUDA fails a capture in which somebody asks how much memory there is, or how far a stream has got."""

    def ask(*_):
        raise AssertionError("the device was asked")

    monkeypatch.setattr(tensor_cache, "available_bytes", ask)
    with offloader(spill_dir, streams) as opened:
        monkeypatch.setattr(type(opened._opened()._clock), "has_passed", staticmethod(ask))
        streams.is_recording = True
        x = torch.ones(NUM_ELEMENTS, requires_grad=True)
        passed(opened, lambda: (x * x).exp().sum())
        assert opened.stats.bytes_saved == 0
        streams.is_recording = False
        with pytest.raises(AssertionError, match="asked"), opened.saved_tensors():
            pass
