"""A large storage that stays for certain: counted once, freed with its graph, guarded against edits, and cheap."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ssd import Offloader
from lightning_ssd.activations.kept_storage import KeptStorage, Share
from lightning_ssd.activations.saved_pass import SavedPass
from tests.support.helpers import KEEP, meaning_of, open_offloader
from tests.support.python_calls import python_calls

SIDE = 128
NBYTES = SIDE * SIDE * 4


@pytest.fixture
def offloader(tmp_path: Path) -> Any:
    with open_offloader(tmp_path, KEEP) as opened:
        yield opened


def leaf() -> Tensor:
    return torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).requires_grad_()


def packed(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what autograd is given from now on, in order."""
    given: list[Any] = []
    cache = offloader._cache
    hooks_of = cache.hooks_of

    def noting(current: SavedPass) -> Any:
        pack, unpack = hooks_of(current)

        def note(tensor: Tensor) -> Any:
            given.append(pack(tensor))
            return given[-1]

        return note, unpack

    monkeypatch.setattr(cache, "hooks_of", noting)
    return given


def test_a_storage_counts_once_until_its_graph_dies(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    given = packed(offloader, monkeypatch)
    with offloader.saved_tensors():
        y = leaf() * 1
        loss = (y.sin() + y.cos() + y.view(-1).exp().view(SIDE, SIDE)).sum()
    assert {type(one) for one in given} == {tuple}
    shared = [one[-1].record for one in given if isinstance(one[-1], Share) and one[0].shape == (SIDE, SIDE)]
    assert len({id(record) for record in shared[:2]}) == 1, "two nodes save y"
    before = offloader.stats
    assert before.num_saved == 2, "y and the exponential"
    assert before.resident_peak_bytes == before.saved_peak_bytes == before.bytes_kept == 2 * NBYTES
    given.clear()
    shared.clear()
    loss.backward()
    offloader.end_backward()
    del loss, y
    gc.collect()
    offloader.reset_peaks()
    assert offloader.stats.resident_peak_bytes == 0


@pytest.mark.parametrize("edit", ["tensor", "view", "detached"])
def test_an_edit_raises_what_plain_pytorch_raises(edit: str, offloader: Offloader) -> None:
    def run() -> Tensor:
        y = leaf() * 1
        loss = y.sin().sum()
        with torch.no_grad():
            {"tensor": y, "view": y[0], "detached": y.detach()}[edit].add_(1)
        return loss

    with pytest.raises(RuntimeError) as plain:
        run().backward()
    with offloader.saved_tensors():
        loss = run()
    with pytest.raises(RuntimeError) as ours:
        loss.backward()
    assert meaning_of(str(ours.value)) == meaning_of(str(plain.value))


def test_another_version_of_the_same_storage_is_a_storage_of_its_own(offloader: Offloader) -> None:
    """A plan counts storages in the order in which they are saved: the count must not depend on what is moved."""
    with offloader.saved_tensors():
        y = leaf() * 1
        first = torch.exp(y).sum()  # saves its output
        kept = y.sin()
        y.add_(1)
        second = y.cos().sum()
    assert offloader.stats.num_saved == 3
    (first + second).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_a_storage_that_became_smaller_is_an_error(offloader: Offloader) -> None:
    with offloader.saved_tensors():
        y = leaf() * 1
        loss = y.sin().sum()
    y.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match="65,536 bytes of memory and has 16 now"):
        loss.backward()


def test_a_tensor_that_got_smaller_memory_of_its_own_is_no_error(offloader: Offloader) -> None:
    """Autograd holds a leaf itself; of the storage that it showed a part of when it was saved, nobody asks."""
    data, weight = torch.ones(2 * SIDE, SIDE), leaf()
    with offloader.saved_tensors():
        batch = data[:SIDE]
        loss = (batch * weight).sum()
        batch.data = batch.clone()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(SIDE, SIDE))


def test_it_costs_few_python_calls_and_no_probe(offloader: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full record took 79 Python calls and 4 locks, most of them for a rebuild that never comes."""
    given = packed(offloader, monkeypatch)
    length = 20
    with offloader.saved_tensors():
        y = (leaf() * 1).sin()
        given.clear()
        with python_calls() as packing:
            for _ in range(length):
                y = y.sin()
    assert all(isinstance(one[-1].record, KeptStorage) for one in given)
    with python_calls() as calls:
        y.backward(torch.ones_like(y))
    assert len(packing) <= 29 * length, packing
    assert len(calls) <= 18 * (length + 2), calls
    assert not any("VersionProbe" in name or "TensorSpec" in name for name in calls)
