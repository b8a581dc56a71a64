"""What malloc holds back counts as available: a pass like the last one finds its memory there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_ssd.activations import tensor_cache
from lightning_ssd.memory.heap_policy import HeapPolicy
from lightning_ssd.memory.malloc import MallocThreshold, free_heap_bytes, trim
from lightning_ssd.memory.readings import level_bytes
from tests.activations.test_plan_runtime import trains
from tests.activations.test_scarce_memory import SAVED, settle
from tests.support.helpers import AUTO, Session, open_offloader, outcome

pytestmark = pytest.mark.skipif(
    MallocThreshold().reason is not None, reason=f"there is no glibc with mallopt: {MallocThreshold().reason}"
)

MIB = 1 << 20


def test_free_heap_is_what_a_trim_gives_back() -> None:
    trim()
    kept = [torch.ones(25_000) for _ in range(2000)]  # 100 kB each: from the heap
    taken = free_heap_bytes()
    del kept[::2]
    free, resident = free_heap_bytes(), level_bytes(torch.device("cpu"))
    assert free - taken == pytest.approx(100 * MIB, rel=0.2)
    trim()
    returned = resident - level_bytes(torch.device("cpu"))
    assert returned == pytest.approx(100 * MIB, rel=0.3)
    del kept


@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
def test_memory_is_not_scarce_because_malloc_holds_it(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Passes leave their memory in the heap: beside that, not enough is available for the next one."""
    free = [0]
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 3 * SAVED - free[0])
    monkeypatch.setattr(tensor_cache, "level_bytes", lambda device: free[0])
    monkeypatch.setattr(HeapPolicy, "free_bytes", lambda self: free[0] if is_counted else 0)

    def look(step: int, session: Session) -> None:
        if session.offloader is not None:
            settle(session.offloader)
            free[0] = 2 * SAVED

    setup = replace(AUTO, max_slowdown=1.0)  # by plan nothing moves
    with open_offloader(tmp_path, setup) as offloader:
        outcome(trains(3, look), Session.of(offloader, setup))
        scheduler = offloader._parts.scheduler
        assert scheduler is not None
        assert scheduler._limits.limits_total_memory is not is_counted
