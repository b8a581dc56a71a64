"""What holders of optimizer states let go of: noted in C wherever they die, given back later, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_ssd.optimizer.store.entry import CopyPin, DeferredReleases, StoredCopy
from tests.support.threads import at_once


class Tier:
    """Knows what it got back."""

    def __init__(self) -> None:
        self.freed: list[Any] = []

    def free(self, stored: Any) -> None:
        self.freed.append(stored)


def test_what_another_one_holds_stays() -> None:
    tier, returned = Tier(), DeferredReleases()
    copy = StoredCopy(tier, "shared")
    copy.num_holders += 1
    for freed in ([], ["shared"]):
        returned.watch(CopyPin(), [copy])  # dies at once
        returned.give_back()
        assert tier.freed == freed


def test_no_note_is_lost_wherever_holders_die() -> None:
    tier, returned = Tier(), DeferredReleases()
    holds = [CopyPin() for _ in range(2000)]
    for number, hold in enumerate(holds):
        returned.watch(hold, [StoredCopy(tier, number)])
    del hold

    def work(first: int) -> None:
        for number in range(first, first + 500):
            holds[number] = None  # type: ignore[call-overload]
            if first == 0:  # the owner, who has the lock
                returned.give_back()

    at_once(*(partial(work, 500 * thread) for thread in range(4)))
    returned.give_back()
    assert sorted(tier.freed) == list(range(2000))
