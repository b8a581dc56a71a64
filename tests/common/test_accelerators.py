"""Which devices tensors are moved from, and in which order copies run."""

from contextlib import contextmanager

import pytest
import torch

from lightning_ssd import SSDOffloadFabricStrategy, SSDOffloadStrategy
from lightning_ssd.common import accelerators
from lightning_ssd.common.accelerators import (
    Accelerator,
    accelerator_of,
    device_types,
)
from lightning_ssd.errors import ConfigError
from lightning_ssd.tiers.streams import StreamCopies
from tests.support.helpers import Session
from tests.support.opened import offloader_in
from tests.support.weight_loops import gradients_of, same

CPU = torch.device("cpu")


def test_tensors_are_moved_from_the_host_and_cuda():
    assert device_types() == ("cpu", "cuda")
    assert isinstance(accelerator_of(torch.device("cuda", 3)), Accelerator)
    assert accelerator_of(CPU) is None
    assert accelerator_of(torch.device("meta")) is None


@pytest.mark.parametrize("kind", [SSDOffloadStrategy, SSDOffloadFabricStrategy])
def test_strategies_refuse_other_devices(kind):
    with pytest.raises(ConfigError, match="got a device of type 'mps', and can only offload from 'cpu', 'cuda'\\."):
        kind(parallel_devices=[torch.device("mps")])._configure_launcher()


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([], False),
        ([{"device": 0, "segment_pool_id": (0, 0)}, {"device": 1, "segment_pool_id": (0, 1)}], False),
        ([{"device": 0, "segment_pool_id": (0, 0)}, {"device": 0, "segment_pool_id": (0, 1)}], True),
        ([{"device": 0}], True),
        (None, True),
    ],
    ids=["nothing", "on another device", "a pool", "an older PyTorch", "an allocator that tells nothing"],
)
def test_graphs_are_known_by_pools_of_the_allocator(segments, expected, monkeypatch):
    def snapshot():
        if segments is None:
            raise RuntimeError("cudaMallocAsync does not yet support snapshot")
        return segments

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    assert Accelerator(torch.device("cuda", 0)).may_have_graphs() is expected


class Pretended:
    """An accelerator whose memory is the host's and whose work is done at once; notes what it is asked."""

    locks_host_memory = False

    def __init__(self):
        self.asked = []
        self.num_made = 0

    def _made(self, kind):
        self.num_made += 1
        return PretendedOne(f"{kind} {self.num_made}", self.asked)

    @contextmanager
    def as_current(self):
        self.asked.append("device")
        yield

    @contextmanager
    def using(self, stream):
        self.asked.append(f"on {stream.name}")
        yield
        self.asked.append(f"off {stream.name}")

    def new_stream(self):
        return self._made("stream")

    def current_stream(self):
        return PretendedOne("current", self.asked)

    def event(self):
        return self._made("event")

    timing_event = event

    def is_capturing(self):
        return False


class PretendedOne:
    def __init__(self, name, asked):
        self.name, self._asked = name, asked

    def record(self, stream):
        self._asked.append(f"{self.name} in {stream.name}")

    def wait_event(self, event):
        self._asked.append(f"{self.name} waits for {event.name}")

    def synchronize(self):
        self._asked.append(f"wait for {self.name}")

    def query(self):
        return True


def test_a_copy_runs_on_its_own_stream_behind_the_mark_and_is_marked_there():
    device = Pretended()
    copies = StreamCopies(device)
    there, here = torch.arange(5.0), torch.zeros(5)
    mark = copies.copy_out(here, there, copies.mark())
    assert torch.equal(here, there)
    copies.wait_on_current_stream(mark)
    mark.synchronize()
    assert device.asked == [
        "event 3 in current",
        *("device", "on stream 1", "stream 1 waits for event 3", "event 4 in stream 1", "off stream 1"),
        "current waits for event 4",
        *("device", "wait for event 4"),
    ]


def test_cuda_makes_an_object_of_a_stream_once(monkeypatch):
    made = []

    def make(device):
        made.append(object())
        return made[-1]

    raw = [7]
    monkeypatch.setattr(accelerators, "_raw_stream", lambda index: raw[0])
    monkeypatch.setattr(torch.cuda, "current_stream", make)
    cuda = Accelerator(torch.device("cuda", 1))
    assert cuda.current_stream() is cuda.current_stream() is made[0]
    raw[0] = 8
    assert cuda.current_stream() is made[1]
    raw[0] = 7
    assert cuda.current_stream() is made[2]


def gradients(model, batch, session):
    model.zero_grad()
    with session.saved():
        loss = model(batch).square().mean()
    session.backward(loss)
    return gradients_of(model)


def check_training(directory, device, copies):
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4))
    model, batch = torch.nn.Sequential(*blocks).to(device), torch.randn(64, 256).to(device)
    expected = gradients(model, batch, Session())
    settings = {"activations": "offload", "optimizer_states": "offload", "min_tensor_bytes": 0}
    with offloader_in(directory, **settings, device=device, _copies=copies) as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
        for _ in range(3):
            assert same(gradients(model, batch, Session(offloader, drained=True)), expected)
            optimizer.step()
        assert offloader.stats.bytes_read > 0


def test_training_through_the_protocol_is_exact(spill_dir, monkeypatch):
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(stream.name))
    device = Pretended()
    check_training(spill_dir, CPU, StreamCopies(device))
    assert recorded
    assert set(recorded) == {"current"}
    assert {"on stream 1", "on stream 2"} <= set(device.asked)
