"""Trainings on a CUDA device, bit for bit those of plain PyTorch on it. The same tests run on the CPU, where they are
proved themselves.

On CUDA each block is late on purpose, in forward and in backward: a kernel sleeps in front of it, so that what was
packed is not there yet when the Python thread goes on. Whoever does not wait for the right stream moves other bytes.
"""

from __future__ import annotations

import functools
import gc
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.scheduling.plan_report import PlanReport
from lightning_ssd.telemetry.stats import OffloadStats, OptimizerStats
from recipes.benchmarks.workers.optimizer import CopiesByHand, states_digest
from recipes.benchmarks.workers.optimizer_job import Kind
from recipes.determinism import make_deterministic
from tests.parity.lightning_pairs import MARKS, both
from tests.support.cuda_memory import allocated_bytes
from tests.support.helpers import Session, assert_identical, assert_released, moved
from tests.support.leftovers import assert_nothing_left
from tests.support.loops import VOCABULARY, Block, Gpt, loss_of
from tests.support.pairs import pairwise
from tests.support.trainers import Net, everything, fit

NUM_BLOCKS = 4
SLEEP_CYCLES = 1_000_000  # about half a millisecond
ADAMW = {"foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class Place:
    """Where a training runs, and how large it is there: the CPU's is only to prove the test."""

    device: torch.device
    stream: torch.cuda.Stream | None
    """``None``: the one that is current anyway."""
    width: int
    window: int
    batch: int = 8

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    @property
    def some_host_memory(self):
        """Less than a step saves, and than the optimizer's states are."""
        return (8 << 20) if self.is_cuda else (128 << 10)

    def entered(self):
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def tokens(self, number):
        generator = torch.Generator().manual_seed(number)
        shape = (self.batch, self.window)
        return torch.randint(VOCABULARY, shape, generator=generator).to(self.device)

    def level(self):
        """Bytes that PyTorch's allocator has given out on the device, without cuBLAS's own; 0 on a CPU."""
        gc.collect()
        if not self.is_cuda:
            return 0
        return allocated_bytes(self.device)


@functools.cache
def place_of(name):
    if name == "cpu":
        return Place(torch.device("cpu"), None, width=32, window=32)
    device = torch.device("cuda", torch.cuda.current_device())
    side = torch.cuda.Stream(device) if name == "side_stream" else None
    return Place(device, side, width=256, window=256)


@pytest.fixture(params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "side_stream"))])
def place(request):
    found = place_of(request.param)
    make_deterministic(found.device)
    return found


class Late(torch.autograd.Function):
    """The identity, after a while in either direction."""

    @staticmethod
    def forward(ctx, x):
        if x.is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients):
        if gradients[0].is_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        return gradients[0]


class LateBlock(Block):
    def forward(self, x):
        return super().forward(Late.apply(x))


@dataclass(frozen=True)
class Task:
    """A training; everything it needs is made anew for each run."""

    steps: int = 5
    micro_batches: int = 1
    autocast: bool = False
    adamw: str = "foreach"
    master_weights: bool = False
    """Parameters are bfloat16, and float32 copies of them are updated."""

    def __call__(self, place, session):
        """Train; returns all that there is to compare, in the host's memory."""
        torch.manual_seed(3)
        dtype = torch.bfloat16 if self.master_weights else torch.float32
        network = Gpt(place.width, place.window, make_block=LateBlock, num_blocks=NUM_BLOCKS).to(place.device, dtype)
        session.register(network)
        optimizer = self._optimizer(list(network.parameters()), session.offloader)
        seen = {"losses": [], "gradients": []}
        for number in range(self.steps * self.micro_batches):
            session.drained = number % 2 == 0  # on the other steps transfers run into backward
            with session.saved(), torch.autocast(place.device.type, torch.bfloat16, enabled=self.autocast):
                tokens = place.tokens(number)
                loss = loss_of(network(tokens), tokens) / self.micro_batches
            session.backward(loss)
            seen["losses"].append(host_copy(loss))
            if (number + 1) % self.micro_batches == 0:
                seen["gradients"].append([host_copy(p.grad) for p in network.parameters() if p.grad is not None])
                optimizer.step()
                network.zero_grad()
        seen["weights"] = {name: host_copy(value) for name, value in network.state_dict().items()}
        seen["states"] = states_digest(optimizer.state_dict())
        return seen

    def _optimizer(self, parameters, offloader):
        kind = Kind(torch.optim.AdamW, {"lr": 1e-2, **ADAMW[self.adamw]}, 2)
        if offloader is not None:
            return offloader.offload_optimizer(kind.cls(parameters, **kind.settings))
        return (
            CopiesByHand(parameters, kind).optimizer if self.master_weights else kind.cls(parameters, **kind.settings)
        )


