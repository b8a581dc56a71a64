"""What holders of optimizer states let go of: noted by anybody at any moment, given back later, each once."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_ssd.returned_copies import ReturnedCopies
from lightning_ssd.state_home import Copy
from tests.threads import at_once


class Tier:
    """Knows what it got back."""

    def __init__(self) -> None:
        self.freed: list[Any] = []

    def free(self, stored: Any) -> None:
        self.freed.append(stored)


class Cached(Copy):
    is_cached = True


def test_files_get_theirs_back_without_host_memory() -> None:
    tier, returned = Tier(), ReturnedCopies()
    returned.note([Copy(tier, "file"), Cached(tier, "memory")])
    assert tier.freed == []
    returned.give_back_extents()
    assert tier.freed == ["file"]
    for _ in range(2):
        returned.give_back()
        assert tier.freed == ["file", "memory"]


def test_what_another_one_holds_stays() -> None:
    tier, returned = Tier(), ReturnedCopies()
    copy = Copy(tier, "shared")
    copy.num_holders += 1
    for freed in ([], ["shared"]):
        returned.note([copy])
        returned.give_back()
        assert tier.freed == freed


def test_no_note_is_lost_whoever_makes_it() -> None:
    tier, returned = Tier(), ReturnedCopies()

    def work(first: int) -> None:
        for number in range(first, first + 500):
            returned.note([(Cached if number % 2 else Copy)(tier, number)])
            if first == 0:  # the owner, who has the lock
                returned.give_back()

    at_once(*(partial(work, 500 * thread) for thread in range(4)))
    returned.give_back()
    assert sorted(tier.freed) == list(range(2000))
