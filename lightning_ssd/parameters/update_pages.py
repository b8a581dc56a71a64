"""Pages of weights and gradients around an update: brought in ahead of it, sent out behind it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch

from lightning_ssd.common.dtensor import local_of
from lightning_ssd.common.tensors import Piece
from lightning_ssd.common.uninterrupted import Task
from lightning_ssd.memory.file_mapping import READ_BYTES, FileView
from lightning_ssd.parameters.weight_files import FiledStorage, filed_storage, unreadable

__all__ = ["UpdatePages"]


class _Run(NamedTuple):
    """Bytes of one storage that an update uses."""

    memory: FiledStorage
    start: int
    nbytes: int
    changes: bool

    def bring_in(self) -> None:
        """Read and map them, to be written to where they will be."""
        with self._told():
            self.memory.bring_in_part(self.start, self.nbytes, changes=self.changes)

    def read(self, scratch: FileView) -> None:
        """Ahead of that. What changes comes to the page cache alone: mapped to be written to, it might be written to
        the drive before it has changed; mapped to be read, it would have to be mapped again.
        """
        with self._told():
            if self.changes:
                self.memory.read_part(self.start, self.nbytes, scratch)
            else:
                self.memory.bring_in_part(self.start, self.nbytes, changes=False)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What a drive's refusal means to the user.

        Raises:
            StorageError: it refuses.
        """
        try:
            yield
        except OSError as refusal:
            raise unreadable(["or gradient that is updated"], self.memory.nbytes, refusal) from refusal


class UpdatePages:
    """On a CPU, where weights and gradients are parts of files.

    Two threads bring in what is updated next, one the weights and one the gradients, so that the drive works while the
    optimizer computes, and no page is a fault of its own. What is not brought in, because nobody has told of it, comes
    when it is touched.
    """

    def __init__(self) -> None:
        self._coming: tuple[list[tuple[int, int, int]], list[Task[None]]] | None = None
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
        runs, coming = list(_runs_of(now)), self._coming
        if coming is not None and coming[0] == _names_of(now):
            for task in coming[1]:
                task.wait()  # what it could not read is read now, and the drive's refusal told then
        self._request(following)
        for run in runs:
            run.bring_in()
        yield
        for run in runs:
            run.memory.send_out_part(run.start, run.nbytes)

    def _request(self, pieces: Sequence[Piece]) -> None:
        runs = list(_runs_of(pieces))
        parts = [[run for run in runs if run.changes is changes] for changes in (True, False)]
        tasks = [Task(partial(_read, part), "lightning_ssd-update") for part in parts if part]
        self._coming = (_names_of(pieces), tasks) if tasks else None
        with suppress(RuntimeError):  # there can be no more threads: they come when it is their turn
            for task in tasks:
                task.start()

    def close(self) -> None:
        """Nothing is read any more. Idempotent."""
        coming, self._coming = self._coming, None
        if coming is not None and os.getpid() == self._pid:
            for task in coming[1]:
                task.wait()


def _names_of(pieces: Iterable[Piece]) -> list[tuple[int, int, int]]:
    return [(id(piece.tensor), piece.start, piece.stop) for piece in pieces]


def _runs_of(pieces: Iterable[Piece]) -> Iterator[_Run]:
    for piece in pieces:
        yield from _runs_in(piece.tensor, piece, changes=True)
        if piece.tensor.grad is not None:
            yield from _runs_in(piece.tensor.grad, piece, changes=False)


def _runs_in(tensor: torch.Tensor, piece: Piece, *, changes: bool) -> Iterator[_Run]:
    local = local_of(tensor)
    memory = filed_storage(local)
    if memory is not None and not local.is_contiguous():
        yield _Run(memory, 0, memory.nbytes, changes)
    elif memory is not None:
        first = int(local.storage_offset()) + piece.start
        yield _Run(memory, first * local.itemsize, (piece.stop - piece.start) * local.itemsize, changes)


def _read(runs: Sequence[_Run]) -> None:
    with suppress(MemoryError):  # the system can map no more: they come when it is their turn
        scratch = FileView(READ_BYTES)
        for run in runs:
            run.read(scratch)
