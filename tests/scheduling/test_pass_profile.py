"""What one pass teaches the next, and how far ahead to look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.scheduling.pass_profile import PassProfile, PrefetchBudget, ProfileBook


def profile(*sizes: int, keep: frozenset[int] = frozenset()) -> PassProfile:
    return PassProfile(tuple(sizes), tuple(reversed(range(len(sizes)))), keep)


def test_book_finds_the_latest_profile_that_began_alike() -> None:
    book = ProfileBook()
    first, second = profile(1, 2, 3), profile(1, 2, 4)
    book.add(first)
    book.add(second)
    assert book.guess([1, 2]) is second
    assert book.guess([1, 2, 3]) is first
    assert book.guess([2]) is None
    assert book.exact([1, 2, 3]) is first
    assert book.exact([1, 2]) is None


def test_book_forgets_the_least_recent() -> None:
    book = ProfileBook(capacity=2)
    for sizes in ((1,), (2,), (1,), (3,)):
        book.add(profile(*sizes))
    assert book.exact([2]) is None
    assert book.exact([1]) is not None


def test_budget_grows_with_stalls_and_shrinks_without() -> None:
    budget = PrefetchBudget()
    budget.observe(10, 8000)
    assert budget.nbytes == 20
    budget.stalled()
    assert budget.nbytes == 30
    for _ in range(100):
        budget.stalled()
    assert budget.nbytes == 1000  # an eighth of all that is saved
    budget.pass_ended([profile(10, 10)], 8000)
    assert budget.nbytes == 1000  # it stalled in this pass
    budget.pass_ended([profile(10, 10)], 8000)
    assert budget.nbytes == 950


def test_kept_storages_do_not_widen_the_budget() -> None:
    budget = PrefetchBudget()
    budget.observe(500, 2000)
    assert budget.nbytes == 1000
    budget.pass_ended([profile(10, 500, keep=frozenset({1}))], 2000)
    assert budget.nbytes == 250


def test_running_out_of_memory_lowers_the_budget_for_good() -> None:
    budget = PrefetchBudget()
    budget.observe(100, 100_000)
    budget.out_of_memory()
    assert budget.nbytes == 100
    for _ in range(50):
        budget.stalled()
        budget.pass_ended([profile(100)], 100_000)
    assert budget.nbytes == 100


@given(st.lists(st.tuples(st.sampled_from(["observe", "stall", "end", "oom"]), st.integers(1, 1000)), max_size=60))
def test_budget_stays_within_its_bounds(actions: list[tuple[str, int]]) -> None:
    budget, saved, largest = PrefetchBudget(), 0, 0
    for action, nbytes in actions:
        if action == "observe":
            saved, largest = saved + nbytes, max(largest, nbytes)
            budget.observe(nbytes, saved)
        elif action == "stall":
            budget.stalled()
        elif action == "end":
            budget.pass_ended([profile(nbytes)], saved)
            largest = max(largest, nbytes)
        else:
            budget.out_of_memory()
        assert 0 <= budget.nbytes <= max(2 * largest, saved // 8, 1)