def host_copy(tensor):
    return tensor.detach().cpu().clone()


def run(task, place, session):
    with place.entered():
        seen = task(place, session)
    if place.is_cuda:
        torch.cuda.synchronize(place.device)
    return seen


@functools.cache
def plainly(task, place):
    """What plain PyTorch gives."""
    return run(task, place, Session())


@dataclass(frozen=True)
class Ours:
    """How a training went that has given the bits of plain PyTorch."""

    stats: OffloadStats
    optimizers: tuple[OptimizerStats, ...]
    report: PlanReport | None


def assert_parity(task, place, directory, *, host_memory=0, **policy):
    """Losses, gradients, weights and states are those of plain PyTorch; nothing is left on drive, device or host."""
    expected = plainly(task, place)
    level = place.level()
    spill = directory / "spill"
    with ExitStack() as stack:
        offloader = Offloader(
            policy=OffloadPolicy(min_tensor_bytes=4096, master_weights=task.master_weights, **policy),
            hardware=HardwareProfile(paths=[spill], allow_unsuitable_paths=True, host_memory=host_memory),
            device=place.device,
        )
        stack.enter_context(place.entered())
        stack.enter_context(offloader)
        got = run(task, place, Session(offloader, settled=True))
        report = offloader.plan_report
        assert_released(offloader)
    assert_identical(got, expected)
    assert_nothing_left(spill)
    assert not spill.exists() or list(spill.iterdir()) == []
    ours = Ours(offloader.stats, offloader.optimizer_stats, report)
    del offloader
    assert place.level() == level, "memory of the device is held"
    assert ours.stats.failures == 0
    return ours


# -- plain PyTorch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [Task(), Task(autocast=True), Task(adamw="fused", master_weights=True)],
    ids=["float32", "autocast", "master_weights"],
)
def test_plain_training_repeats_its_bits(task, place):
    """Else nothing below could be compared."""
    assert_identical(run(task, place, Session()), plainly(task, place))


def test_what_is_compared_would_be_seen(place):
    """A training with another arithmetic has other bits."""
    one, other = plainly(Task(), place), plainly(Task(autocast=True), place)
    with pytest.raises(AssertionError, match="bits differ"):
        assert_identical(one, other)


# -- activations -------------------------------------------------------------------------------------------------------


@functools.cache
def held_bytes(task, place):
    """What keeping everything holds at its worst moment. Opens no directory."""
    return assert_parity(task, place, Path("nowhere"), activations="keep").stats.saved_peak_bytes


def assert_activation_parity(activations, task, place, directory, *, host_memory, verify="off"):
    """As :func:`assert_parity`, and bytes have moved. Under ``auto`` some must: the budget is too small for all."""
    budget = round(0.6 * held_bytes(task, place)) if activations == "auto" else None
    policy = {"activations": activations, "activation_budget": budget, "verify": verify}
    ours = assert_parity(task, place, directory, host_memory=host_memory, **policy)
    assert moved(ours.stats) > 0
    if budget is None:
        assert ours.stats.bytes_written > 0
        assert ours.stats.bytes_read > 0
        assert ours.report is None
    else:
        assert ours.stats.bytes_written + ours.stats.bytes_host > 0
        assert ours.stats.resident_peak_bytes <= budget
        assert ours.report is not None, "no plan came into force"


MODES = ("offload", "auto", "recompute_offload")


