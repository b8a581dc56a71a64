"""What the compiler's CUDA graphs own stays. A CPU has none: the compiler's word is spoken by the test."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ssd.activations.graph_memory import GraphMemory
from tests.support.helpers import Setup, open_offloader

CUDA = torch.device("cuda", 1)


class Node:
    def __init__(self, *addresses: int) -> None:
        self.addresses = addresses
        self.num_asked = 0

    def path_live_weakrefs(self) -> Iterator[Any]:
        self.num_asked += 1
        return iter([SimpleNamespace(data_ptr=lambda address=address: address) for address in self.addresses])


def trees(monkeypatch: pytest.MonkeyPatch, node: object, *, index: int = 1) -> None:
    manager = SimpleNamespace(current_node=node)

    def get_manager(device_index: int, create_if_none_exists: bool = True) -> Any:
        assert not create_if_none_exists
        return manager if device_index == index else None

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))


def test_what_a_graph_has_made_is_known_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(64, 128)
    trees(monkeypatch, node)
    memory = GraphMemory(CUDA)
    assert [memory.holds(address) for address in (64, 96, 128)] == [True, False, True]
    assert node.num_asked == 1
    trees(monkeypatch, Node(96))
    assert [memory.holds(address) for address in (64, 96)] == [False, True]


def test_where_there_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not GraphMemory(CUDA).holds(64)
    trees(monkeypatch, Node(64), index=0)
    assert not GraphMemory(CUDA).holds(64), "another device's"
    trees(monkeypatch, None)
    assert not GraphMemory(CUDA).holds(64), "none has run yet"


def test_another_word_of_the_compilers_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    trees(monkeypatch, object())
    assert GraphMemory(CUDA).holds(64)


def test_the_word_is_still_the_compilers() -> None:
    """Read, not imported: on a CPU the import does no harm, but takes seconds."""
    source = (Path(inspect.getfile(torch)).parent / "_inductor" / "cudagraph_trees.py").read_text()
    assert "def get_manager(\n    device_index: int, create_if_none_exists: bool = True" in source
    assert source.count("def path_live_weakrefs(self)") == 2
    assert "def current_node(self)" in source
    assert "def data_ptr(self) -> int:" in source


def test_it_is_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(64, 64, requires_grad=True)
    with open_offloader(tmp_path, Setup(min_tensor_bytes=0)) as offloader:
        with offloader.saved_tensors():
            y = x * 1
            mine = y.untyped_storage().data_ptr()
            monkeypatch.setattr(offloader._opened()._graph_memory, "holds", lambda address: address == mine)
            loss = y.sin().exp().sum()
        stats = offloader.stats
        assert stats.num_kept_foreign == 1
        assert stats.num_saved == 1
        loss.backward()
