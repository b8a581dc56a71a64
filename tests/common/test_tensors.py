"""What is asked of storages."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from lightning_ssd.common.tensors import is_in_other_processes


def test_memory_of_a_card_is_shared_only_if_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch says of each storage of a CUDA device that it is shared: taken at its word, nothing would ever leave."""
    storage: Any = SimpleNamespace(device=torch.device("cuda", 0), _cdata=1234, is_shared=lambda: True)
    monkeypatch.setattr(reductions, "shared_cache", {})
    assert not is_in_other_processes(storage)
    monkeypatch.setattr(reductions, "shared_cache", {"handle": SimpleNamespace(cdata=1234)})
    assert is_in_other_processes(storage)


def test_the_cache_names_a_storage_by_its_address() -> None:
    tensor = torch.zeros(8)
    ForkingPickler.dumps(tensor)
    storage = tensor.untyped_storage()
    assert any(sent.cdata == storage._cdata for sent in reductions.shared_cache.values())
    assert is_in_other_processes(storage)
    assert not is_in_other_processes(torch.zeros(8).untyped_storage())
