"""A device that PyTorch knows as one, and whose memory the host cannot touch: a process has it for good.

Its memory has two addresses. Tensors have the one at which any access of the host ends the process, and a system call
fails; operators and copies take the other one. Operators run at once, on the CPU. PyTorch's backends in Python have no
streams: those here belong to a :class:`PretendedDevice`, so that copies are late, in any order, and every race a fault.
"""

import ctypes
import mmap
import os
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from lightning_ssd.common import accelerators
from lightning_ssd.common.accelerators import Accelerator
from lightning_ssd.common.tensors import Region, StorageKey, TensorSpec
from lightning_ssd.tiers.copy_paths import storage_bytes
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import poison_what_is_freed, written_arguments

NAME = "pretended"
_PAGE_BYTES = 4096
_SPACE_BYTES = 1 << 36
_SWEEP_EVERY = 256
_PROT_NONE, _NO_RESERVE = 0, 0x4000
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CPU = torch.device("cpu")


def _convolution_backward(gradient, x, weight, *rest):
    return torch.ops.aten.convolution_backward.default(gradient, x, weight, [weight.shape[0]], *rest)


_DEVICE_TYPE = 20  # PrivateUse1, as a number
_aten = torch.ops.aten
_AS_ON_A_CPU = {
    _aten.convolution_overrideable.default: _aten.convolution.default,
    _aten.convolution_backward_overrideable.default: _convolution_backward,
}
_LOOK_ALIKE = {_aten.set_, _aten.view, _aten.as_strided, _aten._reshape_alias, _aten.unfold}


