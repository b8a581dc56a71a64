"""What searches have learnt is there in the next run, and nothing that happens to its file ends a training."""

from __future__ import annotations

import errno
import json
import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations import tensor_cache
from lightning_ssd.scheduling.clock import HostClock
from lightning_ssd.scheduling.move_search import NUM_KEPT, Learnt, MoveSearch
from lightning_ssd.scheduling.plan_cache import PlanCache, machine_of
from lightning_ssd.scheduling.search_phase import Phase, State
from tests.support.threads import at_once

MACHINE = {"processor": "one", "malloc": "glibc 2.36"}
LEARNT = Learnt(cost_s_per_byte=1e-9, good_bytes=1 << 30, slowdown=1.01)


@pytest.fixture(autouse=True)
def plans_are_followed() -> None:
    """Here they are measured."""


def cache(path: Path, **changes: str) -> PlanCache:
    return PlanCache(path, {**MACHINE, **changes})


def saved(path: Path, sizes: tuple[int, ...] = (1, 2), learnt: Learnt = LEARNT, **changes: str) -> None:
    one = cache(path, **changes)
    one.put(sizes, learnt)
    one.save()


# -- the file ----------------------------------------------------------------------------------------------------------


def test_what_was_put_is_there_for_the_same_passes_on_the_same_machine(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "plans.json"
    assert cache(path).get((1, 2)) is None
    saved(path)
    assert cache(path).get((1, 2)) == LEARNT
    assert cache(path).get((2, 1)) is None
    assert cache(path, malloc="glibc 2.41").get((1, 2)) is None
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "nothing else is left behind"


def test_nothing_is_written_where_nothing_was_learnt(tmp_path: Path) -> None:
    cache(tmp_path / "plans.json").save()
    assert not list(tmp_path.iterdir())


def test_what_others_have_written_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    first = cache(path)
    first.put((1,), LEARNT)
    saved(path, (2,))
    saved(path, (3,), processor="two")
    first.save()
    assert cache(path).get((1,)) == cache(path).get((2,)) == LEARNT
    assert cache(path, processor="two").get((3,)) == LEARNT


def test_the_latest_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    for number in range(20):
        saved(path, processor=str(number))
    one = cache(path)
    for number in range(70):
        one.put((number,), LEARNT)
    one.save()
    machines = json.loads(path.read_text())["machines"]
    assert len(machines) == 16
    assert len(cache(path)._known) == 64
    assert cache(path).get((69,)) == LEARNT
    assert cache(path).get((0,)) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "[]", "null", '{"form": 1}', '{"form": 1, "machines": 5}', "\x00", '{"machines": {}}'],
)
def test_a_broken_file_is_told_of_and_overwritten(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match="plans.json is no plan cache, or a broken one; the search begins anew"):
        one = cache(path)
    assert one.get((1, 2)) is None
    one.put((1, 2), LEARNT)
    one.save()  # a second warning would be an error
    assert cache(path).get((1, 2)) == LEARNT


