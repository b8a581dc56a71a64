"""Host memory of several users: together they never have more than there is, and nothing is lost of it."""

import random
from functools import partial

import pytest

from lightning_ssd.memory.host_budget import HostMemoryBudget
from tests.support.threads import at_once

PAGE = 4096


def test_first_come_first_served():
    host_budget = HostMemoryBudget(10 * PAGE + 4095)
    assert host_budget.total_bytes == host_budget.left_bytes == 10 * PAGE
    one, other = host_budget.share(), host_budget.share()
    assert one.grow(PAGE, 6 * PAGE) == 6 * PAGE
    assert other.grow(5 * PAGE, 8 * PAGE) == 0, "four pages are less than the least"
    assert other.grow(2 * PAGE, 8 * PAGE) == 4 * PAGE
    assert (one.nbytes, other.nbytes, host_budget.left_bytes) == (6 * PAGE, 4 * PAGE, 0)
    assert one.grow(PAGE, PAGE) == 0


def test_what_is_given_back_is_there_for_others():
    host_budget = HostMemoryBudget(10 * PAGE)
    one, other = host_budget.share(), host_budget.share()
    one.grow(10 * PAGE, 10 * PAGE)
    one.give_back(3 * PAGE)
    assert other.grow(PAGE, 9 * PAGE) == 3 * PAGE
    for _ in range(2):
        one.close()
    assert (one.nbytes, host_budget.left_bytes) == (0, 7 * PAGE)


@pytest.mark.parametrize(
    ("num", "unit", "expected"), [(3, PAGE, 3), (99, 3 * PAGE, 2), (4, PAGE + 1, 4), (1, 9 * PAGE, 0)]
)
def test_units_are_whole_or_not_there(num, unit, expected):
    host_budget = HostMemoryBudget(8 * PAGE)
    share = host_budget.share()
    share.grow(PAGE, 5 * PAGE)
    assert share.fit(num, unit) == expected
    assert share.nbytes == expected * -(-unit // PAGE) * PAGE
    assert host_budget.left_bytes == 8 * PAGE - share.nbytes
    assert share.fit(0, unit) == share.nbytes == 0


def test_many_threads_have_no_more_together():
    host_budget = HostMemoryBudget(64 * PAGE)
    shares = []

    def work(seed):
        chance, share = random.Random(seed), host_budget.share()
        shares.append(share)
        for _ in range(500):
            if chance.random() < 0.5:
                share.grow(PAGE, chance.randint(1, 40) * PAGE)
            else:
                share.fit(chance.randint(0, 9), chance.randint(1, 5 * PAGE))
            assert 0 <= host_budget.left_bytes <= host_budget.total_bytes

    at_once(*(partial(work, seed) for seed in range(4)))
    assert sum(share.nbytes for share in shares) + host_budget.left_bytes == host_budget.total_bytes
