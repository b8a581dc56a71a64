"""Freed memory leaves the process where memory is short of what waits in the page cache, and else stays."""

from types import SimpleNamespace

import pytest

from lightning_ssd.memory import freed_memory, host_room
from lightning_ssd.memory.freed_memory import FreedMemory
from lightning_ssd.memory.malloc import MallocThreshold

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")

WAITING = 1000


class Machine:
    available_bytes: int | None = 10 * WAITING
    num_trims = 0
    now_s = 0.0


@pytest.fixture
def machine(monkeypatch):
    said = Machine()
    monkeypatch.setattr(host_room, "host_available_bytes", lambda cached: said.available_bytes)
    monkeypatch.setattr(freed_memory, "trim", lambda: setattr(said, "num_trims", said.num_trims + 1))
    monkeypatch.setattr(freed_memory, "time", SimpleNamespace(monotonic=lambda: said.now_s))
    monkeypatch.setattr(freed_memory, "_LOOK_S", 0.0)
    return said


@pytest.fixture
def made(machine):
    all_made = []

    def make(**options):
        all_made.append(FreedMemory(**options))
        return all_made[-1]

    yield make
    for one in all_made:
        one.close()
        assert not is_fixed(one)
        assert not stays(one)


def is_fixed(freed):
    return freed._threshold in MallocThreshold._users


def stays(freed):
    return freed._threshold in MallocThreshold._reusers


@pytest.mark.parametrize("has_pages", [True, False])
def test_with_room_for_all_freed_memory_stays_where_it_is_reused(has_pages, made, machine, monkeypatch):
    monkeypatch.setattr(freed_memory, "has_whole_pages", lambda: has_pages)
    freed = made()
    freed.leaves()
    assert is_fixed(freed), "while the model is built"
    freed.expect(WAITING)
    freed.look()
    assert (is_fixed(freed), stays(freed)) == (False, has_pages), "else malloc is left alone"
    freed.expect(0)
    assert not stays(freed)
    freed.expect(WAITING)
    for machine.now_s in (59.0, 60.0, 119.0, 120.0):
        freed.look()
    assert machine.num_trims == 2 * has_pages, "once a minute, or one large batch leaves its memory to the end"
    machine.available_bytes = 0
    freed.look()
    assert (is_fixed(freed), stays(freed)) == (True, False)
    assert machine.num_trims == 2 * has_pages + 1


@pytest.mark.parametrize("is_limited", [False, True])
def test_where_no_gradient_waits_malloc_is_left_alone(is_limited, made):
    freed = made(is_limited=is_limited)
    freed.expect(0)
    assert not is_fixed(freed)
    freed.leaves()
    freed.expect(0)
    assert is_fixed(freed) is is_limited, "the user has asked for less memory"
    freed.expect(WAITING)
    assert is_fixed(freed) is is_limited


@pytest.mark.parametrize("available", [2 * WAITING - 1, 0, None])
def test_where_memory_is_short_or_unknown_freed_memory_leaves_to_the_end(available, made, machine):
    """It would come and go with each step else, as what leaves is available then."""
    machine.available_bytes = available
    freed = made()
    freed.expect(WAITING)
    machine.available_bytes = 100 * WAITING
    for waiting in (WAITING, 0):
        freed.look()
        freed.expect(waiting)
        assert is_fixed(freed)


def test_memory_that_gets_short_later_is_seen_at_a_border(made, machine):
    freed = made()
    freed.expect(WAITING)
    machine.available_bytes = WAITING
    freed.look()
    assert not is_fixed(freed)
    machine.available_bytes = WAITING - 1
    freed.look()
    assert is_fixed(freed)
    assert machine.num_trims == 1, "what is free already leaves now"


def test_processes_share_the_memory(made, machine):
    machine.available_bytes = 4 * WAITING
    two, three = made(num_processes=2), made(num_processes=3)
    two.expect(WAITING), three.expect(WAITING)
    assert (is_fixed(two), is_fixed(three)) == (False, True)
