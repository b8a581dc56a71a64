"""Makes plans in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial

from lightning_ssd.common.profiling import span
from lightning_ssd.common.task import Task
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.planning.plan import Machine, Plan, PlanObjective
from lightning_ssd.planning.planner import make_plan
from lightning_ssd.planning.trace import Trace
from lightning_ssd.scheduling.pass_kind import PlanInProgress, TracedPass
from lightning_ssd.scheduling.planner_process import make_plan_apart

__all__ = ["PlanMaker"]

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
"""A child that was forked while the process began may hold its pipe, so that its end is never seen."""
_FEW = 32
"""Storages for which a plan without recomputing is made sooner (40 ms) than a process begins."""


class PlanMaker:
    """Makes plans one at a time, each in a process that a thread waits for; for few storages in the thread.

    Args:
        max_tasks: that are waited for at the end.
    """

    def __init__(self, *, max_tasks: int) -> None:
        # One plan at a time. A leaf lock: a plan is made of numbers alone.
        self._planning = threading.Lock()
        self._is_closed = False
        self._tasks: deque[Task[Plan]] = deque(maxlen=max_tasks)

    def begin(self, traced: TracedPass, goal: PlanObjective, machine: Machine) -> PlanInProgress:
        """Have a plan made for a pass."""
        task = Task(partial(self._make, traced.trace, machine, goal), "lightning_ssd-plan")
        # Those that have ended hold a plan, and are not waited for at the end.
        self._tasks = deque([*(one for one in self._tasks if not one.is_done), task], self._tasks.maxlen)
        task.start()
        return PlanInProgress(task, traced, goal, machine)

    def _make(self, trace: Trace, machine: Machine, goal: PlanObjective) -> Plan:
        with self._planning:
            if self._is_closed:
                raise OffloaderClosedError("the offloader was closed before this plan was begun")
            with span("lightning_ssd::plan"):
                if len(trace.storages) < _FEW and not goal.recompute:
                    return make_plan(trace, machine, goal)
                return self._make_apart(trace, machine, goal)

    @staticmethod
    def _make_apart(trace: Trace, machine: Machine, goal: PlanObjective) -> Plan:
        try:
            return make_plan_apart(trace, machine, goal)
        except OSError as error:
            _log.info("plans are made in a thread, where steps wait for them, because no process does it: %s", error)
            return make_plan(trace, machine, goal)

    def close(self) -> None:
        """Wait for the plan that is being made; those that were not begun are dropped."""
        self._is_closed = True
        for task in self._tasks:
            task.wait_for(_PATIENCE_S)
