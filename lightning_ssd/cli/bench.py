"""``lightning-ssd bench``: how fast directories are written and read, alone and together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from lightning_ssd.cli.output import CommandError, columns_table, console, reported_errors
from lightning_ssd.common.accelerators import accelerator_of
from lightning_ssd.common.formatting import escape_control, format_sizes
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.validation import parse_size
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, open_staging
from lightning_ssd.storage.drive_probe import PROBE_BYTES, Rates, read_back_s
from lightning_ssd.storage.factory import BackendChoice, open_backend
from lightning_ssd.storage.filesystem import check_directory
from lightning_ssd.tiers.bandwidth_meter import measure_rates
from lightning_ssd.tiers.copy_paths import StagedMover
from lightning_ssd.tiers.streams import StreamCopies

__all__ = ["bench"]

_ROOM = 1.3
"""Room that is wanted per byte that is written: spill files grow in steps of a quarter."""


def bench(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="One directory per drive.", show_default=False)
    ],
    size: Annotated[
        str, typer.Option(help="Bytes per directory and pass. Small ones measure the drive's own cache.")
    ] = "1GiB",
    backend: Annotated[BackendChoice, typer.Option(help="How bytes reach a file.")] = "auto",
    allow_unsuitable: Annotated[
        bool, typer.Option("--allow-unsuitable", help="Accept tmpfs and network file systems.")
    ] = False,
) -> None:
    """Measure how fast directories are written and read, each alone and all together.

    Past the page cache, with the chunks and threads of training, in files without names that are gone at the end. Each
    directory needs room for 1.3 times SIZE and is written twice. Several are also written twice together, where faster
    ones get more. How much that is in all is said before. The last line has the rates to paste.
    """
    with reported_errors():
        paths, nbytes = _checked(directories, size, allow_unsuitable=allow_unsuitable)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tries = {"posix": 0, "auto": 2 * PROBE_BYTES if device.type == "cuda" else 0}  # by cuFile and by posix
        written = (2 if len(paths) == 1 else 4) * nbytes + tries.get(backend, PROBE_BYTES)
        (total,) = format_sizes(written * len(paths))
        where = "the directory" if len(paths) == 1 else f"{len(paths)} directories, more to faster ones"
        console().print(f"Writes {total} to {where}; nothing stays there.\n")
        chosen, why = open_backend(backend, directories=paths, device=device, allow_unsuitable_paths=allow_unsuitable)
        try:
            with ExitStack() as stack, StatusLine(f"Measuring {', '.join(map(str, paths))}", delay_s=0):
                mover, accelerator = None, accelerator_of(device)
                if accelerator is not None and chosen.register is not None:
                    staging = stack.enter_context(
                        closing(open_staging(chosen, device, count=2 * DEFAULT_WORKERS * len(paths)))
                    )
                    mover = StagedMover(chosen, staging, StreamCopies(accelerator))
                else:
                    device = torch.device("cpu")
                measure = partial(measure_rates, chosen, mover=mover, nbytes=nbytes, device=device)
                alone = [measure([path]) for path in paths]
                together = alone[0] if len(paths) == 1 else measure(paths)
                for path in paths:
                    if read_back_s(chosen, path, device, nbytes=DEFAULT_CHUNK_BYTES) is None:
                        raise CommandError(
                            f"the bytes that were written to {escape_control(path)}",
                            "others",
                            "do not use this drive; look at its SMART report and at the kernel's log",
                        )
        finally:
            chosen.close()
        _show(paths, alone, together, why)


def _checked(directories: Sequence[Path], size: str, *, allow_unsuitable: bool) -> tuple[list[Path], int]:
    """Return absolute paths and whole chunks; nothing has been written yet."""
    nbytes = parse_size(size, name="--size") // DEFAULT_CHUNK_BYTES * DEFAULT_CHUNK_BYTES
    if not nbytes:
        raise CommandError("--size of at least 16MiB, one chunk", size, "measure with 1GiB or more")
    paths = [path.expanduser().absolute() for path in directories]
    for path in paths:
        if not path.is_dir():
            got = f"{escape_control(path)} is none"
            raise CommandError("an existing directory on the drive to measure", got, "make it first, or name another")
        facts = check_directory(path, allow_unsuitable=allow_unsuitable)
        if facts.free_bytes < _ROOM * nbytes:
            need, room = format_sizes(_ROOM * nbytes, facts.free_bytes)
            got = f"{room} free in {escape_control(path)}"
            raise CommandError(f"room of {need}", got, "take a smaller --size, or make room")
    if len({(os.stat(path).st_dev, os.stat(path).st_ino) for path in paths}) < len(paths):
        raise CommandError("one directory per drive", "a directory that is named twice", "leave one of them out")
    return paths, nbytes


def _show(paths: Sequence[Path], alone: Sequence[Rates], together: Rates, why: str) -> None:
    shown = [*alone, together] if len(paths) > 1 else alone
    columns = {
        "directory": [*map(escape_control, paths), "all together"][: len(shown)],
        "write": [f"{rates.write_per_s / 1e9:.2f} GB/s" for rates in shown],
        "read": [f"{rates.read_per_s / 1e9:.2f} GB/s" for rates in shown],
    }
    out = console()
    out.print(columns_table(columns))
    out.print(f"\nThrough {why}. A chunk of random bytes came back from each as it was written.")
    if len(paths) > 1:
        added = sum(rates.read_per_s for rates in alone)
        shared = " (they share file systems)" if len({os.stat(path).st_dev for path in paths}) < len(paths) else ""
        out.print(f"Together they read at {together.read_per_s / added:.0%} of the sum{shared}.")
    write, read = (f'"{rate / len(paths) / 1e9:.3g}GB"' for rate in (together.write_per_s, together.read_per_s))
    out.print(
        f"HardwareProfile(paths={list(map(str, paths))}, write_rate={write}, read_rate={read})",
        markup=False,
        soft_wrap=True,
    )
