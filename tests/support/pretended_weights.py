"""What the pretended device is to know of weights that leave and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from lightning_ssd.common.tensors import Region, StorageKey
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.parameters.guard.guard_patches import guard_patches
from tests.support.pretended import Clock, PretendedDevice, _Memory, poison


@contextmanager
def weights_of(device: PretendedDevice) -> Iterator[None]:
    """While it is entered, ``resize_`` of a storage gives memory back to the stream that it was taken on, as CUDA's
    allocator does, and takes other memory on the current stream.
    """
    with pytest.MonkeyPatch.context() as patch:
        _follow_resizes(patch, device)
        _learn_of_writes(patch, device)
        _tell_of_streams(patch)
        yield


def _tell_of_streams(patch: pytest.MonkeyPatch) -> None:
    """As ``torch.cuda.set_stream`` does while weights wait."""
    set_stream = PretendedDevice.set_stream

    def set_and_follow(device: PretendedDevice, name: str) -> None:
        set_stream(device, name)
        guard_patches.stream_changed()

    patch.setattr(PretendedDevice, "set_stream", set_and_follow)


def _follow_resizes(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if storage.nbytes() and not nbytes:
            _given_back(device, storage)
        found = resize(storage, nbytes)
        if nbytes:
            _taken(device, storage)
        return found

    patch.setattr(torch.UntypedStorage, "resize_", resized)


def _given_back(device: PretendedDevice, storage: torch.UntypedStorage) -> None:
    """Its next user comes after what the stream has waited for that it was taken on, and after protected streams."""
    with device._changed:
        memory = device._memory(storage)
        clock = dict(device._clock(memory.stream))
        for known in (device._seen, device._host):
            for stream, position in known.items():
                clock[stream] = max(clock.get(stream, 0), position)
        for stream in (memory.stream, *memory.protected):  # the allocator has events of these
            for other, position in device._clock(stream).items():
                clock[other] = max(clock.get(other, 0), position)
        for stream, position in [memory.written, *memory.reads.items()]:
            if clock.get(stream, 0) < position:
                device._fault(f"memory of {memory.stream} was given back while {stream} uses it")
        for stream, item in device._under_way:
            is_over = clock.get(stream, 0) >= item.position(stream)
            if not is_over and item.storage is not None and item.storage.cdata == storage._cdata:
                device._fault("memory was given back while a copy uses it")
                item.is_valid = False
        region = Region.of(storage)
    poison(region)


def _taken(device: PretendedDevice, storage: torch.UntypedStorage) -> None:
    with device._changed:
        stream = device.current
        device._memories[storage._cdata] = _Memory(
            StorageKey(storage), Region.of(storage), stream, (stream, device._clock(stream)[stream])
        )
    poison(Region.of(storage))


def _learn_of_writes(patch: pytest.MonkeyPatch, device: PretendedDevice) -> None:
    """Who sends a weight out knows what the worker knew that has written it, and told so under a lock."""
    written, send_out = DeviceMemory.written, DeviceMemory.send_out
    told: WeakKeyDictionary[DeviceMemory, Clock] = WeakKeyDictionary()

    def written_and_told(memory: DeviceMemory, *args: Any) -> None:
        told[memory] = device.knowledge()
        written(memory, *args)

    def learn_and_send_out(memory: DeviceMemory) -> bool:
        device.learn(told.get(memory, {}))
        return send_out(memory)

    patch.setattr(DeviceMemory, "written", written_and_told)
    patch.setattr(DeviceMemory, "send_out", learn_and_send_out)
