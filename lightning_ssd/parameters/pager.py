"""Which weights are in memory: brought in ahead of their use, sent out behind it.

What is guessed, and what threads do at once, is a matter of time and memory alone. That no weight is ever wrong is seen
to by what moves them: on a CPU a touch of one that is not in memory finds its bytes, a page at a time
(``mapped_pager.py``); on a device it comes back before any code gets to it (``device_pager.py``).
"""

from __future__ import annotations

import _thread
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import torch

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.tensors import StorageKey, storage_of
from lightning_ssd.common.waiting import Latch
from lightning_ssd.errors import OffloaderClosedError, forget_frames
from lightning_ssd.planning.residency import window_bytes

__all__ = ["Pager", "Phase", "Place", "SavedElsewhere", "Unit", "Weight", "WeightMemory"]

Place = tuple[str, object | None]
"""Name of a unit, and the module whose forward uses it, or FSDP2's group that gathers it; ``None``: not known (yet), or
not to be watched."""


Phase = Literal["forward", "backward", "evaluation"]


class WeightMemory(Protocol):
    """The memory of one storage, whose bytes may leave and come back."""

    key: StorageKey
    nbytes: int

    def forget(self) -> None:
        """Give the place on the drive back: the storage is held no more."""


class SavedElsewhere(Protocol):
    """A saved tensor that holds no memory."""

    def tensor(self) -> torch.Tensor:
        """The tensor, with the values that it was saved with."""


Memory = TypeVar("Memory", bound=WeightMemory)


@dataclass(eq=False, slots=True)
class Weight(Generic[Memory]):
    """One storage, and the names of the parameters in it."""

    names: list[str]
    memory: Memory
    is_frozen: bool = False
    """Whether it is not trained, as far as is known."""


class Unit(Generic[Memory]):
    """Weights that are brought in together: those of a block, of a module outside of all blocks, or shards that are
    gathered together.

    Args:
        number: of the unit.
        name: for messages.
        user: module or group of FSDP2's that uses it, if that is known. Held weakly.
    """

    def __init__(self, number: int, name: str, user: object | None) -> None:
        self.number = number
        self.name = name
        self.user: Callable[[], object | None] = (lambda: None) if user is None else weakref.ref(user)
        self.weights: list[Weight[Memory]] = []
        self.num_windows = 0
        """Calls of its forward under way. Its pages stay as long."""
        self.resident_bytes: int | None = None
        """Bytes that were brought in; ``None``: it is not in memory."""
        self.coming: Latch | None = None
        """Opens when the read under way has ended."""
        self.error: BaseException | None = None


def _key(place: Place) -> object:
    name, user = place
    return name if user is None else id(user)


