"""What a drive does in this minute: writing, reading, and both at once, past the page cache."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ssd.storage.factory import open_backend
from recipes.benchmarks.io import GIB, PlainContender

__all__ = ["DriveMeter", "DriveRates"]


@dataclass(frozen=True, kw_only=True)
class DriveRates:
    """What a drive does, in bytes per second."""

    write_per_s: float
    """While it reads as well."""
    read_per_s: float
    """While it writes as well."""
    write_alone_per_s: float
    read_alone_per_s: float

    def limit_s(self, written: float, read: float) -> float:
        """No sooner can so many bytes be moved with both directions in flight."""
        return max(written / self.write_per_s, read / self.read_per_s)

    def turned_limit_s(self, written: float, read: float) -> float:
        """The same for one direction after the other."""
        return written / self.write_alone_per_s + read / self.read_alone_per_s


class DriveMeter:
    """Two files on a drive, one to be written and one to be read, past the page cache.

    Args:
        directory: on the drive.
        nbytes: of each file.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        with ExitStack() as stack:
            backend, _ = open_backend(
                "posix", directories=[directory], device=torch.device("cpu"), allow_unsuitable_paths=True
            )
            stack.callback(backend.close)
            self.name = backend.name
            self._files: dict[str, PlainContender] = {}
            for direction in ("write", "read"):
                self._files[direction] = PlainContender(backend, directory, nbytes)
                stack.callback(self._files[direction].close)
                self._files[direction].run("write")  # what was never written is not read from the drive
            self._resources = stack.pop_all()

    def measure(self) -> DriveRates:
        """All four rates."""
        alone = {direction: file.run(direction).gib_per_s * GIB for direction, file in self._files.items()}
        shared = self._both()
        return DriveRates(
            write_per_s=shared["write"],
            read_per_s=shared["read"],
            write_alone_per_s=alone["write"],
            read_alone_per_s=alone["read"],
        )

    def close(self) -> None:
        """Give the space back."""
        self._resources.close()

    def _both(self) -> dict[str, float]:
        """Each direction goes on until both have moved their file once, so that none has the drive for itself."""
        moved = {direction: threading.Event() for direction in self._files}
        rates: dict[str, float] = {}

        def work(direction: str) -> None:
            seconds = 0.0
            passes = 0
            while not passes or not all(event.is_set() for event in moved.values()):
                sample = self._files[direction].run(direction)
                seconds += 1 / sample.gib_per_s
                passes += 1
                moved[direction].set()
            rates[direction] = passes / seconds * GIB

        threads = [threading.Thread(target=work, args=(direction,)) for direction in self._files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(rates) < len(self._files):
            raise OSError("the drive could not be measured; see the message above")
        return rates
