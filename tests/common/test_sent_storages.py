"""Memory that other processes have, too: by the cache of PyTorch's module that sends it, and by what sends it."""

from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
from torch import multiprocessing
from torch.multiprocessing import reductions

from lightning_ssd.common import sent_storages
from lightning_ssd.common.sent_storages import is_in_other_processes, noting_sent, sending_is_noted

ALLOCATION = b"the handle of an allocation"


class Storage:
    def __init__(self):
        self.device = torch.device("cuda", 0)
        self._memory = torch.zeros(1).untyped_storage()
        self._cdata = self._memory._cdata

    def is_shared(self):
        return True


def known(storage):
    return SimpleNamespace(cdata=storage._cdata)


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    cache = {}
    monkeypatch.setattr(reductions, "shared_cache", cache)
    monkeypatch.setattr(sent_storages._Noted, "has_sent", False)
    return cache


def test_memory_of_a_card_is_shared_only_if_it_was_sent(cache):
    """PyTorch says of each storage of a CUDA device that it is shared: taken at its word, nothing would ever leave."""
    storage = Storage()
    assert not is_in_other_processes(storage)
    cache[ALLOCATION, 512] = known(storage)  # received
    assert is_in_other_processes(storage)


def test_all_memory_of_a_card_counts_once_any_is_in_other_processes(cache):
    """PyTorch's cache has the last one of an allocation alone."""
    own = Storage()
    sending_is_noted()
    sends = noting_sent(lambda storage, *, answer: answer)
    assert not is_in_other_processes(own)
    assert sends(Storage(), answer=3) == 3
    assert is_in_other_processes(own)


def test_what_was_sent_before_is_told_by_the_cache(cache):
    received = Storage()
    cache[ALLOCATION, 512] = known(received)  # each has an entry of its own
    sending_is_noted()
    assert (is_in_other_processes(received), is_in_other_processes(Storage())) == (True, False)
    cache[ALLOCATION] = known(Storage())
    sending_is_noted()
    assert is_in_other_processes(Storage())


@pytest.mark.parametrize("strategy", sorted(multiprocessing.get_all_sharing_strategies()))
def test_memory_of_a_cpu_that_was_sent_tells_nothing_of_a_card(strategy, monkeypatch):
    """As batches of a loader's workers are; by files it has names."""
    monkeypatch.setattr(multiprocessing, "_sharing_strategy", strategy)
    tensor = torch.zeros(8)
    ForkingPickler.dumps(tensor)
    assert reductions.shared_cache
    sending_is_noted()
    assert not is_in_other_processes(Storage())


def test_the_cache_names_a_storage_by_its_address():
    tensor = torch.zeros(8)
    ForkingPickler.dumps(tensor)
    storage = tensor.untyped_storage()
    assert any(sent.cdata == storage._cdata for sent in reductions.shared_cache.values())
    assert is_in_other_processes(storage)
    assert not is_in_other_processes(torch.zeros(8).untyped_storage())
