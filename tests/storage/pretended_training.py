"""Trainings on a pretended device: what they launch is told, what they free is poisoned, backward has its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_ssd.offloader import Offloader
from lightning_ssd.slots import Slots
from lightning_ssd.storage import movers
from lightning_ssd.storage.host_arena import HostArena
from lightning_ssd.storage.staging import StagingPool
from lightning_ssd.tensors import Region
from tests.storage.pretended import Launches, PretendedDevice, WatchedBackend


@contextmanager
def pretended_device(*, seed: int = 0, lag_s: float = 0.002) -> Iterator[PretendedDevice]:
    """While it is entered this thread's operations run there, and every offloader uses it."""
    device = PretendedDevice(seed=seed, lag_s=lag_s)
    with pytest.MonkeyPatch.context() as patch:
        _poison_what_is_freed(patch, device)
        _use_for_states(patch, device)
        _run_backward_elsewhere(patch, device)
        try:
            with Launches(device):
                yield device
        finally:
            device.close()


def on(device: PretendedDevice) -> dict[str, Any]:
    """Arguments of an offloader for activations there."""
    return {"_copies": device, "_wrap_backend": lambda backend: WatchedBackend(backend, device)}


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, before: Callable[..., None]) -> None:
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(*args, **kwargs)

    patch.setattr(owner, name, call)


def _poison_what_is_freed(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    take, checksum = Slots.take, movers.checksum

    def give_back_staging(pool: Any, block: Any) -> None:
        device.freed(Region(block.address, block.nbytes), "a staging buffer")

    def free_host(arena: Any, extent: Any) -> None:
        if arena._block is not None:
            for _, address, nbytes in arena.pieces(extent, extent.nbytes, extent.nbytes):
                device.freed(Region(address, nbytes), "host memory")

    def take_slot(slots: Any, nbytes: int) -> torch.UntypedStorage:
        storage = take(slots, nbytes)
        device.launched([], [movers.storage_bytes(storage, 0, nbytes)])
        return storage

    def give_back_slot(slots: Any, storage: torch.UntypedStorage) -> None:
        device.given_back(storage)

    def checked(region: Region) -> int:
        device.host_used(region, what="a checksum was computed", is_write=False)
        return checksum(region)

    _around(patch, StagingPool, "_give_back", give_back_staging)
    _around(patch, HostArena, "free", free_host)
    patch.setattr(Slots, "take", take_slot)
    _around(patch, Slots, "give_back", give_back_slot)
    patch.setattr(movers, "checksum", checked)


def _use_for_states(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    site = Offloader._site
    patch.setattr(Offloader, "_site", lambda self, place, copies: site(self, place, copies or device))


def _run_backward_elsewhere(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """As autograd does on a device: in a thread of its own, with the modes of whoever called."""
    backward = torch.Tensor.backward

    def elsewhere(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "pretended-autograd":
            backward(tensor, *args, **kwargs)
            return
        raised: list[BaseException] = []
        stream = device.current

        def run() -> None:
            try:
                with Launches(device), device.stream(stream):
                    backward(tensor, *args, **kwargs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="pretended-autograd")
        device.num_backwards += 1
        thread.start()
        thread.join()
        if raised:
            raise raised.pop()

    patch.setattr(torch.Tensor, "backward", elsewhere)
