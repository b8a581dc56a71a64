"""Every fault of ``recipes.faults.run`` once, for real, and that the recipe would notice what it looks for."""

from collections import Counter
from dataclasses import replace

import pytest

from recipes.faults import run as faults
from recipes.faults.run import FAULTS, Row, own_disk, run_fault
from recipes.faults.server import Order, Server, leftovers
from recipes.faults.shim import ShimUnavailableError, build

ROW = {"kill -9": 2, "SIGINT": 2, "fork after setup": 4}  # with a lock held at the fork, and without


class Bench:
    """A server, a place for its trials, and why something is missing."""

    def __init__(self, server, directory, *, shim, disk):
        self.server, self.directory, self.shim, self.disk = server, directory, shim, disk

    def run(self, fault, *, seed=3):
        why = faults._why_not(fault, shim=self.shim, disk=self.disk)
        if why:
            pytest.skip(why)
        return run_fault(fault, self.server, self.directory, seed=seed, owns_space=not self.disk)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One server for all trials: starting Python with torch takes longer than most of them."""
    scratch = tmp_path_factory.mktemp("faults")
    library, why = None, ""
    try:
        library = build(scratch)
    except ShimUnavailableError as error:
        why = str(error)
    with own_disk(scratch) as (place, no_disk), Server.start(library) as server:
        directory = place / "trials"
        directory.mkdir()
        yield Bench(server, directory, shim=why, disk=no_disk)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_fault_costs_a_wrong_result_a_hang_or_a_mess(fault, bench):
    row = bench.run(replace(fault, num_trials=ROW.get(fault.name, 1)))
    assert row.is_good, f"{row.cells} {row.leftovers}"
    assert sum(row.outcomes.values()) == ROW.get(fault.name, 1)
    if fault.signal:
        assert row.outcomes == Counter(killed=ROW.get(fault.name, 1))


# -- that it can fail ------------------------------------------------------------------------------------------------


def order(bench, trial, **changes):
    return replace(Order(trial=trial, seed=5, directory=str(bench.directory), owns_space=not bench.disk), **changes)


def test_a_hang_is_noticed_and_ended(bench):
    """It trains until a signal comes, and none comes."""
    result = bench.server.ask(order(bench, "until killed", timeout_s=1.5))
    assert result.outcome == "hang"
    assert "1.5 s" in result.note
    assert bench.server.ask(order(bench, "next run")).outcome == "exact", "the server goes on"


def test_wrong_bits_are_noticed(bench):
    """A flipped bit that nobody looks for: so the trials with ``verify="full"`` are no vain ones."""
    row = bench.run(replace(next(f for f in FAULTS if f.name == "bit flip, verify=off"), num_trials=3))
    assert row.outcomes["wrong"] > 0
    assert not Row(replace(row.fault, may_be_wrong=False), outcomes=row.outcomes).is_good


def test_full_checks_find_every_flipped_bit(bench):
    row = bench.run(replace(next(f for f in FAULTS if f.name == "bit flip, verify=full"), num_trials=4))
    assert row.outcomes == Counter(raised=4)
    assert row.notes == Counter({"CorruptionError": 4})


def test_faults_below_us_are_really_injected(bench):
    row = bench.run(replace(next(f for f in FAULTS if f.name == "short writes and reads"), num_trials=2))
    assert row.injected > 0


def test_leftovers_are_named(tmp_path):
    (tmp_path / "spill").mkdir()
    assert leftovers(tmp_path) == []
    (tmp_path / "spill" / "file").touch()
    assert leftovers(tmp_path) == ["spill/file stays"]
