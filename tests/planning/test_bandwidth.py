"""The rate of a channel: falls at once, rises slowly, is not fooled by one sample."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ssd.planning.bandwidth import MIN_SAMPLE_BYTES, RateEstimate, leaves_band

MIB = 1 << 20
GB = 10**9

rates = st.floats(1e6, 1e11)


def fed(samples, *, probed=0.0):
    estimate = RateEstimate(probed)
    for rate in samples:
        estimate.sample(round(rate), 1.0)
    return estimate


@pytest.mark.parametrize("first", [[1e9, 9e9], [9e9, 1e9]])
def test_without_a_probe_one_burst_is_not_believed(first):
    assert fed(first).value == 1e9


@given(st.floats(1e9, 1e11), st.floats(0.01, 0.84))
def test_a_lasting_drop_is_noticed_within_two_samples(before, part):
    estimate = fed([before] * 5, probed=before)
    estimate.sample(round(before * part), 1.0)
    estimate.sample(round(before * part), 1.0)
    assert estimate.value == round(before * part)
    assert leaves_band(estimate.value, before)


@given(rates, rates)
def test_one_odd_sample_changes_nothing(rate, odd):
    rate = float(round(max(rate, MIN_SAMPLE_BYTES)))
    estimate = fed([rate] * 3)
    for sample in (max(odd, MIN_SAMPLE_BYTES), rate, rate):
        estimate.sample(round(sample), 1.0)
        assert estimate.value == rate


def test_a_transfer_across_a_border_changes_nothing():
    """Its seconds count in one step and its bytes in the next."""
    estimate = fed([1e9] * 3)
    for _ in range(20):
        estimate.sample(500_000_000, 1.0)
        estimate.sample(1_500_000_000, 1.0)
    assert estimate.value == 1e9


def test_it_rises_slowly_but_arrives():
    estimate = fed([1e9, 1e9, 3e9, 3e9])
    assert estimate.value == pytest.approx(1.4e9)
    for _ in range(20):
        before = estimate.value
        estimate.sample(3 * GB, 1.0)
        assert before < estimate.value < 3e9
    assert estimate.value == pytest.approx(3e9, rel=0.02)


@given(st.lists(rates, min_size=1, max_size=30), st.just(0.0) | rates)
def test_it_stays_among_what_was_seen(samples, probed):
    samples = [float(max(round(rate), MIN_SAMPLE_BYTES)) for rate in samples]
    seen = [*samples, probed] if probed else samples
    value = fed(samples, probed=probed).value
    assert min(seen) * (1 - 1e-9) <= value <= max(seen) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_noise_keeps_it_near_and_on_the_careful_side(seed):
    """Normal noise of 5 %: no plan may be thrown away for that."""
    rng = random.Random(seed)
    estimate = RateEstimate(1e9)
    values = []
    for _ in range(2_000):
        estimate.sample(round(1e9 * max(rng.gauss(1, 0.05), 0.5)), 1.0)
        values.append(estimate.value)
        assert not leaves_band(estimate.value, 1e9)
    assert 0.92e9 < sum(values) / len(values) < 1.0e9


def test_small_samples_are_pooled_until_they_say_something():
    estimate = RateEstimate(5e9)
    for _ in range(7):
        estimate.sample(MIB, 0.01)
    assert estimate.value == 5e9
    for _ in range(9):  # the first ends a pool, the other eight are the second one
        estimate.sample(MIB, 0.01)
    assert estimate.value == pytest.approx(100 * MIB)


def test_bytes_without_seconds_count_with_the_seconds_that_follow():
    estimate = RateEstimate()
    estimate.sample(64 * MIB, 0.0)
    assert estimate.value == 0
    estimate.sample(0, 0.5)
    assert estimate.value == 128 * MIB


def test_the_band():
    assert not leaves_band(1e9, 1e9)
    assert not leaves_band(1.149e9, 1e9)
    assert leaves_band(1.151e9, 1e9)
    assert not leaves_band(0.851e9, 1e9)
    assert leaves_band(0.849e9, 1e9)
