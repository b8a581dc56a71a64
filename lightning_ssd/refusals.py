"""Writes that no directory took: what they cost, and what the user is told of them, once."""

from __future__ import annotations

from lightning_ssd.state_home import Home

__all__ = ["Refusals"]


class Refusals:
    """Subgroups whose states stay in memory because they cannot be written. Its owner locks."""

    def __init__(self) -> None:
        self.num_stuck = 0
        """Subgroups that have a piece of memory beyond the others' now, or training would wait for one for ever."""
        self.last_error: str | None = None
        self._warning: str | None = None

    def note(self, home: Home, error: BaseException | None, *, quietly: bool) -> None:
        """A subgroup stays in memory; ``quietly``: nobody needs to know."""
        self.num_stuck += not home.is_stuck
        home.is_stuck = True
        if self.last_error is None and not quietly:
            self._warning = (
                f"optimizer states could not be written and stay in memory, exact as before: {error}. Free space on "
                "the drive, or name another directory in HardwareProfile.paths"
            )
        self.last_error = str(error) or repr(error)  # not itself: its frames hold what was to be written

    def is_written(self, home: Home) -> None:
        """Memory is not ahead of the drive any more."""
        home.is_dirty = False
        self.num_stuck -= home.is_stuck
        home.is_stuck = False

    def take_warning(self) -> str | None:
        """What the user should know, once."""
        warning, self._warning = self._warning, None
        return warning
