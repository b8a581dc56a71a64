"""Host memory of several users: together they never have more than there is, and nothing is lost of it."""

import random
from functools import partial

import pytest

from lightning_ssd.memory.host_budget import HostMemoryBudget
from tests.support.threads import at_once

PAGE = 4096


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
    host_budget = HostMemoryBudget(64 * PAGE + 4095)
    assert host_budget.total_bytes == host_budget.left_bytes == 64 * PAGE
    shares = []

    def work(seed):
        chance, share = random.Random(seed), host_budget.share()
        shares.append(share)
        for _ in range(500):
            before, least, turn = share.nbytes, chance.randint(1, 9) * PAGE, chance.random()
            if turn < 0.4:
                taken = share.grow(least, chance.randint(9, 40) * PAGE)
                assert (share.nbytes, taken == 0 or taken >= least) == (before + taken, True)
            elif turn < 0.6:
                share.give_back(before // 2 // PAGE * PAGE)
                assert share.nbytes == before - before // 2 // PAGE * PAGE
            else:
                share.fit(chance.randint(0, 9), chance.randint(1, 5 * PAGE))
            assert 0 <= host_budget.left_bytes <= host_budget.total_bytes

    at_once(*(partial(work, seed) for seed in range(4)))
    assert sum(share.nbytes for share in shares) + host_budget.left_bytes == host_budget.total_bytes
    for share in (*shares, *shares):
        share.close()
    assert host_budget.left_bytes == host_budget.total_bytes
