"""Trainings on a pretended device: it is told what they launch, what they free is poisoned, backward has a thread."""

import threading
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ssd.common.tensors import Region
from lightning_ssd.memory.pools import ReloadPool, StagingPool
from lightning_ssd.offloader import Offloader
from lightning_ssd.optimizer.store.buffers import BufferPool
from lightning_ssd.optimizer.store.store import StateStore
from lightning_ssd.parameters.device_memory import DeviceMemory
from lightning_ssd.storage.posix import PosixBackend
from lightning_ssd.tiers import copy_paths
from lightning_ssd.tiers.host_arena import HostArena
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.support.pretended import Clock, PretendedDevice, poison


@contextmanager
def pretended_device(*, seed=0, lag_s=0.002):
    """While it is entered this thread's operations run there, and every offloader uses it."""
    device = PretendedDevice(seed=seed, lag_s=lag_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_ssd.optimizer.step.elementwise._NUM_TINY", 20
        )  # a trial of hundreds of pieces takes seconds here
        poison_what_is_freed(patch, device)
        _learn_of_writes(patch, device)
        _use_for_states(patch, device)
        _run_backward_elsewhere(patch, device)
        try:
            with Launches(device):
                yield device
        finally:
            device.close()


@contextmanager
def everything_there(*, seed=0):
    """As :func:`pretended_device`, for tests that know nothing of it: drives are watched, and a fault is an error."""
    with pretended_device(seed=seed) as device, pytest.MonkeyPatch.context() as patch:
        for name, what in {"write": "the file got a buffer", "read": "a read filled a buffer"}.items():
            tell = partial(device.host_used, what=what, is_write=name == "read")
            _around(patch, PosixBackend, name, lambda backend, arena, region, offset, tell=tell: tell(region))
        yield device
    assert not device.faults, set(device.faults)


def on(device):
    """Arguments of an offloader for activations there."""
    return {"_copies": device, "_wrap_backend": lambda backend: WatchedBackend(backend, device)}


@contextmanager
def poisoned_memory():
    """Memory of reloads on a CPU is poisoned when PyTorch has let go of it. Gives the sizes."""
    sizes = []

    def came_back(pool):
        for loan in list(pool._returned):
            poison(Region(loan.block.address, loan.block.nbytes))
            sizes.append(loan.block.nbytes)

    with pytest.MonkeyPatch.context() as patch:
        _around(patch, ReloadPool, "_drain", came_back)
        yield sizes


def _around(patch, owner, name, before):
    method = getattr(owner, name)

    def call(*args, **kwargs):
        before(*args, **kwargs)
        return method(*args, **kwargs)

    patch.setattr(owner, name, call)


def poison_what_is_freed(patch, device):
    """Whoever still uses what goes back to a pool makes a fault, and gets other bytes."""
    take, checksum = BufferPool.take, copy_paths.checksum

    def give_back_staging(pool, buffer):
        device.freed(Region(buffer.data_ptr(), buffer.nbytes), "a staging buffer")

    def free_host(arena, *extents):
        for extent in extents if arena._block is not None else ():
            for _, address, nbytes in arena.pieces(extent, extent.nbytes, extent.nbytes):
                device.freed(Region(address, nbytes), "host memory")

    def take_slot(slots, nbytes):
        storage = take(slots, nbytes)
        device.launched([], [copy_paths.storage_bytes(storage, 0, nbytes)])
        return storage

    def checked(region):
        device.host_used(region, what="a checksum was computed", is_write=False)
        return checksum(region)

    _around(patch, StagingPool, "_give_back", give_back_staging)
    _around(patch, HostArena, "free", free_host)
    patch.setattr(BufferPool, "take", take_slot)
    _around(patch, BufferPool, "give_back", lambda slots, storage: device.given_back(storage))
    patch.setattr(copy_paths, "checksum", checked)


def _learn_of_writes(patch, device):
    """Who uses what has been written knows what the worker knew, which has told so under a lock."""
    take, told = StateStore.take, WeakKeyDictionary[StateStore, dict[int, Clock]]()

    def written(store, write, *args):
        told.setdefault(store, {})[write.index] = device.knowledge()

    def take_and_learn(store, index):
        storage = take(store, index)
        device.learn(told.get(store, {}).get(index, {}))
        return storage

    _around(patch, StateStore, "_written", written)
    patch.setattr(StateStore, "take", take_and_learn)
    clocks = WeakKeyDictionary[DeviceMemory, Clock]()

    def weight_written(memory, *args):
        clocks[memory] = device.knowledge()

    def learn(memory):
        device.learn(clocks.get(memory, {}))

    _around(patch, DeviceMemory, "written", weight_written)
    _around(patch, DeviceMemory, "send_out", learn)
    _around(patch, DeviceMemory, "begin_use", learn)


def _use_for_states(patch, device):
    environment = Offloader._environment
    patch.setattr(Offloader, "_environment", lambda self, place, copies: environment(self, place, copies or device))


def _run_backward_elsewhere(patch, device):
    """As autograd does on a device: in a thread of its own, with the modes of whoever called."""
    backward = torch.Tensor.backward

    def elsewhere(tensor, *args, **kwargs):
        if threading.current_thread().name == "pretended-autograd":
            backward(tensor, *args, **kwargs)
            return
        raised = []
        stream = device.current

        def run():
            try:
                with Launches(device), device.stream(stream):
                    backward(tensor, *args, **kwargs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="pretended-autograd")
        thread.start()
        thread.join()
        if raised:
            raise raised.pop()

    patch.setattr(torch.Tensor, "backward", elsewhere)


class Launches(TorchDispatchMode):
    """Tells the device of each operation that this thread runs."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and func.overloadpacket not in _TOUCH_NOTHING:
            inputs, outputs = _tensors((args, kwargs)), _tensors(result)
            written = [_tensors(value) for value in written_arguments(func, args, kwargs)]
            known = {tensor.untyped_storage()._cdata for tensor in inputs}
            fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
            self._device.launched(inputs, [*fresh, *(tensor for tensors in written for tensor in tensors)])
        return result


_TOUCH_NOTHING = {
    torch.ops.aten.set_,
    torch.ops.aten.detach,
    torch.ops.aten.alias,
    torch.ops.aten.resize_,
    torch.ops.aten.record_stream,
}


def _tensors(tree):
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.nbytes and not leaf._is_zerotensor()
    ]


def written_arguments(func, args, kwargs):
    """Of an operator: what it writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


class WatchedBackend(WrappedBackend):
    """Whoever moves bytes between a file and memory uses host memory that no copy is using."""

    def __init__(self, inner, device):
        super().__init__(inner)
        self._device = device

    def _tell(self, region, what, *, is_write):
        self._device.host_used(region, what=what, is_write=is_write)

    def write(self, arena, region, offset):
        self._tell(region, "the file got a buffer", is_write=False)
        self.inner.write(arena, region, offset)

    def read(self, arena, region, offset):
        self._tell(region, "a read filled a buffer", is_write=True)
        self.inner.read(arena, region, offset)
