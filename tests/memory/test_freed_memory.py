"""Freed memory leaves the process where memory is short of what waits in the page cache, and else stays."""

from types import SimpleNamespace

import pytest

from lightning_ssd.memory import freed_memory, host_room
from lightning_ssd.memory.freed_memory import FreedMemory
from lightning_ssd.memory.host_room import HostRoom
from lightning_ssd.memory.malloc import MallocThreshold
from tests.support.opened import offloader_in

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
        assert not stays(one)


def stays(freed):
    return freed._threshold in MallocThreshold._reusers


@pytest.mark.parametrize("has_pages", [True, False])
def test_with_room_for_all_freed_memory_stays_where_it_is_reused(has_pages, made, machine, monkeypatch):
    monkeypatch.setattr(freed_memory, "has_whole_pages", lambda: has_pages)
    freed = made()
    freed.expect(WAITING)
    freed.look()
    assert stays(freed) is has_pages, "else malloc is left alone"
    freed.expect(0)
    assert not stays(freed)
    freed.expect(WAITING)
    for machine.now_s in (59.0, 60.0, 119.0, 120.0):
        freed.look()
    assert machine.num_trims == 2 * has_pages, "once a minute, or one large batch leaves its memory to the end"
    machine.available_bytes = 0
    freed.look()
    assert not stays(freed)
    assert machine.num_trims == 2 * has_pages + 1


@pytest.mark.parametrize("is_limited", [False, True])
def test_only_where_the_user_has_asked_for_less_memory_freed_memory_leaves_at_once(is_limited, made, machine):
    freed = made(is_limited=is_limited)
    freed.expect(0)
    freed.look()
    assert not machine.num_trims, "no gradient waits"
    freed.expect(WAITING)
    freed.look()
    assert machine.num_trims == is_limited
    assert not (is_limited and stays(freed))


@pytest.mark.parametrize("available", [2 * WAITING - 1, 0, None])
def test_where_memory_is_short_or_unknown_freed_memory_leaves_to_the_end(available, made, machine):
    """It would come and go with each step else, as what leaves is available then."""
    machine.available_bytes = available
    freed = made()
    freed.expect(WAITING)
    machine.available_bytes = 100 * WAITING
    for num_trims in (1, 2):
        freed.look()
        freed.expect(WAITING)
        assert not stays(freed)
        assert machine.num_trims == num_trims


def test_memory_that_gets_short_later_is_seen_at_a_border(made, machine):
    freed = made()
    freed.expect(WAITING)
    machine.available_bytes = WAITING
    freed.look()
    assert not machine.num_trims
    machine.available_bytes = WAITING - 1
    freed.look()
    assert machine.num_trims == 1, "what is free leaves now"


def test_processes_share_the_memory(made, machine):
    machine.available_bytes = 4 * WAITING
    for num_processes, num_trims in ((2, 0), (3, 1)):
        shared = made(num_processes=num_processes)
        shared.expect(WAITING), shared.look()
        assert machine.num_trims == num_trims


@pytest.mark.parametrize("lacking", [0, 1, None])
@pytest.mark.parametrize(("num_sharing", "times", "least"), [(1, 2, 2), (3, 2, 6), (1, 1, 1), (3, 1, 3)])
def test_there_is_room_for_all_that_waits_of_each_process(num_sharing, times, least, lacking, machine):
    machine.available_bytes = None if lacking is None else least * WAITING - lacking
    assert HostRoom(num_sharing, times=times).is_enough(lambda: WAITING) is (lacking == 0)


@pytest.mark.parametrize("is_short", [False, True])
def test_an_offloader_says_who_shares_the_memory(is_short, machine, spill_dir):
    """What leaves glibc's heap needs twice the room, what is updated needs it once."""
    machine.available_bytes = 6 * WAITING
    policy = {"activations": "keep", "optimizer_states": "offload", "gradients": "offload"}
    with offloader_in(spill_dir, **policy, num_local_processes=3) as offloader:
        parameters = offloader._parts.parameters
        parameters.freed.expect(WAITING + is_short)
        before = machine.num_trims
        parameters.freed.look()
        assert machine.num_trims == before + is_short
        assert parameters.pages._room.is_enough(lambda: 2 * (WAITING + is_short)) is not is_short


@pytest.mark.parametrize("budget", [None, "1TiB"])
def test_under_a_budget_of_all_memory_freed_memory_leaves_though_there_is_plenty(budget, machine, spill_dir):
    policy = {"optimizer_states": "offload", "gradients": "offload", "activations": "auto", "memory_budget": budget}
    with offloader_in(spill_dir, **policy) as offloader:
        freed = offloader._parts.parameters.freed
        freed.expect(WAITING)
        before = machine.num_trims
        freed.look()
        assert machine.num_trims - before == (budget is not None)
