"""What every trial of ``recipes/faults/trials.py`` has: a directory, dice, and a line to the server that watches it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import BudgetError, OffloaderClosedError, StorageError
from lightning_ssd.storage.spill_file import Arena
from recipes.faults.models import Twins, WrongBitsError, random_task
from recipes.faults.server import SPILL

__all__ = ["Report", "World", "places"]

Report = dict[str, Any]
"""The fields of a :class:`~recipes.faults.server.Result` that a child knows."""

_EXPECTED = (StorageError, OffloaderClosedError, MemoryError)
_TRIES = 4
_GONE_WITHIN_S = 5.0


class World:
    """One trial's.

    Args:
        directory: empty, for this trial alone.
        dice: seeded.
        say: descriptor of the line to the server.
        hear: where it answers.
    """

    def __init__(self, directory: Path, dice: random.Random, say: int, hear: int) -> None:
        self.directory, self.dice = directory, dice
        self.spill = directory / SPILL
        self._say, self._hear = say, hear
        self.raised: list[str] = []
        self.steps = 0
        self.ends_regularly = False
        """The interpreter is to end as that of any program, whatever is still open then."""

    # -- the line to the server --------------------------------------------------------------------------------------

    def tell(self, **word: Any) -> None:
        """One word to the server."""
        os.write(self._say, json.dumps(word).encode() + b"\n")

    def begin(self) -> None:
        """Training begins: signals count from here."""
        self.tell(begun=True)

    def flip(self, where: list[tuple[int, int, int]]) -> None:
        """Have the server flip one bit in one of these places, from outside; returns when it has."""
        self.tell(flip=where)
        os.read(self._hear, 1)

    def remains(self) -> list[str]:
        """Threads and open files of ours that are still there when everything has been closed."""
        if self.ends_regularly:
            return []
        end_s = time.monotonic() + _GONE_WITHIN_S
        while (found := _remains(str(self.directory))) and time.monotonic() < end_s:
            gc.collect()
            time.sleep(0.01)
        return found

    def draw(self, limit: int) -> int:
        """A whole number from 0 on, below ``limit``."""
        return self.dice.randrange(limit)

    # -- training ----------------------------------------------------------------------------------------------------

    def policy(self, **fixed: Any) -> OffloadPolicy:
        """Some policy under which bytes move; ``fixed`` settings are not left to the dice."""
        activations = self.dice.choice(("offload", "offload", "offload", "auto"))
        chosen: dict[str, Any] = {
            "activations": activations,
            "min_tensor_bytes": self.dice.choice((0, 0, 4096)),
            "verify": self.dice.choice(("off", "full")),
            "optimizer_states": self.dice.choice(("keep", "offload")),
        }
        chosen |= fixed
        if chosen["activations"] == "auto":
            chosen |= {"max_slowdown": 50.0}
        return OffloadPolicy(**chosen)

    @contextmanager
    def offloader(self, policy: OffloadPolicy | None = None, **extra: Any) -> Iterator[Offloader]:
        """Open one in the spill directory, which goes with it."""
        self.spill.mkdir(exist_ok=True)
        hardware = HardwareProfile(paths=[self.spill], allow_unsuitable_paths=True)
        try:
            with Offloader(policy=policy or self.policy(), hardware=hardware, **extra) as offloader:
                yield offloader
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                self.spill.rmdir()  # an error here is a file that we have left

    def twins(self, offloader: Offloader, *, is_drained: bool = True, **task: Any) -> Twins:
        """A random training and its plain twin."""
        return Twins(random_task(self.dice, **task), offloader, is_drained=is_drained)

    def train(
        self,
        twins: Twins,
        steps: int = 4,
        *,
        tolerated: tuple[type[BaseException], ...] = _EXPECTED,
        mend: Callable[[], None] = lambda: None,
    ) -> None:
        """So many steps. After a tolerated error the step is made anew, as a user may; the last try is without faults.

        Args:
            twins: what is trained.
            steps: how many.
            tolerated: errors that are not to end the trial.
            mend: takes the fault away, before the last try.
        """
        for _ in range(steps):
            for number in range(_TRIES):
                try:
                    twins.step()
                    break
                except tolerated as error:
                    self.note(error)
                    if number + 2 >= _TRIES:
                        mend()
                    if number + 1 == _TRIES:
                        raise
                if twins.ours.offloader is not None:
                    twins.ours.offloader.abort()
                if twins.is_torn:
                    twins.resume()
            self.steps += 1

    def note(self, error: BaseException) -> None:
        """Remember what kind of error came."""
        self.raised.append(type(error).__name__)

    def report(self, work: Callable[[], int | None]) -> Report:
        """Do it, and say how it went; ``work`` may return the number of faults that were injected."""
        injected, outcome = 0, ""
        try:
            injected = work() or 0
        except WrongBitsError as error:
            return {"outcome": "wrong", "note": str(error), "steps": self.steps}
        except (*_EXPECTED, BudgetError) as error:
            self.note(error)
            # Before the first step, and nothing had been tried again: it was refused.
            outcome = "refused" if not self.steps and len(self.raised) == 1 else "ended"
        kinds = ", ".join(sorted(set(self.raised)))
        outcome = outcome or ("raised" if self.raised else "exact")
        return {"outcome": outcome, "note": kinds, "injected": injected, "steps": self.steps}


def places(offloader: Offloader) -> list[tuple[int, int, int]]:
    """(inode, offset, length) of all that saved activations have on the drives now."""
    tier = offloader._parts.tiers.ssd
    return [] if tier is None else _lent(tier._arenas)


def state_places(offloader: Offloader) -> list[tuple[int, int, int]]:
    """The same of optimizer states."""
    tier = offloader._parts.tiers.ssd
    own = [] if tier is None else tier._arenas
    others = [thing for thing in gc.get_objects() if type(thing) is Arena and not thing.closed and thing not in own]
    return _lent(others)


def _remains(directory: str) -> list[str]:
    found = [f"thread {t.name} runs" for t in threading.enumerate() if t.name.startswith("lightning_ssd")]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if (target := os.readlink(f"/proc/self/fd/{name}")).startswith(directory):
                found.append(f"{target} is open")
    return found


def _lent(arenas: list[Arena]) -> list[tuple[int, int, int]]:
    return [
        (os.fstat(arena.fd).st_ino, offset, nbytes)
        for arena in arenas
        for offset, nbytes in list(arena._extents._used.items())
    ]