class Pager(ABC, Generic[Memory]):
    """Decides when units come and go. A thread of its own reads, so that no interrupt divides a read."""

    def __init__(self) -> None:
        self.by_storage: dict[int, Unit[Memory]] = {}
        """Whose weights lie in a storage, by its address. Read in the hot path, without a lock."""
        self.units: list[Unit[Memory]] = []
        self._by_place: dict[object, Unit[Memory]] = {}
        self.resident_bytes = self.resident_peak_bytes = 0
        self.stall_s = self.stall_backward_s = 0.0
        # The use that came after each use the last time. One is enough where the order hardly changes: a forward ends
        # where its backward begins, and each phase has successors of its own. A wrong guess costs time only.
        self._after: dict[tuple[int, Phase], tuple[int, Phase]] = {}
        self._last: tuple[int, Phase] | None = None
        self._ahead: Unit[Memory] | None = None
        self._in_backward: Unit[Memory] | None = None
        self._left: Unit[Memory] | None = None
        """Whose forward has ended last. Who looks at its weights then, such as a hook, brings them back unasked."""
        self._is_closed = False
        self.has_told_of_splits = False
        """Whether the user knows that compiled code is divided where weights come."""
        self._window_bytes: int | None = None
        self._process = OwnProcess()
        # Guards units and what is counted. A leaf lock; again from a signal handler, which may come while it is held.
        self._lock = threading.RLock()
        self._requests: queue.SimpleQueue[tuple[Unit[Memory], Latch] | None] = queue.SimpleQueue()
        self._has_ended = Latch()  # the reader
        _thread.start_new_thread(self._serve, ())

    @property
    def is_closed(self) -> bool:
        """Whether no weight comes or goes any more. In a fork no thread reads, and the lock may be held for ever."""
        return self._is_closed or not self._process.is_here

    # -- units ---------------------------------------------------------------------------------------------------

    def add(self, place: Place, weight: Weight[Memory]) -> None:
        """A weight belongs to the unit of this user (without one: of this name) from now on, and to no other."""
        key = weight.memory.key.cdata
        with self._lock:
            unit = self.find_unit(place)
            if unit is None:
                unit = Unit(len(self.units), *place)
                self.units.append(unit)
                self._by_place[_key(place)] = unit
            before = self.by_storage.get(key)
            if before is unit:
                return
            unit.weights.append(weight)
            self.by_storage[key] = unit
            self._window_bytes = None
            if before is not None:
                before.weights.remove(weight)

    def find_unit(self, place: Place) -> Unit[Memory] | None:
        found = self._by_place.get(_key(place))
        return found if found is not None and found.user() is place[1] else None

    def save(self, tensor: torch.Tensor, unit: Unit[Memory]) -> SavedElsewhere | None:
        """Return what autograd is to hold in place of a saved weight, or of a view of one; ``None``: it may be held."""
        return None

    def find(self, storage: torch.UntypedStorage) -> Weight[Memory] | None:
        unit = self.by_storage.get(storage._cdata)
        found = () if unit is None else tuple(unit.weights)
        return next((weight for weight in found if weight.memory.key.cdata == storage._cdata), None)

    def waits(self, parameter: torch.Tensor) -> bool:
        return _cdata(parameter) in self.by_storage

    @property
    def weights(self) -> list[Weight[Memory]]:
        return [weight for unit in list(self.units) for weight in list(unit.weights)]

    @property
    def window_bytes(self) -> int:
        """Bytes that may be in memory at a time, to be used."""
        known = self._window_bytes  # once: another thread may forget it meanwhile
        if known is None:
            with self._lock:
                sizes = [(sum(weight.memory.nbytes for weight in u.weights), self._comes_ahead(u)) for u in self.units]
                known = self._window_bytes = window_bytes(sizes)
        return known

    @property
    def passing_bytes(self) -> int:
        """Bytes in memory, or on the way there, to be used and given back: not those that the program holds. Takes no
        lock once :attr:`window_bytes` is known.
        """
        coming = [unit for unit in list(self.units) if unit.coming is not None and unit.resident_bytes is None]
        present = self.resident_bytes + sum(weight.memory.nbytes for unit in coming for weight in list(unit.weights))
        return min(present, self.window_bytes)

    @property
    def to_come_bytes(self) -> int:
        """Bytes that may be in memory at a time, and are not present."""
        return 0 if self.is_closed else max(self.window_bytes - self.passing_bytes, 0)  # the former may grow meanwhile

    # -- uses ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit[Memory]) -> None:
        """A forward that uses the unit begins: wait for its weights, and have the next ones brought in.

        Raises:
            StorageError: the drive refuses to read them.
            OffloaderClosedError: this is a fork of the process that they belong to.
        """
        if self.is_closed:
            if not self._process.is_here:
                raise OffloaderClosedError(
                    f"the weights of {unit.name or 'the model'} wait on a drive for process {self._process.pid}, and "
                    f"this is its fork {os.getpid()}, where they cannot be read; copy the model before the fork "
                    "(copy.deepcopy), or start processes by spawn"
                )
            return
        with self._lock:
            unit.num_windows += 1
        if torch._C._current_autograd_node() is not None:  # a checkpoint repeats it
            self.wanted(unit)
            return
        self._in_backward = None
        self._use(unit, "forward" if torch.is_grad_enabled() else "evaluation")

    def is_traced(self, unit: Unit[Memory]) -> None:
        """The compiler traces a forward: what it compiles will run without us."""

    def leave(self, unit: Unit[Memory]) -> None:
        """A forward that used the unit has ended, or failed."""
        if self.is_closed:
            return
        with self._lock:
            unit.num_windows = max(unit.num_windows - 1, 0)
            self._left = unit
            if unit is not self._ahead and unit is not self._in_backward:  # else it is used next
                self._send_out(unit)

    def wanted(self, unit: Unit[Memory]) -> None:
        """Backward asks for a weight of the unit."""
        before = self._in_backward
        if unit is before or self.is_closed:
            return
        self._in_backward = unit
        if before is not None:
            with self._lock:
                self._send_out(before)
        self._use(unit, "backward")

    def will_be_updated(self, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer has these parameters that enters :meth:`updating` for each update."""

    @contextmanager
    def updating(self, parameters: Sequence[torch.Tensor], following: Sequence[torch.Tensor]) -> Iterator[None]:
        """While an optimizer updates these parameters, and then those that follow.

        Raises:
            StorageError: the drive refuses to read them.
        """
        yield
        if not self.is_closed:
            with self._lock:
                for unit in self._units_of(parameters):
                    self._send_out(unit)
                if not following and self._ahead is not None:  # it may just have left
                    self._request_ahead(self._ahead)

    def _units_of(self, parameters: Iterable[torch.Tensor]) -> list[Unit[Memory]]:
        found = [unit for p in parameters if (unit := self.by_storage.get(_cdata(p))) is not None]
        return list(dict.fromkeys(found))

    def border(self) -> None:
        """A backward is over: what was touched outside of all units leaves, too; what is gone is forgotten.

        An interrupt may have come between the beginning of a forward and its end: none is under way now.
        """
        if self.is_closed:
            return
        self._in_backward = None
        with self._lock:
            for unit in list(self.units):
                unit.num_windows = 0
                for weight in [weight for weight in list(unit.weights) if not weight.memory.key.alive()]:
                    if not self.is_closed:
                        weight.memory.forget()  # first: an interrupt would lose its place on the drive
                    self._drop(unit, weight)
                if unit is not self._ahead or not unit.weights:
                    self._send_out(unit, strays=True)

    def _drop(self, unit: Unit[Memory], weight: Weight[Memory]) -> None:
        """It is none of ours any more. The lock is held."""
        if weight in unit.weights:
            unit.weights.remove(weight)
            self._window_bytes = None
            self.by_storage.pop(weight.memory.key.cdata, None)

    def _use(self, unit: Unit[Memory], phase: Phase) -> None:
        with self._lock:
            use, guessed = (unit.number, phase), self._ahead
            if self._last is not None:
                self._after[self._last] = use
            self._last, following = use, self._after.get(use)
            ahead = self._ahead = None if following is None else self.units[following[0]]
            if guessed is not None and guessed is not unit and guessed is not ahead:
                self._send_out(guessed)  # it was not used after all
            left, self._left = self._left, None
            if left is not None and left is not unit and left is not ahead:
                self._send_out(left, strays=True)
            latch = self._request(unit)
            further = None if following is None else self._after.get(following)
            self._look_ahead(None if ahead is unit else ahead, None if further is None else self.units[further[0]])
        self._wait(unit, latch)

    def _wait(self, unit: Unit[Memory], latch: Latch | None) -> None:
        """Block until a unit that was requested is here. The caller holds no lock."""
        if latch is not None and not latch.is_open:
            begun_s = time.perf_counter()
            latch.wait()
            waited_s = time.perf_counter() - begun_s
            self.stall_s += waited_s
            self.stall_backward_s += waited_s if torch._C._current_autograd_node() is not None else 0.0
        if unit.error is not None:
            error, unit.error, unit.coming = unit.error, None, None
            raise error

    def _comes_ahead(self, unit: Unit[Memory]) -> bool:
        """Whether it is in memory before its use begins."""
        return True

    def _request_ahead(self, unit: Unit[Memory]) -> None:
        """Have a unit brought in that is likely to be used next. The lock is held."""
        self._request(unit)

    def _look_ahead(self, ahead: Unit[Memory] | None, further: Unit[Memory] | None) -> None:
        """Have units brought in that are likely to be used next, and after that, in place of those that were before;
        ``None``: none is known. The lock is held.
        """
        if ahead is not None:
            self._request_ahead(ahead)

    def _request(self, unit: Unit[Memory]) -> Latch | None:
        """Have a unit brought in, if it is neither here nor on its way; return what opens when it is."""
        if unit.resident_bytes is not None or self.is_closed:
            return None
        if unit.coming is None or unit.coming.is_open:  # the latter: a read ahead has failed, and is tried again
            unit.error = None
            latch = Latch()
            self._requests.put((unit, latch))  # first: an interrupt in between costs a read, and no wait for ever
            unit.coming = latch
        return unit.coming

    def _is_idle(self, unit: Unit[Memory]) -> bool:
        """Whether it is not used, and is not on its way."""
        is_coming = unit.coming is not None and not unit.coming.is_open
        return not (self.is_closed or unit.num_windows or is_coming)

    @abstractmethod
    def _send_out(self, unit: Unit[Memory], *, strays: bool = False) -> None:
        """Unless it is in use, or on its way. ``strays``: also where it was not brought in. The lock is held."""

    @abstractmethod
    def _bring_in(self, unit: Unit[Memory]) -> None:
        """In the reader: block until the weights of a unit can be used."""

    # -- the reader ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            self._read(*request)
        self._has_ended.open()

    def _read(self, unit: Unit[Memory], latch: Latch) -> None:
        error: BaseException | None = None
        try:
            self._bring_in(unit)
        except BaseException as problem:  # raised where the unit is used
            forget_frames(problem)
            error = problem
        with self._lock:
            unit.error = error
            if error is None and unit.resident_bytes is None:
                self._has_come(unit)
            latch.open()

    def _has_come(self, unit: Unit[Memory]) -> None:
        unit.resident_bytes = sum(weight.memory.nbytes for weight in list(unit.weights))
        self._count(unit.resident_bytes)

    def _count(self, nbytes: int) -> None:
        self.resident_bytes += nbytes
        self.resident_peak_bytes = max(self.resident_peak_bytes, self.resident_bytes)

    def close(self) -> None:
        """Nothing is brought in or sent out any more; the reader has ended. Idempotent."""
        with self._lock:
            if not self.is_closed:
                self._is_closed = True
                self.by_storage = {}
                self._requests.put(None)  # behind all requests that there are
        self._has_ended.wait()


def _cdata(parameter: torch.Tensor) -> int:
    part = local_of(parameter)
    try:
        return 0 if part.layout is not torch.strided else storage_of(part)._cdata
    except (NotImplementedError, RuntimeError):  # it has no storage
        return 0
