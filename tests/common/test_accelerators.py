"""Which device is asked in which words, what is said of one that lacks something, and in which order copies run.

There is no other accelerator than CUDA to run on here. A device that PyTorch itself knows as one is made in a process
of its own; the generic words are spoken to the CPU as far as it understands them, and to CUDA where it is.
"""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_ssd import SSDOffloadFabricStrategy, SSDOffloadStrategy
from lightning_ssd.common import accelerators
from lightning_ssd.common.accelerators import (
    Accelerator,
    CudaAccelerator,
    _try_out,
    accelerator_of,
    device_types,
    has_streams,
    what_is_missing,
)
from lightning_ssd.errors import ConfigError
from lightning_ssd.tiers.streams import StreamCopies
from tests.support.helpers import Session
from tests.support.opened import offloader_in
from tests.support.patience import PATIENCE_S
from tests.support.weight_loops import gradients_of, same

CPU = torch.device("cpu")


def test_words_are_chosen_by_the_type_of_the_device():
    assert device_types()[:2] == ("cpu", "cuda")
    assert isinstance(accelerator_of(torch.device("cuda", 3)), CudaAccelerator)
    assert has_streams(torch.device("cuda", 3))
    assert accelerator_of(CPU) is None
    assert what_is_missing(CPU) is None
    assert not has_streams(CPU)
    assert accelerator_of(torch.device("meta")) is None
    assert what_is_missing(torch.device("meta")) == "torch.accelerator knows no such device here"
    assert not has_streams(torch.device("meta"))


def test_an_accelerator_of_pytorch_that_lacks_something_is_refused_by_what_it_lacks(spill_dir, forks):
    command = [*forks, "-m", "tests.support.accelerator_script", str(spill_dir)]
    child = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("kind", [SSDOffloadStrategy, SSDOffloadFabricStrategy])
def test_strategies_take_what_lightning_and_pytorch_know(kind, monkeypatch):
    """Lightning itself has no such accelerator; somebody may register one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    kind(parallel_devices=[torch.device("xpu", 0)])._configure_launcher()
    with pytest.raises(ConfigError, match="got a device of type 'mps', and can only offload from 'cpu', 'cuda', 'xpu'"):
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
    assert CudaAccelerator(torch.device("cuda", 0)).may_have_graphs() is expected


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
    cuda = CudaAccelerator(torch.device("cuda", 1))
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


@pytest.mark.gpu
def test_the_generic_words_train_on_cuda(spill_dir):
    device = torch.device("cuda", torch.cuda.current_device())
    generic = Accelerator(device)
    assert _try_out(generic, device) is None
    own, stats = CudaAccelerator(device).memory_stats(), generic.memory_stats()
    for name in ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current"):
        assert stats[name] == own[name]
    assert generic.allocated_bytes() == CudaAccelerator(device).allocated_bytes()
    check_training(spill_dir, device, StreamCopies(generic))


def test_only_that_nobody_can_tell_is_taken_for_unknown(monkeypatch):
    def broken(device):
        raise RuntimeError("the device has fallen off the bus")

    monkeypatch.setattr(torch.accelerator, "memory_allocated", broken)
    with pytest.raises(RuntimeError, match="off the bus"):
        Accelerator(CPU).allocated_bytes()
