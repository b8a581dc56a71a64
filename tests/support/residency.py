"""Memory that is said to have room for a part of a model: that of a machine, or of a device whose copies end late."""

import math
from contextlib import contextmanager

import torch

from lightning_ssd import OffloadPolicy
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.memory import gauge
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.planning import update_memory
from lightning_ssd.planning.update_memory import update_bytes
from tests.support.offloaders import offloaders
from tests.support.weight_loops import MIN_TENSOR, NUM_BLOCKS, WIDTH, Loop, built

GIB = 1 << 30
BLOCK_BYTES = 4 * 8 * WIDTH * WIDTH
"""What is frozen of a block; biases are too small."""
ALL_BYTES = NUM_BLOCKS * BLOCK_BYTES + built().embedding.weight.nbytes
"""What is frozen and large."""
COMING_BYTES = NUM_BLOCKS * 3 * 4 * WIDTH * WIDTH
"""Gradients and states of the adapters."""
NUM_WEIGHTS = 2 * NUM_BLOCKS + 1
"""That are frozen and large."""
TRAINED = {"optimizer_states": "offload", "gradients": "auto"}


def policy(**options):
    return OffloadPolicy(**{"parameters": "auto", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


def in_update(model):
    """Of states that wait, what an update has in memory."""
    return update_bytes(2 * sum(p.nbytes for p in model.parameters() if p.requires_grad), 1)


def small_bytes(model):
    """Of weights that cannot wait."""
    return sum(p.nbytes for p in model.parameters()) - ALL_BYTES


def blocks_of(names):
    return sorted({int(name.split(".")[1]) for name in names if name.startswith("blocks.")})


class Place:
    """Where weights lie while they are used, and how much of it there is.

    A kind of place knows which tensors it ``waits`` for. It is told that it ``has`` so many bytes (``None``: nobody
    tells), that it ``has_room`` for weights that may wait (as much is left for activations), or what ``is_used`` by
    something else.

    Args:
        make: opens offloaders.
    """

    is_late = False
    """Its copies end late."""
    hooks = ""
    """The attribute of parameters with the hooks that nothing needs where all stay."""

    def __init__(self, make):
        self._make = make
        self.models = []

    def open(self, *modules, **options):
        self.models += modules
        return self._make(*modules, **options)

    def loop(self, offloader, **options):
        """A training whose model is registered."""
        loop = Loop(None, **options)
        self.models.append(loop.model)
        register(loop, offloader)
        return loop

    def waiting(self, model):
        """Names of the weights that wait, or are brought in to be used."""
        return [name for name, parameter in model.named_parameters() if self.waits(parameter)]

    def gradients(self, model):
        """Names of the parameters whose gradients wait."""
        return [n for n, p in model.named_parameters() if p.grad is not None and self.waits(p.grad)]


class Host(Place):
    """The memory of a machine."""

    hooks = "_post_accumulate_grad_hooks"

    def __init__(self, make, patch):
        super().__init__(make)
        self.available_bytes = 1000 * GIB
        self.held_bytes = 0
        patch.setattr(gauge, "host_available_bytes", lambda cached: self.available_bytes)
        patch.setattr(gauge, "anonymous_bytes", lambda: self.held_bytes)
        patch.setattr(gauge, "level_bytes", lambda device: self.held_bytes)

    def waits(self, tensor):
        return is_mapped(tensor.untyped_storage())

    def has(self, nbytes):
        self.available_bytes = nbytes

    def has_room(self, nbytes, *, coming=COMING_BYTES, others=0):
        self.available_bytes = math.ceil((2 * nbytes + coming) / 0.9)

    def is_used(self, nbytes, *, available):
        self.held_bytes, self.available_bytes = nbytes, available


class Card(Place):
    """A device's memory: the weights of some models lie there, as far as they have memory."""

    is_late = True
    hooks = "_backward_hooks"

    def __init__(self, make, patch):
        super().__init__(make)
        self.capacity_bytes = 1000 * GIB
        self.on_host = []
        """Storages that have not been moved there."""
        self.others_bytes = 0
        patch.setattr(update_memory, "_MIN_SUBGROUP_BYTES", 1 << 17)  # an update in many parts
        patch.setattr(gauge, "level_bytes", self.held_bytes)
        patch.setattr(gauge, "available_bytes", self.available_bytes)

    def stays_on_host(self, model):
        """Until it is moved."""
        self.models.append(model)
        self.on_host += [StorageKey(storage_of(p)) for p in model.parameters()]

    def held_bytes(self, *_):
        """What the allocator has handed out."""
        found = {storage_of(p)._cdata: storage_of(p).nbytes() for m in self.models for p in m.parameters()}
        on_host = {key.cdata for key in self.on_host}
        return self.others_bytes + sum(nbytes for cdata, nbytes in found.items() if cdata not in on_host)

    def available_bytes(self, *_):
        """What it could still hand out."""
        return None if self.capacity_bytes is None else max(self.capacity_bytes - self.held_bytes(), 0)

    def waits(self, tensor):
        return is_guarded(tensor)

    def has(self, nbytes):
        self.capacity_bytes = nbytes

    def has_room(self, nbytes, *, coming=COMING_BYTES, others=0):
        self.capacity_bytes = math.ceil((2 * nbytes + coming + others) / 0.9)

    def is_used(self, nbytes, *, available):
        self.others_bytes, self.capacity_bytes = nbytes, nbytes + available


KINDS = {"host": Host, "device": Card}


@contextmanager
def opened_place(kind, directory, patch):
    """A place of that kind."""
    with offloaders(directory, policy, is_late=kind == "device") as make:
        yield KINDS[kind](make, patch)


def register(loop, offloader):
    """As :class:`Loop` does where it makes the model."""
    offloader.register_module(loop.model)
    loop.offloader = offloader
    loop.optimizer = offloader.offload_optimizer(torch.optim.AdamW(loop.model.parameters(), lr=1e-2))
