"""What the pretended device is to know of weights that leave and come back."""

from contextlib import contextmanager

import pytest
import torch

from lightning_ssd.common.tensors import Region, StorageKey
from lightning_ssd.parameters.guard.guard_patches import guard_patches
from tests.support.pretended import PretendedDevice, _join, _Memory, poison


@contextmanager
def weights_of(device):
    """Within ``pretended_device``: ``resize_`` of a storage gives memory back to the stream that it was taken on, as
    CUDA's allocator does, and takes other memory on the current stream.
    """
    with pytest.MonkeyPatch.context() as patch:
        _follow_resizes(patch, device)
        _tell_of_streams(patch)
        yield


def _tell_of_streams(patch):
    """As ``torch.cuda.set_stream`` does while weights wait."""
    set_stream = PretendedDevice.set_stream

    def set_and_follow(device, name):
        set_stream(device, name)
        guard_patches.stream_changed()

    patch.setattr(PretendedDevice, "set_stream", set_and_follow)


def _follow_resizes(patch, device):
    resize = torch.UntypedStorage.resize_

    def resized(storage, nbytes):
        if storage.nbytes() and not nbytes:
            _given_back(device, storage)
        found = resize(storage, nbytes)
        if nbytes:
            _taken(device, storage)
        return found

    patch.setattr(torch.UntypedStorage, "resize_", resized)


def _given_back(device, storage):
    """Its next user comes after what the stream has waited for that it was taken on, and after protected streams."""
    with device._changed:
        memory = device._memory(storage)
        clock = dict(device._clock(memory.stream))
        allocators = (device._clock(stream) for stream in (memory.stream, *memory.protected))  # it has events of these
        for known in (device._seen, device._host, *allocators):
            _join(clock, known)
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


def _taken(device, storage):
    with device._changed:
        stream = device.current
        device._memories[storage._cdata] = _Memory(
            StorageKey(storage), Region.of(storage), stream, (stream, device._clock(stream)[stream])
        )
    poison(Region.of(storage))
