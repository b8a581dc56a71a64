"""Pages of weights and gradients around an update: brought in ahead of it, sent out behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.forks import OwnProcess
from lightning_ssd.common.tensors import Piece
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.parameters.files.cache_reader import CacheReader
from lightning_ssd.parameters.files.mapped_storage import ByteRange, MappedStorage, mapped_storage_of, reading
from lightning_ssd.parameters.files.weight_files import WeightFiles

__all__ = ["UpdatePages"]

_UPDATED = "a weight or gradient that is updated"


class _Run(NamedTuple):
    """Bytes of one storage that an update uses."""

    memory: MappedStorage
    part: ByteRange
    changes: bool


class UpdatePages:
    """On a CPU, where weights and gradients are parts of files.

    Threads read what is updated next, for each drive one the weights and one the gradients, so that the drives work
    while the optimizer computes, and no page is a fault of its own. What they have not read comes when it is its turn.

    Where memory has no room for what waits, the system begins to write what was updated at once. Otherwise it would
    look for room a little later, and then write all that has changed: also what is being updated, which changes again
    and would be written twice.

    Args:
        files: where weights and gradients wait.
        room: memory that may be filled by what waits.
    """

    def __init__(self, files: WeightFiles, room: HostRoom) -> None:
        self._files, self._room = files, room
        self._weights, self._gradients = (CacheReader(files.num_drives) for _ in range(2))
        self._scratch = FileView(READ_BYTES)
        self._process = OwnProcess()

    @contextmanager
    def updating(self, now: Sequence[Piece], following: Sequence[Piece]) -> Iterator[None]:
        """While an optimizer updates these pieces, and then those that follow.

        Raises:
            StorageError: the drive refuses to read them. To touch them would end the process.
        """
        if not self._process.is_here:  # a fork, which has memory of its own
            yield
            return
        runs = list(_runs_of(now))
        # All are read before one is mapped to be written to: it might be written to the drive before it has changed.
        for run in runs:
            with reading(_UPDATED, run.memory.nbytes):
                run.memory.read(None, self._scratch, part=run.part)
        for run in runs:
            with reading(_UPDATED, run.memory.nbytes):
                run.memory.bring_in(run.part, changes=run.changes)
        next_runs = list(_runs_of(following))  # no sooner: it puts an end to the reading of these
        for reader, changes in ((self._weights, True), (self._gradients, False)):
            reader.ask([partial(run.memory.read, part=run.part) for run in next_runs if run.changes is changes])
        yield
        is_short = not self._room.is_enough(lambda: self._files.used_bytes)
        for run in runs:
            run.memory.send_out(run.part)
            if is_short and run.changes:
                run.memory.begin_writing(run.part)

    def close(self) -> None:
        self._weights.close()
        self._gradients.close()


def _runs_of(pieces: Iterable[Piece]) -> Iterator[_Run]:
    for piece in pieces:
        for tensor, changes in ((piece.tensor, True), (piece.tensor.grad, False)):
            local = None if tensor is None else local_of(tensor)
            memory = None if local is None else mapped_storage_of(local)
            if local is None or memory is None:
                continue
            part = 0, memory.nbytes
            if local.is_contiguous():
                first = int(local.storage_offset()) + piece.start
                part = first * local.itemsize, (piece.stop - piece.start) * local.itemsize
            yield _Run(memory, part, changes)
