"""Frozen weights that wait on a drive, and come back just before the part of the model that uses them runs.

On a CPU a weight stays what it is to everybody: the same object, of the same shape, at the same address. Only the
memory at that address is a part of a file, whose pages leave after a use and come back ahead of the next one. Whoever
touches a weight in between, by whatever way, finds its bytes: that costs page faults and never a number. So what is
decided here, when to bring in and when to send out, is a matter of time and memory alone.
"""

from __future__ import annotations

import _thread
import logging
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.tensors import TensorSpec
from lightning_ssd.common.uninterrupted import undisturbed
from lightning_ssd.common.waiting import Latch
from lightning_ssd.memory.malloc import trim
from lightning_ssd.parameters.units import SharedWeights, owners, shared_weights, why_it_stays
from lightning_ssd.parameters.use_order import Phase, Use, UseOrder
from lightning_ssd.parameters.weight_files import MappedStorage, WeightFiles, unreadable
from lightning_ssd.telemetry.stats import WeightStats

__all__ = ["PagedWeights", "Unit"]

_log = logging.getLogger(__name__)
_TRIM_BYTES = 64 << 20
"""After so many bytes malloc is told to give back what the weights had: it would keep it for tensors to come."""


@dataclass(eq=False, slots=True)
class _Weight:
    names: list[str]
    mapped: MappedStorage


