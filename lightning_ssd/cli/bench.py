"""``lightning-ssd bench``: how fast directories are, alone and together, and whether every byte comes back."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from lightning_ssd.cli.output import CommandError, console, reported_errors
from lightning_ssd.cli.write_hardware import hardware_yaml
from lightning_ssd.common.formatting import escape_control, format_sizes
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.tensors import Region
from lightning_ssd.common.validation import parse_size
from lightning_ssd.config import HardwareProfile
from lightning_ssd.memory.mmap import PAGE_BYTES
from lightning_ssd.planning.machine_profile import MachineProfile
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.filesystem import inspect_directory

__all__ = ["Measured", "bench", "measure"]

_ROOM = 1.3
"""Room that is wanted per byte that is written: spill files grow in steps of a quarter."""
_WORD = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Rates and checks of one run."""

    directories: tuple[Path, ...]
    alone: tuple[Rates, ...]
    """One per directory."""
    together: Rates
    """All directories at once, added up; of a single one, its own."""
    nbytes: int
    """Per directory and pass."""
    backend: str


def bench(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="One directory per drive.", show_default=False)
    ],
    size: Annotated[
        str, typer.Option(help="Bytes per directory and pass. Small ones measure the drive's own cache.")
    ] = "1GiB",
    backend: Annotated[Literal["auto", "kvikio", "posix"], typer.Option(help="How bytes reach a file.")] = "auto",
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a hardware profile there; a file that is there stays.")
    ] = None,
    allow_unsuitable: Annotated[
        bool, typer.Option("--allow-unsuitable", help="Accept tmpfs and network file systems.")
    ] = False,
) -> None:
    """Measure how fast directories are written and read, each alone and all together.

    Past the page cache, with the chunks and threads of training, in files without names that are gone at the end. Every
    byte is compared after it was read back. Each directory needs room for 1.3 times SIZE and is written twice, with
    several of them three times, which is said before.
    """
    with reported_errors():
        paths, nbytes = _checked(directories, size, write, allow_unsuitable=allow_unsuitable)
        _announce(paths, nbytes)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        chosen, why = open_backend(backend, directories=paths, device=device, allow_unsuitable_paths=allow_unsuitable)
        try:
            device = device if chosen.moves_device_memory else torch.device("cpu")
            with StatusLine(f"Measuring {', '.join(map(str, paths))}", delay_s=0):
                found = measure(chosen, paths, nbytes, device=device)
        finally:
            chosen.close()
        _show(found, why)
        if write is not None:
            hardware = HardwareProfile(
                paths=paths,
                backend=backend,
                allow_unsuitable_paths=allow_unsuitable,
                write_rate=round(found.together.write_per_s / len(paths)),
                read_rate=round(found.together.read_per_s / len(paths)),
            )
            _write_profile(write, hardware, found)


def measure(backend: Backend, directories: Sequence[Path], nbytes: int, *, device: torch.device) -> Measured:
    """Write, read and compare.

    Args:
        backend: an open one.
        directories: existing ones, one per drive.
        nbytes: per directory and pass, a multiple of the chunk size.
        device: whose memory moves.

    Raises:
        CommandError: bytes came back other than they were written.
        StorageError: a directory failed.
    """
    with ExitStack() as stack:
        trials = [stack.enter_context(_trial(backend, path, nbytes, device)) for path in directories]
        for trial in trials:
            trial.run("write")
        alone = [Rates(trial.run("write"), trial.run("read")) for trial in trials]
        together = alone[0] if len(trials) == 1 else _all_at_once(trials)
        for trial in trials:
            trial.run("check")
    return Measured(
        directories=tuple(directories), alone=tuple(alone), together=together, nbytes=nbytes, backend=backend.name
    )


def _num_writes(num_directories: int) -> int:
    """Each directory is written once to prepare it (a first write allocates), once alone, and once with all others."""
    return 2 if num_directories == 1 else 3


def _all_at_once(trials: Sequence[_Trial]) -> Rates:
    def rate(verb: str) -> float:
        begin_s = time.perf_counter()
        list(pool.map(lambda trial: trial.run(verb), trials))
        return sum(trial.nbytes for trial in trials) / (time.perf_counter() - begin_s)

    with ThreadPoolExecutor(len(trials)) as pool:
        return Rates(rate("write"), rate("read"))


