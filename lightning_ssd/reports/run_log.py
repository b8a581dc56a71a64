"""Keep what a report needs while the run goes on, in bounded memory: rows of metrics, and the last recorded step."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ssd.telemetry.step_record import StepRecord

__all__ = ["RunLog"]

_MAX_ROWS = 2000


class RunLog:
    """Rows over the whole run, and the last recorded step.

    Steps 2, 4, 8, 16 ... are recorded, and the last one: the first ones tell how a plan comes about, the last one
    what came of it. What recording costs is a smaller and smaller share of the run.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        """With their ``step``, oldest first."""
        self.record: StepRecord | None = None
        self._every = 1
        self._num_rows = 0

    @staticmethod
    def wants_record(step: int) -> bool:
        """Whether this optimizer step (the first one is 1) is to be recorded."""
        return step > 1 and step & (step - 1) == 0

    def add_row(self, step: int, row: Mapping[str, float]) -> None:
        """Keep a row; of long runs every second, fourth, eighth one."""
        if self._num_rows % self._every == 0:
            self.rows.append({"step": float(step), **row})
        self._num_rows += 1
        if len(self.rows) > _MAX_ROWS:
            self.rows = self.rows[::2]
            self._every *= 2
