"""Rates: from the probe while nothing is known, then from what the tiers have done."""

import errno
import re
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.planning.plan import TierRates
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.tiers import bandwidth_meter
from lightning_ssd.tiers.bandwidth_meter import BandwidthMeter, measure_copies, measure_mapping
from lightning_ssd.tiers.base import Progress
from tests.support.stopped_clocks import stopped_clock

MIB = 1 << 20


class FakeTier:
    """Counters that a test moves on."""

    capacity_bytes = 77

    def __init__(self):
        self.done = Progress(0, 0.0, 0, 0.0)
        self.num_asked = 0

    def progress(self):
        self.num_asked += 1
        return self.done

    def move(self, *, written=0, write_s=0.0, read=0, read_s=0.0):
        self.done = Progress(*map(sum, zip(self.done, (written, write_s, read, read_s), strict=True)))


@pytest.fixture
def wait(monkeypatch):
    return stopped_clock(monkeypatch, bandwidth_meter)


class Probe:
    def __init__(self, write=1e9, read=2e9):
        self.num_calls = 0
        self._rates = Rates(write, read)

    def __call__(self):
        self.num_calls += 1
        return self._rates


def ssd_rates(meter):
    ssd = meter.machine().ssd
    assert ssd.capacity_bytes is None
    return ssd.write_bytes_per_s, ssd.read_bytes_per_s


def test_what_the_run_has_told_needs_no_probe(wait):
    tier, probe = FakeTier(), Probe()
    tier.move(written=100 * MIB, write_s=1.0, read=50 * MIB, read_s=0.25)
    assert ssd_rates(BandwidthMeter(tier, probe)) == (100 * MIB, 200 * MIB)
    assert probe.num_calls == 0


def test_the_probe_fills_in_the_direction_that_is_unknown(wait):
    tier, probe = FakeTier(), Probe()
    tier.move(written=100 * MIB, write_s=1.0)
    meter = BandwidthMeter(tier, probe, cost_s_per_byte=0.25)
    assert probe.num_calls == 0, "not before a plan needs it"
    for _ in range(3):
        assert ssd_rates(meter) == (100 * MIB, 2e9)
        wait(1)
    assert probe.num_calls == 1
    assert meter.machine().cost_s_per_byte == 0.25
    silent = Probe(0.0, 0.0)
    meter = BandwidthMeter(FakeTier(), silent)
    assert ssd_rates(meter) == ssd_rates(meter) == (0, 0)
    assert silent.num_calls == 1, "nor again where it tells nothing"


def test_questions_in_quick_succession_are_one_sample(wait):
    tier = FakeTier()
    meter = BandwidthMeter(tier, Probe())
    ssd_rates(meter)
    asked = tier.num_asked
    for _ in range(4):
        wait(0.01)
        tier.move(written=20 * MIB, write_s=1.0)
        assert ssd_rates(meter) == (1e9, 2e9)
    assert tier.num_asked == asked
    wait(0.02)
    assert ssd_rates(meter) == (1e9, 2e9), "one slow sample may be a hiccup"
    assert tier.num_asked == asked + 1


def test_the_host_tier_has_a_probe_and_a_capacity_of_its_own(wait):
    host, probe, probe_host = FakeTier(), Probe(), Probe(5e9, 6e9)
    meter = BandwidthMeter(FakeTier(), probe, host=host, probe_host=probe_host)
    assert meter.machine().host == TierRates(write_bytes_per_s=5e9, read_bytes_per_s=6e9, capacity_bytes=77)
    host.capacity_bytes = 55
    assert meter.machine().host.capacity_bytes == 55, "the system gave no more"
    assert (probe.num_calls, probe_host.num_calls) == (1, 1)
    assert BandwidthMeter(FakeTier(), probe).machine().host is None


def test_mapping_is_measured():
    """From a page each tenth of a microsecond to one in a millisecond."""
    assert 1e-7 < measure_mapping() * 4096 < 1e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_are_measured(device):
    rates = measure_copies(torch.device(device), **({"nbytes": 8 * MIB} if device == "cpu" else {}))
    assert 1e7 < rates.write_per_s < 1e13
    assert 1e7 < rates.read_per_s < 1e13


def test_the_first_copy_is_not_part_of_the_rate(monkeypatch):
    """It sets things up, and on a device it waits for all the work that was queued before."""
    ticks = iter([0.0, 10.0, 10.0, 10.5, 11.0, 11.25])
    monkeypatch.setattr(bandwidth_meter, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert measure_copies(torch.device("cpu"), nbytes=1000) == Rates(2000.0, 4000.0)


@pytest.mark.parametrize("expected", [None, Rates(5.0, 5.0)], ids=["nothing told", "told"])
def test_a_probe_that_fails_costs_no_step_and_a_tier_that_works_after_all_is_believed(expected, wait):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    tier, options = FakeTier(), {} if expected is None else {"expected": expected}
    meter = BandwidthMeter(tier, full, place="the directory /spill", **options)
    reason = "the directory /spill could not be measured (No space left on device)"
    with pytest.warns(UserWarning, match=rf"^{re.escape(reason)}; nothing will be moved there$"):
        machine = meter.machine()
    assert machine.ssd.unusable == reason
    assert machine.ssd == TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0)
    assert meter.machine() == machine
    wait(1)
    tier.move(written=100 * MIB, write_s=1.0, read=50 * MIB, read_s=0.25)
    assert meter.machine().ssd.unusable is None


# -- what the user has told of the drives -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probed", "expected", "begun"),
    [(2.0, 0.0, 2.0), (2.0, 5.0, 2.0), (7.0, 5.0, 5.0)],
    ids=["nothing told", "slow drives", "the cache of a drive"],
)
def test_the_lower_of_two_upper_bounds_counts(probed, expected, begun):
    tier = FakeTier()
    meter = BandwidthMeter(tier, lambda: Rates(probed, 2 * probed), expected=Rates(expected, 2 * expected))
    assert meter.machine().ssd == TierRates(write_bytes_per_s=begun, read_bytes_per_s=2 * begun)


def test_without_a_probe_the_run_begins_with_what_was_told_and_overrules_it(wait):
    tier = FakeTier()
    meter = BandwidthMeter(tier, expected=Rates(64.0 * MIB, 64.0 * MIB))
    assert meter.machine().ssd == TierRates(write_bytes_per_s=64.0 * MIB, read_bytes_per_s=64.0 * MIB)
    for _ in range(2):
        tier.move(written=16 * MIB, write_s=1.0)
        wait(1.0)
        rates = meter.machine().ssd
    assert rates == TierRates(write_bytes_per_s=16.0 * MIB, read_bytes_per_s=64.0 * MIB)