@pytest.mark.parametrize("field", ["cost_s_per_byte", "good_bytes", "slowdown"])
@pytest.mark.parametrize("value", ["a", None, float("nan"), float("inf"), -1, [], True])
def test_a_value_that_nobody_has_measured_is_as_good_as_none(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    saved(path)
    content = json.loads(path.read_text())
    (entry,) = content["machines"].values()
    (kind,) = entry["kinds"].values()
    kind[field] = value
    path.write_text(json.dumps(content))
    found = cache(path).get((1, 2))
    assert found is None or value is True  # a number like others, to Python


def test_what_does_not_hold_any_more_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    saved(path, (1,))
    saved(path, (2,))
    one = cache(path)
    one.drop((1,))
    one.drop((3,))
    assert cache(path).get((1,)) is None
    assert cache(path).get((2,)) == LEARNT


def test_a_link_and_its_mode_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "plans.json", tmp_path / "link"
    path.write_text('{"form": 1, "machines": {}}')
    path.chmod(0o664)
    link.symlink_to(path)
    saved(link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o664
    assert cache(path).get((1, 2)) == LEARNT


def test_many_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    at_once(*[partial(saved, path, (number,)) for number in range(8)])
    assert all(cache(path).get((number,)) == LEARNT for number in range(8))


@pytest.mark.parametrize("kinds", [5, None, [], {"x": 3}])
def test_a_broken_entry_is_as_good_as_none(kinds: object, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    saved(path)
    content = json.loads(path.read_text())
    (entry,) = content["machines"].values()
    entry["kinds"] = kinds
    path.write_text(json.dumps(content))
    assert cache(path).get((1, 2)) is None
    saved(path)
    assert cache(path).get((1, 2)) == LEARNT


def test_a_file_of_another_version_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text('{"form": 2, "machines": "of a kind that nobody knows yet"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(path)
        assert cache(path).get((1, 2)) is None
    assert json.loads(path.read_text())["form"] == 2, "left as it is"


def test_a_place_that_cannot_be_read_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"plans.json could not be read \(Not a directory\); the search begins anew"):
        one = cache(tmp_path / "file" / "plans.json")
    one.put((1, 2), LEARNT)
    one.save()


def test_a_full_drive_is_told_of_once_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "plans.json"
    saved(path)
    monkeypatch.setattr(os, "replace", full)
    one = cache(path)
    one.put((3,), LEARNT)
    with pytest.warns(UserWarning, match=r"plans.json could not be written \(No space left on device\); the next run"):
        one.save()
    one.save()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert cache(path).get((1, 2)) == LEARNT


# -- the search --------------------------------------------------------------------------------------------------------


def test_a_search_begins_where_another_has_ended() -> None:
    """Its trial is short, but keeping is measured once more: the first passes of a run are often slow."""
    search, moved = MoveSearch(1.02, learnt=LEARNT), 0
    for _ in range(NUM_KEPT):
        search.kept(1.0)
    search.submitted()
    search.planned(LEARNT.good_bytes)
    while search.state is not State.SETTLED:
        if search.keeps:
            search.kept(1.0)
        else:
            search.moved("plan", LEARNT.good_bytes, 1.01, 0.0)
            moved += 1
    assert moved <= 8
    assert search.learnt is not None
    assert (search.learnt.cost_s_per_byte, search.learnt.good_bytes) == (LEARNT.cost_s_per_byte, LEARNT.good_bytes)


@pytest.mark.parametrize("slowdown", [1.05, 1.2])
def test_what_was_learnt_wrongly_is_found_out(slowdown: float) -> None:
    search, moved = MoveSearch(1.02, learnt=LEARNT), 0
    for _ in range(NUM_KEPT):
        search.kept(1.0)
    search.submitted()
    search.planned(LEARNT.good_bytes)
    while search._phase is not Phase.MEASURING:
        if search.keeps:
            search.kept(1.0)
        else:
            search.moved("plan", LEARNT.good_bytes, slowdown, 0.0)
            moved += 1
    assert moved <= 8
    assert search.cost_s_per_byte > LEARNT.cost_s_per_byte


def test_where_nothing_was_worth_moving_that_is_remembered() -> None:
    search = MoveSearch(1.02, learnt=Learnt(cost_s_per_byte=1.0, good_bytes=0, slowdown=1.0))
    for _ in range(NUM_KEPT):
        search.kept(1.0)
    search.submitted()
    search.planned(0)
    assert search.state is State.RESTING
    assert search.learnt == Learnt(cost_s_per_byte=1.0, good_bytes=0, slowdown=1.0)
    kept = 0
    while search.keeps and not search.wants_trace:
        search.kept(1.0)
        kept += 1
    assert kept >= 60, "not tried as often as what was only guessed"


def test_more_than_was_good_is_tried_first() -> None:
    search = MoveSearch(1.02, learnt=LEARNT)
    for _ in range(NUM_KEPT):
        search.kept(1.0)
    search.submitted()
    search.planned(2 * LEARNT.good_bytes)
    search.moved("plan", 2 * LEARNT.good_bytes, 1.01, 0.0)
    assert search.state is State.TRYING
    assert search.learnt is None


# -- two runs ----------------------------------------------------------------------------------------------------------


class SimulatedTime(HostClock):
    """Each operation takes as long as the one before, whatever this machine does meanwhile."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def stamp(self) -> float:  # type: ignore[override] # a method here
        return self.now_s

    def advance(self, _grad: object = None) -> None:
        self.now_s += 0.01


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    time = SimulatedTime()
    monkeypatch.setattr(tensor_cache, "clock_of", lambda device: time)
    monkeypatch.setattr(tensor_cache, "available_bytes", lambda device: 1 << 30)
    return time


def run(time: SimulatedTime, directory: Path, path: Path | None, *, until_settled: bool) -> int:
    """Returns after how many passes the search has settled."""
    policy = OffloadPolicy(max_slowdown=1000.0, min_tensor_bytes=0, plan_cache=path)
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    torch.manual_seed(0)
    x, number = torch.rand(256, 256, requires_grad=True), 0
    with Offloader(policy=policy, hardware=hardware) as opened:
        scheduler = opened._parts.scheduler
        assert scheduler is not None
        while number < (60 if until_settled else 5):
            with opened.saved_tensors(signature="kind"):
                y = x * 1
                for _ in range(24):
                    y = y.sin()
                    y.register_hook(time.advance)
                    time.advance()
            y.sum().backward()
            opened.end_backward()
            opened.wait_for_plan()
            number += 1
            report = opened.plan_report
            if report is not None and report.state is State.SETTLED:
                return number
    return number


def test_the_next_run_begins_where_the_last_one_ended(simulated: SimulatedTime, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    first = run(simulated, tmp_path, path, until_settled=True)
    assert NUM_KEPT + 1 < first < 60
    assert path.is_file()
    assert run(simulated, tmp_path, path, until_settled=True) < first, "its trial is a shorter one"


def test_a_run_that_has_learnt_nothing_leaves_the_file(simulated: SimulatedTime, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    run(simulated, tmp_path, path, until_settled=False)
    assert not path.exists()


def test_the_machine_tells_what_a_cost_depends_on() -> None:
    here = machine_of(torch.device("cpu"), [Path("/a")], max_slowdown=1.02)
    assert here == machine_of(torch.device("cpu"), [Path("/a")], max_slowdown=1.02)
    assert here == machine_of(torch.device("cpu"), [Path("/b")], max_slowdown=1.02), "another directory of that drive"
    assert here != machine_of(torch.device("cpu"), [Path("/proc")], max_slowdown=1.02)
    assert here != machine_of(torch.device("cpu"), [Path("/a")], max_slowdown=1.05)
    assert all(here.values())
