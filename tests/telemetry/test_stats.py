"""Counters go on; what was read of them stays."""

import copy
import pickle

from lightning_ssd.telemetry.stats import OffloadStats


def test_a_snapshot_stays_as_it_is_while_counting_goes_on():
    counters = OffloadStats(bytes_saved=2)
    before = counters.snapshot()
    counters.bytes_saved += 3
    assert (before.bytes_saved, counters.snapshot().bytes_saved) == (2, 5)
    assert before == OffloadStats(bytes_saved=2)
    assert before + counters.snapshot() == OffloadStats(bytes_saved=7)
    assert pickle.loads(pickle.dumps(before)) == copy.deepcopy(before) == before
