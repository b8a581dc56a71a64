"""Pages of weights and gradients around an update: brought in ahead of it, sent out behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.tensors import Piece
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files.cache_reader import CacheReader
from lightning_ssd.parameters.files.mapped_storage import MappedStorage, mapped_storage_of, unreadable
from lightning_ssd.parameters.files.weight_files import WeightFiles

__all__ = ["UpdatePages"]


class _Run(NamedTuple):
    """Bytes of one storage that an update uses."""

    memory: MappedStorage
    start: int
    nbytes: int
    changes: bool

    def read(self, scratch: FileView, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Into the page cache alone: mapped to be written to, they might be written to the drive before they have
        changed.
        """
        self.memory.read_part(self.start, self.nbytes, scratch, is_wanted)

    def map(self) -> None:
        """To be written to where they will be. Raises as :meth:`read`."""
        self.memory.bring_in_part(self.start, self.nbytes, changes=self.changes)


class UpdatePages:
    """On a CPU, where weights and gradients are parts of files.

    Two threads read what is updated next, one the weights and one the gradients, so that the drive works while the
    optimizer computes, and no page is a fault of its own. What they have not read comes when it is its turn.

    Where memory has no room for what waits, the system begins to write what was updated at once. Otherwise it would
    look for room a little later, and then write all that has changed: also what is being updated, which changes again
    and would be written twice.

    Args:
        files: where weights and gradients wait.
        room: memory that may be filled by what waits.
    """

    def __init__(self, files: WeightFiles, room: HostRoom) -> None:
        self._files, self._room = files, room
        self._weights, self._gradients = CacheReader(), CacheReader()
        self._scratch = FileView(READ_BYTES)
        self._pid = os.getpid()

    @contextmanager
    def updating(self, now: Sequence[Piece], following: Sequence[Piece]) -> Iterator[None]:
        """While an optimizer updates these pieces, and then those that follow.

        Raises:
            StorageError: the drive refuses to read them. To touch them would end the process.
        """
        if os.getpid() != self._pid:  # a fork, which has memory of its own
            yield
            return
        runs = list(_runs_of(now))
        self._bring_in(runs)
        next_runs = list(_runs_of(following))  # no sooner: it puts an end to the reading of these
        self._weights.ask([run.read for run in next_runs if run.changes])
        self._gradients.ask([run.read for run in next_runs if not run.changes])
        yield
        is_short = not self._room.is_enough(lambda: self._files.used_bytes)
        for run in runs:
            run.memory.send_out_part(run.start, run.nbytes)
            if is_short and run.changes:
                run.memory.begin_writing_part(run.start, run.nbytes)

    def _bring_in(self, runs: Sequence[_Run]) -> None:
        """All are read before one is mapped."""
        for bring_in in (partial(_Run.read, scratch=self._scratch), _Run.map):
            for run in runs:
                try:
                    bring_in(run)
                except OSError as refusal:
                    raise unreadable(["or gradient that is updated"], run.memory.nbytes, refusal) from refusal

    def close(self) -> None:
        self._weights.close()
        self._gradients.close()


def _runs_of(pieces: Iterable[Piece]) -> Iterator[_Run]:
    for piece in pieces:
        yield from _runs_in(piece.tensor, piece, changes=True)
        if piece.tensor.grad is not None:
            yield from _runs_in(piece.tensor.grad, piece, changes=False)


def _runs_in(tensor: torch.Tensor, piece: Piece, *, changes: bool) -> Iterator[_Run]:
    local = local_of(tensor)
    memory = mapped_storage_of(local)
    if memory is not None and not local.is_contiguous():
        yield _Run(memory, 0, memory.nbytes, changes)
    elif memory is not None:
        first = int(local.storage_offset()) + piece.start
        yield _Run(memory, first * local.itemsize, (piece.stop - piece.start) * local.itemsize, changes)