@dataclass(eq=False, slots=True)
class Unit:
    """What is brought in together: the weights of a block, or of a module outside of all blocks."""

    number: int
    name: str
    weights: list[_Weight] = field(default_factory=list)
    num_windows: int = 0
    """Calls of its forward under way. Its pages stay as long."""
    is_in: bool = False
    coming: Latch | None = None
    """Opens when the read under way has ended."""
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Of all its weights."""
        return sum(weight.mapped.nbytes for weight in self.weights)


class PagedWeights:
    """The weights of one process that wait on drives.

    Note [exactness]: a weight is taken over only if nobody but its parameters holds its memory; then the parameters are
    given other memory with the same bytes, which shows a file that nobody else knows. Nothing that is done to it later
    can be lost: the mapping is shared with the file, so that the kernel keeps what is written through any view. A fork
    gets a copy of its own (:meth:`keep_for_the_child`), as it would have of other memory.

    Args:
        files: where they wait.
        min_nbytes: smaller ones stay.
    """

    def __init__(self, files: WeightFiles, *, min_nbytes: int) -> None:
        self._files = files
        self._min_nbytes = min_nbytes
        self._pid = os.getpid()
        self.by_storage: dict[int, Unit] = {}
        """Whose weights lie in a storage, by its address. Read in the hot path, without a lock."""
        self._units: dict[str, Unit] = {}
        self._windows: list[_Window] = []
        self._order = UseOrder()
        self._ahead: Unit | None = None
        self._in_backward: Unit | None = None
        self._resident_bytes = self._resident_peak_bytes = self._num_late = 0
        self._stall_s = 0.0
        self._taken_bytes = 0
        self._building: int | None = None
        self._is_closed = False
        # Guards units and what is counted. A leaf lock.
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[tuple[Unit, Latch] | None] = queue.SimpleQueue()
        self._has_ended = Latch()  # the reader
        _thread.start_new_thread(self._serve, ())
        _opened[:] = [known for known in _opened if known() is not None]
        _opened.append(weakref.ref(self))

    # -- taking over ---------------------------------------------------------------------------------------------

    def register_module(self, module: nn.Module) -> None:
        """Take over the frozen weights of a module. Those that are trained, or that somebody else holds, stay.

        Raises:
            OutOfSpaceError: the drives have no room for all of them. None was taken over.
            StorageError: a drive refuses. What was taken over before it did is as good as before.
        """
        new, held = [], {}
        for weights in shared_weights(module, self._min_nbytes):
            unit = self.by_storage.get(weights.storage._cdata)
            if unit is not None and not weights.is_frozen:
                self._release(weights)
            elif unit is None and weights.is_frozen:
                reason = why_it_stays(weights)
                if reason is None:
                    new.append(weights)
                else:
                    held[weights.names[0]] = reason
        names = [weights.names[0] for weights in shared_weights(module, self._min_nbytes)]
        places = owners(module, names)
        if new:
            self._files.check_room([weights.storage.nbytes() for weights in new])
            total = sum(weights.storage.nbytes() for weights in new)
            doing = f"Writing {format_sizes(total)[0]} of frozen weights"
            units = [places[weights.names[0]][0] for weights in new]
            undisturbed(partial(self._take_all, new, units), "lightning_ssd-weights", doing=doing)
        self._name_units(module, places)
        self._stand_in(places)
        self._tell(held)

    def _take_all(self, new: list[SharedWeights], units: Sequence[str]) -> None:
        for unit in units:
            self._take(unit, new.pop(0))  # whose old memory goes as soon as it has its new one
        self._files.sync()

    def _take(self, unit_name: str, weights: SharedWeights) -> None:
        """Write one storage to a file, and give its weights memory that shows it."""
        mapped = self._files.write(weights.storage)
        storage, mapped.storage = mapped.storage, None
        assert storage is not None
        with self._lock:
            unit = self._units.setdefault(unit_name, Unit(len(self._units), unit_name))
            unit.weights.append(_Weight(weights.names, mapped))
            self.by_storage[mapped.key.cdata] = unit
        for tensor in weights.tensors:
            tensor.data = TensorSpec.of(tensor).view(storage)
        self._taken_bytes += mapped.nbytes
        if self._taken_bytes >= _TRIM_BYTES:
            self._taken_bytes = 0
            trim()

    def _release(self, weights: SharedWeights) -> None:
        """Give weights that are trained after all ordinary memory: each update would be written to the drive."""
        if why_it_stays(weights) is not None:
            return
        ordinary = torch.empty(0, dtype=torch.uint8).set_(weights.storage).clone().untyped_storage()
        for tensor in weights.tensors:
            tensor.data = TensorSpec.of(tensor).view(ordinary)

    def _name_units(self, module: nn.Module, places: dict[str, tuple[str, nn.Module | None]]) -> None:
        """Weights that were taken over while the model was built get the units and names that they have in it."""
        for weights in shared_weights(module, self._min_nbytes):
            unit = self.by_storage.get(weights.storage._cdata)
            name = places[weights.names[0]][0]
            if unit is None or unit.name == name:
                continue
            with self._lock:
                moved = [one for one in unit.weights if one.mapped.key.cdata == weights.storage._cdata]
                unit.weights = [one for one in unit.weights if one not in moved]
                target = self._units.setdefault(name, Unit(len(self._units), name))
                target.weights += moved
                self.by_storage[weights.storage._cdata] = target
            for one in moved:
                one.names = weights.names

    def _stand_in(self, places: dict[str, tuple[str, nn.Module | None]]) -> None:
        standing = {window.module for window in self._windows}
        for name, module in dict(places.values()).items():
            unit = self._units.get(name)
            if unit is not None and unit.weights and module is not None and module not in standing:
                standing.add(module)
                self._windows.append(_Window(module, unit, self))

    def _tell(self, held: dict[str, str]) -> None:
        nbytes = self.stats.nbytes
        _log.info("%s of frozen weights wait on drives between their uses", format_sizes(nbytes)[0])
        if held:
            name, reason = next(iter(held.items()))
            warnings.warn(
                f"{len(held)} frozen weights stay in memory, since exchanging their memory would part them from who "
                f"else holds it; the first is {name}: {reason}",
                stacklevel=4,
            )
        elif not nbytes:
            warnings.warn(
                "OffloadPolicy.parameters='offload' moves nothing: no weight of at least min_tensor_bytes is frozen; "
                "set requires_grad=False on those that are not trained, or min_tensor_bytes lower",
                stacklevel=4,
            )

    # -- while a model is built ----------------------------------------------------------------------------------

    @contextmanager
    def streamed_init(self) -> Iterator[None]:
        """Take over the weights of modules that this thread builds inside, as soon as each module is part of another.

        A module's weights are whole in memory only until then. Those that turn out to be trained come back to memory
        when the model is registered.
        """
        self._building = threading.get_ident()
        hooks = [
            register_module_module_registration_hook(self._module_is_registered),
            register_module_parameter_registration_hook(self._parameter_is_registered),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._building = None

    def _module_is_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None and threading.get_ident() == self._building:
            self._take_built(shared_weights(submodule, self._min_nbytes), type(submodule).__name__)

    def _parameter_is_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """One that replaces another one has its values already; others are about to be initialised."""
        if parameter is None or module._parameters.get(name) is None or threading.get_ident() != self._building:
            return
        holder = nn.Module()
        holder._parameters[name] = parameter
        self._take_built(shared_weights(holder, self._min_nbytes), type(module).__name__)

    def _take_built(self, built: list[SharedWeights], unit_name: str) -> None:
        for weights in built:
            unit = self.by_storage.get(weights.storage._cdata)
            if unit is None and why_it_stays(weights) is None:
                self._take(unit_name, weights)
            elif unit is not None:
                for weight in unit.weights:
                    if weight.mapped.key.cdata == weights.storage._cdata:
                        weight.mapped.send_out()

    # -- uses ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """A forward that uses the unit begins: wait for its weights, and have the next ones brought in.

        Raises:
            StorageError: the drive refuses to read them.
        """
        repeats = torch._C._current_autograd_node() is not None  # a checkpoint
        phase = Phase.BACKWARD if repeats else Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        if self._is_closed:
            return
        with self._lock:
            unit.num_windows += 1
        if not repeats:
            self._in_backward = None
            self._use(unit, phase)
        else:
            self.wanted(unit)

    def leave(self, unit: Unit) -> None:
        """A forward that used the unit has ended, or failed."""
        if self._is_closed:
            return
        with self._lock:
            unit.num_windows = max(unit.num_windows - 1, 0)
            if unit is self._ahead or unit is self._in_backward:
                return  # it is used next
            self._send_out(unit)

    def wanted(self, unit: Unit) -> None:
        """Backward asks for a weight of the unit.

        Raises:
            StorageError: the drive refuses to read them.
        """
        before = self._in_backward
        if unit is before or self._is_closed:
            return
        self._in_backward = unit
        if before is not None:
            with self._lock:
                self._send_out(before)
        self._use(unit, Phase.BACKWARD)

    def border(self) -> None:
        """A backward is over: what was touched outside of all units leaves, too; what is gone is forgotten."""
        self._in_backward = None
        with self._lock:
            for unit in self._units.values():
                for weight in [weight for weight in unit.weights if not weight.mapped.key.alive()]:
                    unit.weights.remove(weight)
                    self.by_storage.pop(weight.mapped.key.cdata, None)
                    weight.mapped.forget()
                if unit is not self._ahead:
                    self._send_out(unit, strays=True)

    def _use(self, unit: Unit, phase: Phase) -> None:
        with self._lock:
            following = self._order.visit(Use(unit.number, phase))
            self._ahead = None if following is None else self._numbered(following.unit)
            ahead = self._ahead
            latch = self._request(unit, is_late=True)
            if ahead is not None and ahead is not unit:
                self._request(ahead)
        if latch is not None and not latch.is_open:
            begun_s = time.perf_counter()
            latch.wait()
            self._stall_s += time.perf_counter() - begun_s
        if unit.error is not None:
            error, unit.error, unit.coming = unit.error, None, None
            raise error

    def _numbered(self, number: int) -> Unit:
        return next(unit for unit in self._units.values() if unit.number == number)

    def _request(self, unit: Unit, *, is_late: bool = False) -> Latch | None:
        """Have a unit brought in, if it is neither here nor on its way; return what opens when it is."""
        if unit.is_in or self._is_closed:
            return None
        if unit.coming is None:
            latch = Latch()
            self._num_late += is_late
            self._requests.put(
                (unit, latch)
            )  # first: an interrupt in between costs a second read, and no wait for ever
            unit.coming = latch
        return unit.coming

    def _send_out(self, unit: Unit, *, strays: bool = False) -> None:
        if unit.num_windows or not (unit.is_in or strays) or (unit.coming is not None and not unit.coming.is_open):
            return
        for weight in unit.weights:
            weight.mapped.send_out()
        if unit.is_in:
            self._resident_bytes -= unit.nbytes
        unit.is_in, unit.coming = False, None

    # -- the reader ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """In a thread of its own, so that no interrupt comes between a request and its answer."""
        while (request := self._requests.get()) is not None:
            self._read(*request)
        self._has_ended.open()

    def _read(self, unit: Unit, latch: Latch) -> None:
        error: BaseException | None = None
        try:
            for weight in unit.weights:
                try:
                    weight.mapped.bring_in()
                except OSError as refusal:
                    raise unreadable(weight.names, weight.mapped.nbytes, refusal) from refusal
        except BaseException as problem:  # raised where the unit is used
            error = problem
        with self._lock:
            unit.error = error
            if error is None and not unit.is_in:
                unit.is_in = True
                self._resident_bytes += unit.nbytes
                self._resident_peak_bytes = max(self._resident_peak_bytes, self._resident_bytes)
            latch.open()

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> WeightStats:
        """Now."""
        return WeightStats(
            nbytes=sum(unit.nbytes for unit in self._units.values()),
            resident_bytes=self._resident_bytes,
            resident_peak_bytes=self._resident_peak_bytes,
            written_bytes=self._files.written_bytes,
            disk_bytes=self._files.disk_bytes,
            stall_s=self._stall_s,
            num_late=self._num_late,
        )

    def reset_peak(self) -> None:
        """Start the peak anew at what is in memory now."""
        self._resident_peak_bytes = self._resident_bytes

    def close(self) -> None:
        """Nothing is brought in or sent out any more. Weights stay what they are: memory that the system fills from the
        files when it is touched, and takes when it needs the room. The files go with the last weight. Idempotent.

        Raises:
            StorageError: the drive has lost what was written to a weight in place.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for window in self._windows:
            window.remove()
        self._windows.clear()
        self.by_storage = {}
        self._requests.put(None)
        self._has_ended.wait()
        try:
            self._files.sync()
        finally:
            for weight in self._weights():
                weight.mapped.send_out()
                weight.mapped.make_private()
            for unit in self._units.values():
                unit.weights.clear()  # graphs may hold the unit, and it would hold the memory of a model that is gone
            self._files.close()

    def keep_for_the_child(self) -> None:
        """In a process that has just been forked: what it writes is its own, and nobody brings anything in."""
        if self._is_closed:
            return
        self._is_closed = True
        for weight in self._weights():
            weight.mapped.make_private()

    def _weights(self) -> list[_Weight]:
        return [weight for unit in self._units.values() for weight in unit.weights]


class _Window(MethodPatch):
    """Tells when the forward of a unit's module runs."""

    def __init__(self, module: nn.Module, unit: Unit, weights: PagedWeights) -> None:
        self._unit = unit
        self._weights = weights
        super().__init__(module, label=f"unit {unit.name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        try:
            self._weights.enter(self._unit)
            return self.__wrapped__(*args, **kwargs)
        finally:  # also after an interrupt on the way in
            self._weights.leave(self._unit)


_opened: list[weakref.ref[PagedWeights]] = []


def _after_fork() -> None:
    for reference in _opened:
        weights = reference()
        if weights is not None:
            weights.keep_for_the_child()


os.register_at_fork(after_in_child=_after_fork)
