"""Makes one plan in a process of its own, so that no step waits for the interpreter's lock meanwhile.

The planner is plain Python and takes 0.1 to 2 seconds. In a thread beside training it made short steps take three to
four times as long, because each operation gives the lock away and has to wait for it again.

This file is also the program of that process. It runs without site packages and without ``lightning_ssd/__init__.py``,
which imports PyTorch: only ``planning`` and what that needs. Trace, goal and plan go through pipes that only these two
processes hold, so that unpickling them runs nothing that a third one has written.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_ssd.planning.plan import Machine, Plan, PlanObjective
    from lightning_ssd.planning.trace import Trace

__all__ = ["make_plan_apart"]

_PACKAGE = Path(__file__).resolve().parent.parent


def make_plan_apart(trace: Trace, machine: Machine, goal: PlanObjective) -> Plan:
    """Have a process make a plan, and wait for it.

    Raises:
        BudgetTooSmall: no plan stays under the budget.
        OSError: the system starts no process, or it has ended without an answer.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("this program has no Python interpreter of its own")
    # A group of its own: Ctrl-C is for the training.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise OSError("the planner's process has no pipes")
        pickle.dump((trace, machine, goal), child.stdin)
        child.stdin.close()
        try:
            answer: Plan | Exception = pickle.load(child.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise OSError("the planner's process has ended without a plan") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def _die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, whatever ends that. Elsewhere it ends with its plan."""
    import ctypes
    import signal

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _main() -> None:
    import os
    import types

    _die_with_parent()
    os.nice(5)  # training has the right of way
    package = types.ModuleType("lightning_ssd")
    package.__path__ = [str(_PACKAGE)]
    sys.modules["lightning_ssd"] = package
    from lightning_ssd.planning.planner import BudgetTooSmall, make_plan

    answer: Plan | BudgetTooSmall
    try:
        answer = make_plan(*pickle.load(sys.stdin.buffer))
    except BudgetTooSmall as refusal:
        answer = refusal
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    _main()