class Memory:
    """Of the device. No address is given out twice, so that nobody finds another one's bytes at his own."""

    def __init__(self):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        file = os.memfd_create("pretended-device")
        os.ftruncate(file, _SPACE_BYTES)
        flags = mmap.MAP_SHARED | _NO_RESERVE
        self._begin, real = (
            libc.mmap(None, _SPACE_BYTES, prot, flags, file, 0)
            for prot in (_PROT_NONE, mmap.PROT_READ | mmap.PROT_WRITE)
        )
        os.close(file)
        self._madvise = libc.madvise
        self._distance = real - self._begin
        self._used_bytes = 0
        self._lent = []

    def allocate(self, nbytes):
        address = self._begin + self._used_bytes
        self._used_bytes += -(-max(nbytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
        assert self._used_bytes <= _SPACE_BYTES, "the pretended device is full"
        storage = _storage_at(address, torch.device(NAME, 0), nbytes)
        self._lent.append((StorageKey(storage), Region(address, nbytes)))
        if len(self._lent) % _SWEEP_EVERY == 0:
            self._sweep()
        return storage

    def allocated_bytes(self):
        """Of the storages that somebody holds."""
        self._sweep()
        return sum(region.nbytes for _, region in self._lent)

    def real(self, address):
        """Where an address can be reached; it is the host's own if it is not ours."""
        return address + self._distance if self._begin <= address < self._begin + _SPACE_BYTES else address

    def _sweep(self):
        dead = [region for key, region in self._lent if not key.alive()]
        self._lent = [(key, region) for key, region in self._lent if key.alive()]
        for region in dead:
            self._madvise(self.real(region.address), region.nbytes, 9)  # MADV_REMOVE: the pages go back


def _storage_at(address, device, nbytes):
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


class Operators:
    """All operators that a backend must have; most of ATen's are made of these."""

    def __init__(self, memory, device, streams):
        self._memory = memory
        self._device = device
        self._streams = streams

    def __call__(self, op, *args, **kwargs):
        if op.is_view or op.overloadpacket in _LOOK_ALIKE:
            return op.redispatch(_CPU_KERNELS, *args, **kwargs)
        if op is _aten.record_stream.default:
            return self._device.protect_on(self._streams.name_of(args[1]), args[0])
        if op is _aten._copy_from.default and self._device.current in self._device.copy_streams:
            return self._copy_late(*args)
        return self._run(op, args, kwargs)

    def _run(self, op, args, kwargs):
        written = {id(t) for value in written_arguments(op, args, kwargs) for t in _ours(value)}
        twins = {}
        grown = []

        def to_host(leaf):
            if isinstance(leaf, torch.device) and leaf.type == NAME:
                return _CPU
            if not (isinstance(leaf, torch.Tensor) and leaf.device.type == NAME):
                return leaf
            is_to_grow = id(leaf) in written and leaf.numel() == 0
            host = torch.empty(0, dtype=leaf.dtype) if is_to_grow else self._on_host(leaf)
            twins[id(host)] = leaf
            if is_to_grow:
                grown.append(host)
            return host

        host_args, host_kwargs = _mapped(to_host, (args, kwargs))
        if op is _aten._copy_from.default:
            source, target, *_ = host_args
            target.copy_(source)
            written, result = {id(t) for t in _ours(args[1])}, target
        else:
            result = _AS_ON_A_CPU.get(op, op)(*host_args, **host_kwargs)
        for host in grown:
            self._give_memory(twins[id(host)], host)
        fresh = []

        def to_device(leaf):
            if not isinstance(leaf, torch.Tensor) or id(leaf) in twins:
                return twins.get(id(leaf), leaf)
            fresh.append(self._on_device(leaf))
            return fresh[-1]

        result = _mapped(to_device, result)
        inputs = list(twins.values())
        self._device.launched(inputs, [*fresh, *(t for t in inputs if id(t) in written)])
        return result

    def _on_host(self, tensor):
        storage = tensor.untyped_storage()
        return TensorSpec.of(tensor).view(_storage_at(self._memory.real(storage.data_ptr()), _CPU, storage.nbytes()))

    def _on_device(self, tensor):
        return self._give_memory(torch._C._acc.create_empty_tensor((0,), tensor.dtype), tensor)

    def _give_memory(self, made, like):
        """Of its own, with the bytes and the shape of one of the host's."""
        source = like.untyped_storage()
        storage = self._memory.allocate(source.nbytes())
        ctypes.memmove(self._memory.real(storage.data_ptr()), source.data_ptr(), source.nbytes())
        shape = (like.storage_offset(), like.size(), like.stride())
        return _aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNELS, made, storage, *shape)

    def _copy_late(self, source, target, non_blocking=False):
        assert non_blocking, "the package waits for its own copies"
        is_out = source.device.type == NAME
        host, there = (target, source) if is_out else (source, target)
        self._device.copy(self._device.current, host, there, None, is_out=is_out)
        return target


def _mapped(change, value):
    """Every leaf of an operator's arguments; PyTorch's own function takes several times as long."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return change(value)


def _ours(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME]


# -- what PyTorch asks of an accelerator, and has no answer to from a backend in Python --------------------------------


class Streams:
    """Streams and events of the device, as PyTorch's own look."""

    def __init__(self, device):
        self._device = device
        self._names = ["main"]

    def stream(self):
        name = f"copies {len(self._names)}"
        self._device.copy_streams.add(name)
        return self._named(name)

    def event(self):
        return Event(self._device, self)

    def current_stream(self):
        return self._named(self._device.current)

    def set_stream(self, stream):
        self._device.set_stream(self.name_of(stream))

    def name_of(self, stream):
        """By which the device knows it."""
        return self._names[stream.stream_id]

    def wait(self, stream, event):
        assert event.mark is not None, "nobody has recorded this event"
        self._device.wait_for(event.mark, self.name_of(stream))

    def _named(self, name):
        if name not in self._names:
            self._names.append(name)
        made = _Stream(stream_id=self._names.index(name), device_index=0, device_type=_DEVICE_TYPE)
        made.streams = self
        return made


def _accelerator(memory, streams):
    """The class of what the package calls the device by."""

    class BackendAccelerator(Accelerator):
        @staticmethod
        def current_index():
            return torch.accelerator.current_device_index()

        locks_host_memory = False
        as_current = staticmethod(nullcontext)
        new_stream = staticmethod(streams.stream)
        event = timing_event = staticmethod(streams.event)
        current_stream = staticmethod(streams.current_stream)
        allocated_bytes = staticmethod(memory.allocated_bytes)
        is_capturing = may_have_graphs = staticmethod(bool)
        memory_stats = staticmethod(dict)
        empty_cache = reset_peak = free_bytes = allowed_bytes = staticmethod(lambda: None)

        @contextmanager
        def using(self, stream):
            before = streams.current_stream()
            streams.set_stream(stream)
            try:
                yield
            finally:
                streams.set_stream(before)

        def synchronize(self):
            event = streams.event()
            event.record(streams.current_stream())
            event.synchronize()

    return BackendAccelerator


class _Stream(torch.Stream):
    def wait_event(self, event):
        self.streams.wait(self, event)


class Event:
    """A mark that knows when it was passed."""

    def __init__(self, device, streams):
        self._device, self._streams = device, streams
        self.mark = None

    def record(self, stream):
        self.mark = self._device.mark(self._streams.name_of(stream))

    def synchronize(self):
        assert self.mark is not None, "nobody has recorded this event"
        self.mark.synchronize()

    def query(self):
        assert self.mark is not None, "nobody has recorded this event"
        return self.mark.query()

    def elapsed_time(self, end):
        return 1000 * (end.mark.passed_s - self.mark.passed_s)


class BackendDevice(PretendedDevice):
    """Autograd's own thread takes the stream of forward, which PyTorch does not ask a backend in Python for."""

    forward_stream = "main"

    @property
    def current(self):
        is_autograd = isinstance(threading.current_thread(), threading._DummyThread)
        return self.forward_stream if is_autograd else super().current


class _Module(_DummyBackendModule):
    """``torch.pretended``. Operators run on the CPU, and so does its generator."""

    default_generators = (torch.default_generator,)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def _clone(storage):
    """In the place of one that takes memory from no operator."""
    return storage_bytes(storage, 0, storage.nbytes()).clone().untyped_storage()


@contextmanager
def pretended_backend(*, seed=0, lag_s=0.002):
    """PyTorch knows the device from here on."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    memory = Memory()
    device = BackendDevice(seed=seed, lag_s=lag_s, real=memory.real)
    streams = Streams(device)
    operators = Operators(memory, device, streams)
    all_others, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    all_others.fallback(operators, "PrivateUse1")
    for op in _AS_ON_A_CPU:  # PyTorch has a kernel that refuses
        own.impl(op, partial(operators, op), "PrivateUse1")
    with pytest.MonkeyPatch.context() as patch:
        poison_what_is_freed(patch, device)
        patch.setattr(torch.UntypedStorage, "clone", _clone)
        patch.setitem(accelerators._KINDS, NAME, _accelerator(memory, streams))
        try:
            yield device
        finally:
            device.close()
