"""The pretended device itself: a race is a fault, and each guard of the package, once removed, is missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations.tensor_cache import TensorCache
from lightning_ssd.common.tensors import Region
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.pools import StagingPool
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import StoredBytes
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import StagedMover
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier
from lightning_ssd.tiers.streams import StreamEvent
from lightning_ssd.tiers.tier import Tier
from tests.support.helpers import assert_identical
from tests.support.owners import Owner, random_storage
from tests.support.patience import PATIENCE_S
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import on, pretended_device


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    """Whose streams get on only while somebody waits."""
    with pretended_device(lag_s=PATIENCE_S) as made:
        yield made


def offloader(directory: Path, device: PretendedDevice, **policy: Any) -> Offloader:
    return Offloader(
        policy=OffloadPolicy(**{"activations": "offload", "min_tensor_bytes": 0, **policy}),
        hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=0),
        **on(device),
    )


# -- what is trained ---------------------------------------------------------------------------------------------------


def perceptron(opened: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
    """Everything goes to the drive before it is wanted back."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(320, 320), nn.GELU()) for _ in range(4)))
    batch, gradients = torch.randn(64, 320), []
    for _ in range(2):
        if opened is None:
            loss = module(batch).square().mean()
        else:
            with opened.saved_tensors():
                loss = module(batch).square().mean()
            opened.flush()
        loss.backward()
        if opened is not None:
            opened.end_backward()
        gradients += [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    return gradients


def states(opened: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
    """An optimizer whose states wait on the drive."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(128, 150, generator=generator)) for _ in range(6)]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    if opened is not None:
        optimizer = opened.offload_optimizer(optimizer)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def two_streams(opened: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
    """What one stream has made another one saves; what that one has brought up the first one uses."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(2), requires_grad=True)

    def forward() -> torch.Tensor:
        y = (x * 2).exp()
        with device.stream("side"):
            device.wait_stream("main")
            z = (y * y).sin().sin()
        device.wait_stream("side")
        return (z * z).cos().sum()

    if opened is None:
        forward().backward()
    else:
        with opened.saved_tensors():
            loss = forward()
        opened.flush()
        loss.backward()
    assert x.grad is not None
    return [x.grad]


def two_backwards(opened: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
    """What one stream has read ahead another one uses."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(2), requires_grad=True)
    with nullcontext() if opened is None else opened.saved_tensors():
        y = (x * 2).exp().sin().sin().sin()
        loss = (y * y).cos().sum()
    if opened is not None:
        opened.flush()
    with device.stream("side"):
        device.wait_stream("main")
        (gradient,) = torch.autograd.grad(loss, y, retain_graph=True)
    device.wait_stream("side")
    y.backward(gradient)
    assert x.grad is not None
    return [x.grad]


Program = Callable[[Offloader | None, PretendedDevice], list[torch.Tensor]]
STATES = {"activations": "keep", "optimizer_states": "offload"}


def run(program: Program, directory: Path, device: PretendedDevice, **policy: Any) -> list[torch.Tensor]:
    with offloader(directory, device, **policy) as opened:
        return program(opened, device)


PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {
    "activations": (perceptron, {}),
    "verified": (perceptron, {"verify": "full"}),
    "states": (states, STATES),
    "streams": (two_streams, {}),
    "backwards": (two_backwards, {}),
}


@pytest.mark.usefixtures("small_subgroups")
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_races(name: str, spill_dir: Path, device: PretendedDevice) -> None:
    program, policy = PROGRAMS[name]
    expected = program(None, device)
    got = run(program, spill_dir, device, **policy)
    device.close()
    assert device.faults == []
    assert device.num_copies > 0
    assert_identical(got, expected)


# -- guards ------------------------------------------------------------------------------------------------------------


class Passed:
    """A mark for which nobody waits: it says that it has passed, and the streams still know where it is."""

    stream = None

    def __init__(self, mark: Any) -> None:
        self.clock, self._mark = mark.clock, mark

    @property
    def passed(self) -> bool:
        return bool(self._mark.passed)

    def synchronize(self) -> None:
        """Not at all."""

    def query(self) -> bool:
        return False


Remove = Callable[[pytest.MonkeyPatch, PretendedDevice], None]


def without_producers_mark(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A copy out begins whenever it likes."""
    first = device.mark()
    patch.setattr(TensorCache, "_mark", lambda self: first)


def without_states_mark(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A write of states begins before the update is over."""
    first = device.mark()
    patch.setattr(device, "mark", lambda: first)


def without_wait_for_copy_out(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A worker writes its buffer, and lets go of it and of the tensor, when the copy is only queued."""
    copy_out = device.copy_out
    patch.setattr(device, "copy_out", lambda *args: Passed(copy_out(*args)))


def without_consumers_mark(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A copy in begins while kernels of the memory's former owner are queued."""
    first, allocate = device.mark(), StagedMover.allocate
    patch.setattr(StagedMover, "allocate", lambda *args: (allocate(*args)[0], first))


def without_consumers_wait(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A kernel reads what has not been copied in yet."""
    patch.setattr(device, "wait_on_current_stream", lambda mark: None)


def without_hold_of_copy_in(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """A worker lets go of its buffer when the copy is only queued."""
    copy_in = device.copy_in
    patch.setattr(device, "copy_in", lambda *args: Passed(copy_in(*args)))


def without_protection(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Nobody is told which streams use memory."""
    patch.setattr(device, "protect", lambda tensor: None)


def without_protection_of_reloads(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Nobody is told which streams use what has come back."""
    protect = device.protect

    def of_saved(tensor: torch.Tensor) -> None:
        if device._memory(tensor.untyped_storage()).written[0] != "in":
            protect(tensor)

    patch.setattr(device, "protect", of_saved)


@dataclass(frozen=True)
class Guard:
    """What the package does, and what the device says without it."""

    remove: Remove
    fault: str
    program: str = "activations"


GUARDS = {
    "copy-out waits for the producer": Guard(without_producers_mark, "out uses memory before main has written it"),
    "write of states waits for the update": Guard(without_states_mark, "before main has written it", "states"),
    "file waits for copy-out": Guard(without_wait_for_copy_out, "the file got a buffer while a copy uses"),
    "checksum waits for copy-out": Guard(without_wait_for_copy_out, "a checksum was computed while", "verified"),
    "staging is held until copy-out": Guard(without_wait_for_copy_out, "a staging buffer was given back while"),
    "tensor is held until copy-out": Guard(without_wait_for_copy_out, "freed before its copy out had passed"),
    "slot is held until copy-out": Guard(without_wait_for_copy_out, "a slot was given back while", "states"),
    "copy-in waits for the allocation": Guard(without_consumers_mark, "in uses memory before main has written it"),
    "consumer waits for copy-in": Guard(without_consumers_wait, "main uses memory before in has written it"),
    "update waits for copy-in": Guard(without_consumers_wait, "main uses memory before in has written it", "states"),
    "staging is held until copy-in": Guard(without_hold_of_copy_in, "a staging buffer was given back while"),
    "users are recorded": Guard(without_protection, "memory could be lent again", "streams"),
    "users of reloads are recorded": Guard(without_protection_of_reloads, "memory could be lent again", "backwards"),
}


@pytest.mark.usefixtures("small_subgroups")
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_that_is_removed_is_missed(
    name: str, spill_dir: Path, device: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = GUARDS[name]
    program, policy = PROGRAMS[guard.program]
    guard.remove(monkeypatch, device)
    try:
        run(program, spill_dir, device, **policy)
    except StorageError:  # wrong checksums
        assert guard.program in ("verified", "states")
    device.close()
    assert any(guard.fault in fault for fault in device.faults), set(device.faults)


# -- guards of the tiers, whose owners let go at once ------------------------------------------------------------------


class HastyOwner(Owner):
    """Drops what it has got as soon as it has been told, as a graph that dies meanwhile."""

    def write_ended(self, stored: StoredBytes | None, error: BaseException | None) -> None:
        self.storage = None
        super().write_ended(stored, error)

    def read_ended(
        self, storage: torch.UntypedStorage | None, mark: StreamEvent | None, error: BaseException | None
    ) -> None:
        assert error is None
        super().read_ended(None, None, None)


@contextmanager
def opened_tier(name: str, directory: Path, device: PretendedDevice) -> Iterator[Tier]:
    if name == "host":
        host = HostTier(8 << 20, device, pin=False, events=EventLog())
        yield host
        host.close()
        return
    backend = PosixBackend([directory], direct=False)
    staging = StagingPool()
    mover = StagedMover(backend, staging, device)
    ssd = SsdTier(backend, mover, [directory], events=EventLog(), sampler=Sampler("off"))
    yield ssd
    ssd.close()
    staging.close()
    backend.close()


def there_and_back(name: str, directory: Path, device: PretendedDevice) -> None:
    with opened_tier(name, directory, device) as tier:
        for seed in range(3):
            owner = HastyOwner(random_storage(256 << 10, seed))
            assert tier.write(owner, 256 << 10, device.mark(), label=f"storage {seed}")
            owner.wait()
            place = owner.place
            tier.read(owner, place, torch.device("cpu"), urgent=False)
            owner.wait()
            tier.free(place)
    device.close()


@pytest.mark.parametrize("name", ["ssd", "host"])
def test_no_tier_races_with_a_hasty_owner(name: str, tmp_path: Path, device: PretendedDevice) -> None:
    there_and_back(name, tmp_path, device)
    assert device.faults == []
    assert device.num_copies == 6


TIER_GUARDS = {
    "ssd: tensor is held until copy-out": ("ssd", without_wait_for_copy_out, "freed before its copy out"),
    "ssd: tensor is held until copy-in": ("ssd", without_hold_of_copy_in, "freed before its copy in"),
    "host: tensor is held until copy-out": ("host", without_wait_for_copy_out, "freed before its copy out"),
    "host: tensor is held until copy-in": ("host", without_hold_of_copy_in, "freed before its copy in"),
    "host: memory is held until copy-in": ("host", without_hold_of_copy_in, "host memory was given back while"),
}


@pytest.mark.parametrize("name", TIER_GUARDS)
def test_a_guard_of_a_tier_that_is_removed_is_missed(
    name: str, tmp_path: Path, device: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, remove, expected = TIER_GUARDS[name]
    remove(monkeypatch, device)
    there_and_back(tier, tmp_path, device)
    assert any(expected in fault for fault in device.faults), set(device.faults)


# -- the device itself -------------------------------------------------------------------------------------------------


def test_a_host_that_touches_memory_of_the_device_is_seen(device: PretendedDevice) -> None:
    x = torch.ones(4096) + 1
    device.host_used(Region.of(x.untyped_storage()), what="a checksum was computed", is_write=False)
    assert [fault.split(" (")[0] for fault in device.faults] == [
        "a checksum was computed: this is memory of the device"
    ]


def test_streams_get_on_in_another_order_with_another_seed() -> None:
    """Each does its own work in order, and nobody knows whose turn is next."""
    orders = {order_of(seed) for seed in range(8)}
    assert len(orders) > 1
    for order in orders:
        for stream in ("one", "two", "three"):
            assert [number for name, number in order if name == stream] == list(range(4))


def order_of(seed: int) -> tuple[tuple[str, int], ...]:
    device = PretendedDevice(seed=seed, lag_s=PATIENCE_S)
    marks = {}
    for number in range(4):
        for name in ("one", "two", "three"):
            with device.stream(name):
                marks[name, number] = device.mark()
    order: list[tuple[str, int]] = []
    found = {id(mark): name for name, mark in marks.items()}
    passed = device._do

    def note(item: Any) -> None:
        order.append(found[id(item.mark)])
        passed(item)

    device._do = note  # type: ignore[method-assign]
    device.close()
    return tuple(order)
