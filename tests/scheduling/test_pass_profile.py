"""What one pass teaches the next, and how far ahead to look."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.scheduling import pass_profile
from lightning_ssd.scheduling.pass_profile import PassProfile, PrefetchBudget, ProfileBook, storages_to_keep


def profile(*sizes, keep=frozenset()):
    return PassProfile(tuple(sizes), tuple(reversed(range(len(sizes)))), keep)


def test_book_finds_the_latest_profile_that_began_alike():
    book = ProfileBook()
    first, second = profile(1, 2, 3), profile(1, 2, 4)
    book.add(first)
    book.add(second)
    assert book.guess([1, 2]) is second
    assert book.guess([1, 2, 3]) is first
    assert book.guess([2]) is None
    assert book.exact([1, 2, 3]) is first
    assert book.exact([1, 2]) is None


def test_book_forgets_the_least_recent(monkeypatch):
    monkeypatch.setattr(pass_profile, "_MAX_PROFILES", 2)
    book = ProfileBook()
    for sizes in ((1,), (2,), (1,), (3,)):
        book.add(profile(*sizes))
    assert book.exact([2]) is None
    assert book.exact([1]) is not None


def test_budget_grows_with_stalls_and_shrinks_without():
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


def test_kept_storages_do_not_widen_the_budget():
    budget = PrefetchBudget()
    budget.observe(500, 2000)
    assert budget.nbytes == 1000
    budget.pass_ended([profile(10, 500, keep=frozenset({1}))], 2000)
    assert budget.nbytes == 250


def test_running_out_of_memory_lowers_the_budget_for_good():
    budget = PrefetchBudget()
    budget.observe(100, 100_000)
    budget.out_of_memory()
    assert budget.nbytes == 100
    for _ in range(50):
        budget.stalled()
        budget.pass_ended([profile(100)], 100_000)
    assert budget.nbytes == 100


@given(st.lists(st.tuples(st.sampled_from(["observe", "stall", "end", "oom"]), st.integers(1, 1000)), max_size=60))
def test_budget_stays_within_its_bounds(actions):
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


BACK_IN_REVERSE = ([100] * 10, [float(i) for i in range(10)], [20.0 - i for i in range(10)])
"""Ten storages, one a second."""


def test_tail_of_forward_is_kept():
    """The last ones are wanted before they could be back."""
    # 100 bytes need 1 s out and 2 s in: storage 9 is packed at 9 s and wanted at 11 s, storage 8 at 8 s and 12 s.
    assert storages_to_keep(*BACK_IN_REVERSE, write_rate=100, read_rate=50) == {9}


def test_a_slow_drive_keeps_more_and_a_fast_one_less():
    slow = storages_to_keep(*BACK_IN_REVERSE, write_rate=20, read_rate=20)
    fast = storages_to_keep(*BACK_IN_REVERSE, write_rate=1e9, read_rate=1e9)
    assert fast == set()
    assert {9, 8} <= slow
    assert 0 not in slow


@st.composite
def passes(draw):
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=30))
    packed = sorted(draw(st.lists(st.floats(0, 10), min_size=len(sizes), max_size=len(sizes))))
    wanted = draw(st.lists(st.one_of(st.none(), st.floats(10, 30)), min_size=len(sizes), max_size=len(sizes)))
    return sizes, packed, wanted


@given(passes(), st.floats(1, 1000), st.floats(1, 1000))
def test_what_is_written_can_be_back_in_time(case, write_rate, read_rate):
    keep = storages_to_keep(*case, write_rate=write_rate, read_rate=read_rate)
    end = float("-inf")
    for index, (size, packed, wanted) in enumerate(zip(*case, strict=True)):
        if index not in keep:
            end = max(end, packed) + size / write_rate
            assert wanted is None or end + size / read_rate <= wanted


@given(passes(), st.floats(1, 1000), st.floats(1, 1000), st.floats(1, 8))
def test_a_faster_read_never_keeps_more(case, write_rate, read_rate, factor):
    """Reads are not booked one behind the other, so that this holds exactly; for writes a kept storage can make
    room for another, so that only the totals shrink."""
    slow = storages_to_keep(*case, write_rate=1e12, read_rate=read_rate)
    fast = storages_to_keep(*case, write_rate=1e12, read_rate=read_rate * factor)
    assert fast <= slow
