"""The SSD tier: directories on drives, where the bytes of storages wait.

Each directory has workers of its own, and a worker that is free writes the next chunk to its directory. So each drive
gets as much as it can take, and a slow one slows no other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from lightning_ssd.errors import FULL_ERRNOS, OutOfSpaceError, forget_frames
from lightning_ssd.memory.file_mapping import FileView
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.spill_file import Arena, Extent, reserve_together
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import Part, StoredBytes
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import Mover
from lightning_ssd.tiers.read_priority import UrgentGate
from lightning_ssd.tiers.tier import Tier

__all__ = ["SsdTier"]

_log = logging.getLogger(__name__)


class SsdTier(Tier):
    """Directories on drives, one arena each, with workers that write and workers that read.

    Args:
        backend: how bytes reach a file.
        mover: how bytes leave and enter tensor memory.
        directories: one per drive. Where one is full, or refuses to be written to, others get its part.
        events: gets one event per move.
        sampler: which storages get checksums.
        chunk_bytes: largest request; a transfer is shared by the workers of its direction chunk by chunk.
        num_workers: workers per direction and directory.
        order: numbers of the directories: the first bytes go to the first one, and what another has no room for, to the
            first that has. Processes that share the directories save the same sizes at the same moments: with equal
            orders they would all begin at one drive.

    Note [writes give way]: reads and writes share the drives. While the training thread waits for a read, no worker
    begins a write or the next chunk of one (see ``tiers/read_priority.py`` for how long at most).
    """

    name = "ssd"

    def __init__(
        self,
        backend: Backend,
        mover: Mover,
        directories: Sequence[Path],
        *,
        events: EventLog,
        sampler: Sampler,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_workers: int = DEFAULT_WORKERS,
        order: Sequence[int] = (),
    ) -> None:
        self._order = order or range(len(directories))
        self._begins_at = deque(self._order[:1])  # once
        self._refusing: set[int] = set()  # directories that no write goes to any more
        self._arenas: list[Arena] = []
        with ExitStack() as undo:
            for directory in directories:
                self._arenas.append(backend.open_arena(directory))
                undo.callback(self._arenas[-1].close)
            super().__init__(
                mover,
                self._arenas,
                events=events,
                sampler=sampler,
                chunk_bytes=max(chunk_bytes // backend.block_bytes, 1) * backend.block_bytes,
                num_workers=num_workers,
                gate=UrgentGate(),
            )
            undo.pop_all()

    @property
    def disk_bytes(self) -> int:
        """Size of the spill files."""
        return sum(arena.size_bytes for arena in self._arenas)

    @property
    def used_bytes(self) -> int:
        """Bytes of the spill files that are lent."""
        return sum(arena.used_bytes for arena in self._arenas)

    def written_bytes(self) -> list[int]:
        """Return the bytes that were written in each directory."""
        return [arena.written_bytes for arena in self._arenas]

    @property
    def num_directories(self) -> int:
        """How many directories it has."""
        return len(self._arenas)

    def reserve(self, nbytes: int, what: str) -> None:
        """Let the spill files have at least ``nbytes`` bytes together: see :func:`reserve_together`."""
        reserve_together(self._arenas, nbytes, what)

    def show(self, stored: StoredBytes, view: FileView, start: int, offset: int, nbytes: int) -> None:
        """Map part of a body, from ``offset`` on, at ``start`` of a view. It stays as it is until :meth:`free`."""
        self._check_mine(stored)
        head = len(stored.edges.head)
        for part in stored.parts:
            begin, end = max(offset, part.start - head), min(offset + nbytes, part.start - head + part.nbytes)
            if begin < end:
                at = part.extent.offset + begin - (part.start - head)
                self._arenas[part.lane].show(view, start + begin - offset, at, end - begin)

    def allocate(self, start: int, nbytes: int, refused: Mapping[int, OSError]) -> Part:
        """Return room on the directory of the worker that asks; else on another one."""
        if nbytes == 0:  # a storage smaller than a block: its edges are all there is
            return Part(start, 0, 0, Extent(0, 0))
        error: OSError | None = None
        first = self._begins_at.pop() if self._begins_at else self._writes.lane
        for lane in sorted(self._order, key=lambda lane: (lane in self._refusing, lane != first)):
            if lane in refused:
                continue
            try:
                return Part(start, nbytes, lane, self._arenas[lane].allocate(nbytes))
            except OSError as refusal:
                forget_frames(refusal)  # they hold what is to be written
                self.gives_up(lane, refusal)
                error = refusal
        raise error or list(refused.values())[-1]

    def gives_up(self, lane: int, error: OSError) -> None:
        is_full = isinstance(error, OutOfSpaceError) or error.errno in FULL_ERRNOS  # it may have room again
        if lane not in self._refusing and not is_full:
            self._refusing.add(lane)
            _log.warning("%s is written to no more, after: %s", self._arenas[lane].directory, str(error))
