"""One training step as it went: what was in memory, what moved, who waited. Plain numbers, to be drawn and told.

A :class:`StepRecorder` collects while the step runs, and :meth:`StepRecorder.finish` sums up. All times of a
:class:`StepRecord` are seconds since the step began.
"""

from __future__ import annotations

import heapq
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, Literal

from torch import nn

from lightning_ssd.telemetry.events import Event, StallEvent, TransferEvent
from lightning_ssd.telemetry.metrics import intersection, union_s

__all__ = ["Bytes", "Level", "Life", "Move", "Phase", "PhaseName", "StepRecord", "StepRecorder", "Wait"]

PhaseName = Literal["data", "forward", "backward", "update"]
Fate = Literal["kept", "taken back", "host", "ssd"]

_MODULE_CALL = nn.Module.__call__.__code__
_NUM_SAMPLES = 400
_MIN_SAMPLE_S, _MAX_SAMPLE_S = 0.002, 0.1
_NUM_LIVES = 48
_MAX_ROWS = 4096
_MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the training thread."""

    name: PhaseName
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Bytes:
    """Saved activations at one moment."""

    at_s: float
    resident_bytes: int
    """In memory."""
    saved_bytes: int
    """Bytes that keeping all of them would hold."""


@dataclass(frozen=True, slots=True)
class Level:
    """All memory in use on the device (on a CPU: of the process) at one moment."""

    at_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer between memory and a tier."""

    direction: Literal["write", "read"]
    lane: str
    """The tier, with the number of the drive where there are several."""
    nbytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The training thread waited for a transfer."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Life:
    """One saved storage, from when autograd saved it until the graph let go of it."""

    nbytes: int
    saved_s: float
    freed_s: float
    away: tuple[tuple[float, float], ...]
    """When its memory had gone, and when memory was taken for it again (or it was freed)."""
    fate: Fate
    module: str = ""
    """Name and class of the innermost module that ran when autograd saved it; empty: none, or an unknown one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step."""

    step: int
    length_s: float
    phases: tuple[Phase, ...] = ()
    activations: tuple[Bytes, ...] = ()
    levels: tuple[Level, ...] = ()
    gradients: tuple[Level, ...] = ()
    """Bytes of gradients, as looked at while the step ran; empty where they cannot be read in backward."""
    moves: tuple[Move, ...] = ()
    waits: tuple[Wait, ...] = ()
    lives: tuple[Life, ...] = ()
    """Lives of the largest saved storages, in the order in which they were saved."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    """After backward."""
    state_bytes: int = 0
    """Optimizer states in memory when the step began; those that wait elsewhere are not among them."""

    def phase_s(self, name: PhaseName) -> float:
        """Seconds in a phase."""
        return sum(phase.end_s - phase.start_s for phase in self.phases if phase.name == name)

    def waited_s(self, name: PhaseName) -> float:
        """Seconds of a phase in which the training thread waited for transfers."""
        phases = [(phase.start_s, phase.end_s) for phase in self.phases if phase.name == name]
        return union_s(intersection(phases, [(wait.start_s, wait.end_s) for wait in self.waits]))

    def to_json(self) -> dict[str, Any]:
        """Numbers, strings and lists alone."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepRecord:
        """Read what :meth:`to_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        parts: dict[str, Any] = {
            "phases": tuple(Phase(**part) for part in content["phases"]),
            "activations": tuple(Bytes(**part) for part in content["activations"]),
            "levels": tuple(Level(**part) for part in content["levels"]),
            "gradients": tuple(Level(**part) for part in content.get("gradients", ())),
            "moves": tuple(Move(**part) for part in content["moves"]),
            "waits": tuple(Wait(**part) for part in content["waits"]),
            "lives": tuple(
                Life(**{**part, "away": tuple((begin, end) for begin, end in part["away"])})
                for part in content["lives"]
            ),
        }
        return cls(**{**content, **parts})


@dataclass(slots=True)
class _Open:
    """A saved storage that the graph still holds."""

    nbytes: int
    saved_s: float
    module: str
    left_s: float | None = None
    away: list[tuple[float, float]] | None = None


class StepRecorder:
    """Collects one step. The callers of the methods about storages hold one lock; the phases come from one thread.

    A thread reads the memory in use. It knows the recorder weakly, and so ends with it, whatever an interrupt or a
    broken device has left undone.

    Args:
        step: its number, for the record.
        level: bytes in use now; asked for in a thread of its own.
        expected_s: about how long the step will take: the level is read some hundred times in it.
        resident_bytes: saved activations in memory now.
        saved_bytes: saved activations now, wherever they are.
        gradient_bytes: of gradients now; asked for in backward, by the thread that asks for a storage. ``None``, or
            where it gives that: they cannot be read.
        modules: whose names the record has.
    """

    def __init__(
        self,
        step: int,
        level: Callable[[], int],
        *,
        expected_s: float,
        resident_bytes: int = 0,
        saved_bytes: int = 0,
        gradient_bytes: Callable[[], int | None] | None = None,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._step = step
        self._names = {id(part): name for module in modules for name, part in module.named_modules()}
        self._gradient_bytes = gradient_bytes
        self._gradients: list[Level] = []
        self._level = level
        self._begin_s = time.perf_counter()
        self._marks: list[tuple[float, PhaseName]] = [(0.0, "data")]
        self._resident_bytes, self._saved_bytes = resident_bytes, saved_bytes
        self._activations = [Bytes(0.0, resident_bytes, saved_bytes)]
        self._levels: list[Level] = []
        self._open: dict[int, _Open] = {}
        self._lives: list[tuple[int, int, Life]] = []  # a heap of the largest ones
        self._num_lives = 0
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._sizes = {"weight_bytes": 0, "gradient_bytes": 0, "state_bytes": 0}
        self._every_s = min(max(expected_s / _NUM_SAMPLES, _MIN_SAMPLE_S), _MAX_SAMPLE_S)
        self._is_over = False
        self._looked_s = -math.inf
        threading.Thread(target=_sample, args=(weakref.ref(self),), name="lightning_ssd-record", daemon=True).start()

    # -- told while the step runs --------------------------------------------------------------------------------

    def mark(self, name: PhaseName) -> None:
        """A phase begins, and the one before it is over. Nothing changes where it goes on."""
        if self._marks[-1][1] != name:
            self._marks.append((self._now(), name))

    def forward_begins(self, *, alone: bool) -> None:
        """The hooks are on. No backward is under way where this pass is alone."""
        self.mark("forward")
        if alone:
            self._look_at_gradients()

    def forward_left(self) -> None:
        """The hooks are off. Backward follows, unless it has been and gone inside of them."""
        self.backward_wants()

    def backward_wants(self) -> None:
        """Backward asks for a storage: forward is over."""
        if self._marks[-1][1] == "forward":
            self.mark("backward")
        self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        """They come into being one by one; autograd's own thread is here, so that none does just now."""
        now_s = self._now()
        if self._gradient_bytes is None or now_s - self._looked_s < self._every_s:
            return
        nbytes = self._gradient_bytes()
        if nbytes is None:
            self._gradient_bytes = None
            return
        self._looked_s = now_s
        self._gradients.append(Level(now_s, nbytes))

    def sized(self, **sizes: int) -> None:
        """Note ``weight_bytes``, ``gradient_bytes`` or ``state_bytes``; the largest one counts."""
        for name, nbytes in sizes.items():
            self._sizes[name] = max(self._sizes[name], nbytes)
        if "gradient_bytes" in sizes:
            self._gradients.append(Level(self._now(), sizes["gradient_bytes"]))

    def happened(self, events: Iterable[Event]) -> None:
        """Transfers and stalls, of which those that end within the step are taken."""
        self._events.extend(events)

    def saved(self, key: int, nbytes: int) -> None:
        """Autograd has saved a storage. Its memory is counted by :meth:`entered`."""
        if self._marks[-1][1] in ("data", "update"):  # another network's forward, in one training step
            self.mark("forward")
        self._open[key] = _Open(nbytes, self._now(), self._running_module())
        self._saved_bytes += nbytes

    def _running_module(self) -> str:
        """Return name and class of the innermost module that this thread runs.

        The frames of ``Module.__call__`` tell, so that no module gets a hook, which a compiler would see.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not _MODULE_CALL:
            frame = frame.f_back
        module = None if frame is None else frame.f_locals["self"]
        return f"{self._names[id(module)]} {type(module).__name__}".strip() if id(module) in self._names else ""

    def entered(self, key: int, nbytes: int) -> None:
        """Memory was taken for it."""
        now_s = self._now()
        life = self._open.get(key)
        if life is not None and life.left_s is not None:
            life.away = [*(life.away or ()), (life.left_s, now_s)]
            life.left_s = None
        self._count(now_s, nbytes)

    def left(self, key: int, nbytes: int) -> None:
        """Its memory has gone."""
        now_s = self._now()
        life = self._open.get(key)
        if life is not None:
            life.left_s = now_s
        self._count(now_s, -nbytes)

    def freed(self, key: int, nbytes: int, tier: str | None) -> None:
        """The graph has let go of it.

        Args:
            key: as given to :meth:`saved`.
            nbytes: its size.
            tier: where it was to go; ``None``: it was kept.
        """
        now_s = self._now()
        self._saved_bytes -= nbytes
        self._count(now_s, 0)
        life = self._open.pop(key, None)
        if life is not None:
            self._keep(_ended(life, now_s, tier))

    # -- the sum -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """No more readings."""
        self._is_over = True

    def finish(self) -> StepRecord:
        """The step is over."""
        length_s = self._now()
        self.stop()
        for life in self._open.values():
            self._keep(_ended(life, length_s, None))
        levels = list(self._levels)  # a last reading may be under way
        times = ((one, max(one.start_s - self._begin_s, 0.0), one.end_s - self._begin_s) for one in self._events)
        events = [(one, start, end) for one, start, end in times if 0 < end <= length_s]
        marks = [*self._marks, (length_s, "data")]
        phases = [Phase(name, begin, end) for (begin, name), (end, _) in pairwise(marks)]
        return StepRecord(
            step=self._step,
            length_s=length_s,
            phases=tuple(phase for phase in phases if phase.end_s > phase.start_s),
            activations=tuple(_thinned(self._activations, lambda point: point.resident_bytes)),
            levels=tuple(_thinned(levels, lambda point: point.nbytes)),
            gradients=() if self._gradient_bytes is None else tuple(self._gradients),
            moves=tuple(
                Move(one.direction, _lane(one), one.nbytes, start, end)
                for one, start, end in events
                if isinstance(one, TransferEvent) and not one.failed
            ),
            waits=tuple(Wait(start, end) for one, start, end in events if isinstance(one, StallEvent)),
            lives=tuple(sorted((life for _, _, life in self._lives), key=lambda life: life.saved_s)),
            **self._sizes,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._begin_s

    def _count(self, now_s: float, change: int) -> None:
        self._resident_bytes += change
        self._activations.append(Bytes(now_s, self._resident_bytes, self._saved_bytes))
        if len(self._activations) >= 2 * _MAX_ROWS:
            self._activations = _thinned(self._activations, lambda point: point.resident_bytes)

    def _keep(self, life: Life) -> None:
        self._num_lives += 1
        heapq.heappush(self._lives, (life.nbytes, -self._num_lives, life))
        if len(self._lives) > _NUM_LIVES:
            heapq.heappop(self._lives)

    def read_level(self) -> float | None:
        """Note the memory in use; for the thread. Return seconds until the next reading; ``None``: there is none."""
        if self._is_over:
            return None
        try:
            self._levels.append(Level(self._now(), self._level()))
        except OSError:  # out of file descriptors, say: one reading less
            return self._every_s
        if len(self._levels) >= _MAX_ROWS:  # much longer than expected, or no caller ends it: rarer and rarer
            self._levels = _thinned(self._levels, lambda level: level.nbytes, _MAX_ROWS // 2)
            self._every_s *= 2
        return self._every_s


def _lane(event: TransferEvent) -> str:
    return event.tier if event.drive is None else f"{event.tier} {event.drive}"


def _sample(recorder: weakref.ref[StepRecorder]) -> None:
    while (recording := recorder()) is not None:
        every_s = recording.read_level()
        del recording
        if every_s is None:
            return
        time.sleep(every_s)


def _ended(life: _Open, now_s: float, tier: str | None) -> Life:
    away = [*(life.away or ()), *([] if life.left_s is None else [(life.left_s, now_s)])]
    fate: Fate = "kept"
    if tier is not None:
        fate = "taken back" if not away else "host" if tier == "host" else "ssd"
    return Life(life.nbytes, life.saved_s, now_s, tuple(away), fate, life.module)


def _thinned(points: Sequence[Any], size: Callable[[Any], int], most: int = _MAX_ROWS) -> list[Any]:
    """At most so many of them; of each run of neighbours the largest one stays, so that no peak is lost."""
    width = -(-len(points) // most) or 1
    return [max(points[i : i + width], key=size) for i in range(0, len(points), width)]