class _Trial:
    """One spill file and the buffers of its workers.

    Each pass writes bytes of its own: a random chunk, in which the first word of each page says which pass and which
    page it is. So no page can be taken for another, nor for what an earlier pass has left.
    """

    def __init__(self, backend: Backend, directory: Path, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._backend = backend
        self._directory = directory
        self._device = device
        self._num_passes = 0
        generator = torch.Generator().manual_seed(0)
        words = torch.randint(-(1 << 63), (1 << 63) - 1, (DEFAULT_CHUNK_BYTES // _WORD,), generator=generator)
        self._pattern = words.to(device)
        self._arena = backend.open_arena(directory)
        self._offset = self._arena.allocate(nbytes).offset

    def close(self) -> None:
        self._arena.close()

    def run(self, verb: str) -> float:
        """One pass over all chunks with all workers; bytes per second."""
        if verb == "write":
            self._num_passes += 1
        work = {"write": self._write, "read": self._read, "check": self._check}[verb]
        with ThreadPoolExecutor(DEFAULT_WORKERS) as pool:
            buffers = [self._buffer() for _ in range(DEFAULT_WORKERS)]
            begin_s = time.perf_counter()
            list(pool.map(lambda worker: self._work(worker, buffers[worker], work), range(DEFAULT_WORKERS)))
            return self.nbytes / (time.perf_counter() - begin_s)

    def _work(self, worker: int, buffer: torch.Tensor, one: Callable[[int, torch.Tensor], None]) -> None:
        for chunk in range(worker, self.nbytes // DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS):
            one(chunk, buffer)

    def _write(self, chunk: int, buffer: torch.Tensor) -> None:
        self._stamp(chunk, buffer)
        self._backend.write(self._arena, self._region(buffer), self._at(chunk))

    def _read(self, chunk: int, buffer: torch.Tensor) -> None:
        self._backend.read(self._arena, self._region(buffer), self._at(chunk))

    def _check(self, chunk: int, buffer: torch.Tensor) -> None:
        self._read(chunk, buffer)
        expected = self._pattern.clone()
        self._stamp(chunk, expected)
        if not torch.equal(buffer, expected):
            raise CommandError(
                f"the bytes that were written to {escape_control(self._directory)}",
                f"others, in the {DEFAULT_CHUNK_BYTES:,} bytes from {chunk * DEFAULT_CHUNK_BYTES:,} on",
                "do not use this drive; look at its SMART report and at the kernel's log",
            )

    def _stamp(self, chunk: int, buffer: torch.Tensor) -> None:
        pages = DEFAULT_CHUNK_BYTES // PAGE_BYTES
        first = (self._num_passes << 48) + chunk * pages
        buffer[:: PAGE_BYTES // _WORD] = torch.arange(first, first + pages, device=self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # backends reach device memory outside of any stream

    def _buffer(self) -> torch.Tensor:
        """Page-aligned, with the pattern in it."""
        memory = torch.empty((DEFAULT_CHUNK_BYTES + PAGE_BYTES) // _WORD, dtype=torch.int64, device=self._device)
        start = -memory.data_ptr() % PAGE_BYTES // _WORD
        return memory[start : start + DEFAULT_CHUNK_BYTES // _WORD].copy_(self._pattern)

    def _region(self, buffer: torch.Tensor) -> Region:
        return Region(buffer.data_ptr(), DEFAULT_CHUNK_BYTES)

    def _at(self, chunk: int) -> int:
        return self._offset + chunk * DEFAULT_CHUNK_BYTES


@contextmanager
def _trial(backend: Backend, directory: Path, nbytes: int, device: torch.device) -> Iterator[_Trial]:
    trial = _Trial(backend, directory, nbytes, device)
    try:
        yield trial
    finally:
        trial.close()


# -- before and after --------------------------------------------------------------------------------------------------


def _checked(
    directories: Sequence[Path], size: str, write: Path | None, *, allow_unsuitable: bool
) -> tuple[list[Path], int]:
    """Absolute paths and whole chunks; nothing has been written yet."""
    nbytes = parse_size(size, name="--size") // DEFAULT_CHUNK_BYTES * DEFAULT_CHUNK_BYTES
    if not nbytes:
        raise CommandError("--size of at least 16MiB, one chunk", size, "measure with 1GiB or more")
    if write is not None and write.exists():
        raise CommandError(
            "a new file for --write", f"{escape_control(write)} exists", "remove it or take another name"
        )
    if write is not None and not write.absolute().parent.is_dir():
        raise CommandError("--write in a directory", f"{escape_control(write.parent)} is none", "make it first")
    paths = [path.expanduser().absolute() for path in directories]
    for path in paths:
        if not path.is_dir():
            got = f"{escape_control(path)} is none"
            raise CommandError("an existing directory on the drive to measure", got, "make it first, or name another")
        facts = inspect_directory(path)
        if facts.unsuitable is not None and not allow_unsuitable:
            got = f"{escape_control(path)} on {facts.file_system}, {facts.unsuitable}"
            raise CommandError("a directory on a local drive", got, "name another, or add --allow-unsuitable")
        if facts.free_bytes < _ROOM * nbytes:
            need, room = format_sizes(_ROOM * nbytes, facts.free_bytes)
            got = f"{room} free in {escape_control(path)}"
            raise CommandError(f"room of {need}", got, "take a smaller --size, or make room")
    if len({(os.stat(path).st_dev, os.stat(path).st_ino) for path in paths}) < len(paths):
        raise CommandError("one directory per drive", "a directory that is named twice", "leave one of them out")
    return paths, nbytes


def _announce(paths: Sequence[Path], nbytes: int) -> None:
    written = _num_writes(len(paths)) * nbytes
    each, total = format_sizes(written, written * len(paths))
    where = "the directory" if len(paths) == 1 else f"each of {len(paths)} directories, {total} in all"
    console().print(f"Writes {each} to {where}; nothing stays there.\n")


def _show(found: Measured, why: str) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("directory", overflow="fold")
    table.add_column("write", justify="right", no_wrap=True)
    table.add_column("read", justify="right", no_wrap=True)
    for path, rates in zip(found.directories, found.alone, strict=True):
        table.add_row(escape_control(path), _rate(rates.write_per_s), _rate(rates.read_per_s))
    if len(found.directories) > 1:
        table.add_row("all together", _rate(found.together.write_per_s), _rate(found.together.read_per_s))
    out = console()
    out.print(table)
    out.print(f"\nEvery byte came back as it was written. Through {why}.")
    if len(found.directories) > 1:
        added = sum(rates.read_per_s for rates in found.alone)
        shared = " (they share file systems)" if _num_file_systems(found.directories) < len(found.directories) else ""
        out.print(f"Together they read at {found.together.read_per_s / added:.0%} of the sum{shared}.")


def _num_file_systems(directories: Sequence[Path]) -> int:
    """How many drives there are at most."""
    return len({os.stat(path).st_dev for path in directories})


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def _write_profile(file: Path, hardware: HardwareProfile, found: Measured) -> None:
    num_drives = _num_file_systems(found.directories)
    machine = MachineProfile(
        num_devices=max(torch.cuda.device_count(), 1),
        host_memory_gb=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        num_drives=num_drives,
        drive_write_gb_per_s=round(found.together.write_per_s / 1e9 / num_drives, 3),
        drive_read_gb_per_s=round(found.together.read_per_s / 1e9 / num_drives, 3),
    )
    comment = [
        f"Measured by `lightning-ssd bench` on {datetime.date.today()}: {found.backend}, "
        f"{format_sizes(found.nbytes)[0]} per pass, all directories at once.",
    ]
    file.write_text(hardware_yaml(file.stem, hardware, machine, comment=comment), encoding="utf-8")
    console().print(
        f"\nWrote {escape_control(file)}. In conf/hardware it is chosen by hardware={file.stem}; complete "
        "hardware.drive_endurance from the drives' data sheet and, for `lightning-ssd plan`, "
        "machine.device_peak_tflops."
    )