@pairwise("activations, host_memory, verify", MODES, ["none", "some"], ["off", "full"])
def test_activations(activations, host_memory, verify, place, spill_dir):
    memory = place.some_host_memory if host_memory == "some" else 0
    assert_activation_parity(activations, Task(), place, spill_dir, host_memory=memory, verify=verify)


@pytest.mark.parametrize("activations", MODES)
def test_autocast_and_accumulation(activations, place, spill_dir):
    task = Task(steps=2, micro_batches=3, autocast=True)
    assert_activation_parity(activations, task, place, spill_dir, host_memory=place.some_host_memory)


# -- optimizer states --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_subgroups")
@pairwise("adamw, master_weights, host_memory", ADAMW, [False, True], ["none", "some"])
def test_optimizer_states(adamw, master_weights, host_memory, place, spill_dir):
    """Together with activations, which go the same way at the same time."""
    task = Task(adamw=adamw, master_weights=master_weights)
    memory = place.some_host_memory if host_memory == "some" else 0
    policy = {"activations": "offload", "optimizer_states": "offload", "verify": "full"}
    ours = assert_parity(task, place, spill_dir, host_memory=memory, **policy)
    (stats,) = ours.optimizers
    assert stats.num_steps == task.steps
    assert stats.written_bytes > 0
    assert stats.read_bytes > 0
    assert 0 < stats.resident_peak_bytes < stats.state_bytes
    assert ours.stats.bytes_written > 0


# -- Lightning ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lightning_settings(place, many_subgroups):
    accelerator = "gpu" if place.is_cuda else "cpu"
    return lambda directory: {"accelerator": accelerator, "devices": 1}


class TestLightning:
    pytestmark = MARKS

    def test_by_name(self, place, lightning_settings, spill_dir):
        """As users write it; small tensors stay, under a policy of which they say nothing."""
        settings = lightning_settings(spill_dir)
        with place.entered():
            expected = everything(*fit(Net, "auto", spill_dir / "plain", **settings))
            trainer, module = fit(Net, "ssd_offload", spill_dir / "ours", **settings)
            assert_identical(everything(trainer, module), expected)
        assert trainer.strategy.root_device.type == place.device.type
        assert trainer.strategy.stats.num_kept_small > 0

    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_everything_on_ssd(self, precision, place, lightning_settings, spill_dir):
        """States too; the losses, weights, states and that bytes moved are looked at in there."""
        with place.entered():
            _, (trainer, _) = both(Net, spill_dir, lambda d: lightning_settings(d) | {"precision": precision})
        assert trainer.strategy.root_device.type == place.device.type
        assert_nothing_left(spill_dir)


# -- memory of the card: not by our own count, but by PyTorch's allocator ----------------------------------------------

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture
def opened(spill_dir):
    def make(host_memory, **policy):
        hardware = HardwareProfile(paths=[spill_dir], host_memory=host_memory)
        return Offloader(policy=OffloadPolicy(**policy), hardware=hardware, device=DEVICE)

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("host_memory", [0, 1 << 30], ids=["drive", "host"])
def test_what_states_leave_behind(host_memory, opened):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32))).to(DEVICE)
    before = allocated_bytes(DEVICE)
    with opened(host_memory, optimizer_states="offload", activations="keep") as offloader:
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(2):
            model(torch.randn(8, 1024, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.flush()
            assert optimizer.stats.state_bytes == 256 * MIB
            assert allocated_bytes(DEVICE) - before <= 4 * optimizer.stats.subgroup_bytes + MIB


@pytest.mark.gpu
def test_what_activations_leave_behind(opened):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).to(DEVICE)
    x = torch.randn(4096, 1024, device=DEVICE)
    with opened(0, activations="offload") as offloader:
        offloader.register_module(model)
        for _ in range(2):
            before = allocated_bytes(DEVICE)
            with offloader.saved_tensors():
                loss = model(x).square().mean()
            kept = allocated_bytes(DEVICE) - before
            offloader.flush()
            saved = offloader.stats.saved_peak_bytes
            assert saved >= 16 * 16 * MIB
            left = allocated_bytes(DEVICE) - before
            assert left <= 3 * 16 * MIB, (left, kept, saved)
            loss.backward()
            offloader.end_backward()
            del loss
            model.zero_grad()
