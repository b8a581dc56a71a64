"""What the compiler's CUDA graphs own stays. A CPU has none: the compiler's word is spoken by the test."""

import inspect
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.activations.graph_memory import GraphMemory
from tests.support.helpers import Setup, open_offloader

CUDA = torch.device("cuda", 1)


class Node:
    def __init__(self, *addresses):
        self.addresses = addresses
        self.num_asked = 0

    def path_live_weakrefs(self):
        self.num_asked += 1
        return iter([SimpleNamespace(data_ptr=lambda address=address: address) for address in self.addresses])


def trees(monkeypatch, node, *, index=1, modes=("FORWARD",)):
    numbered = {number: SimpleNamespace(name=name) for number, name in enumerate(modes)}
    manager = SimpleNamespace(current_node=node, id_to_mode=numbered)

    def get_manager(device_index, create_if_none_exists=True):
        assert not create_if_none_exists
        return manager if device_index == index else None

    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    return manager


def test_what_a_graph_has_made_is_known_by_address(monkeypatch):
    node = Node(64, 128)
    trees(monkeypatch, node)
    memory = GraphMemory(CUDA)
    assert [memory.holds(address) for address in (64, 96, 128)] == [True, False, True]
    assert node.num_asked == 1
    trees(monkeypatch, Node(96))
    assert [memory.holds(address) for address in (64, 96)] == [False, True]


def test_where_there_are_no_graphs(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    assert not GraphMemory(CUDA).holds(64)
    trees(monkeypatch, Node(64), index=0)
    assert not GraphMemory(CUDA).holds(64), "another device's"
    trees(monkeypatch, None)
    assert not GraphMemory(CUDA).holds(64), "none has run yet"


def test_another_word_of_the_compilers_keeps_everything_and_wants_no_hooks(monkeypatch):
    trees(monkeypatch, object())
    assert GraphMemory(CUDA).holds(64)
    monkeypatch.setattr(sys.modules["torch._inductor.cudagraph_trees"], "get_manager", lambda *_, **__: object())
    assert GraphMemory(CUDA).wants_no_hooks


def test_the_word_is_still_the_compilers():
    """Read, not imported: on a CPU the import does no harm, but takes seconds."""
    source = (Path(inspect.getfile(torch)).parent / "_inductor" / "cudagraph_trees.py").read_text()
    assert "def get_manager(\n    device_index: int, create_if_none_exists: bool = True" in source
    assert source.count("def path_live_weakrefs(self)") == 2
    assert "def current_node(self)" in source
    assert "def data_ptr(self) -> int:" in source
    assert "self.id_to_mode: dict[FunctionID, CompilationMode] = {}" in source
    assert "BACKWARD = auto()" in source


def test_it_is_kept_and_counted(tmp_path, monkeypatch):
    x = torch.rand(64, 64, requires_grad=True)
    with open_offloader(tmp_path, Setup(min_tensor_bytes=0)) as offloader:
        with offloader.saved_tensors():
            y = x * 1
            mine = y.untyped_storage().data_ptr()
            monkeypatch.setattr(offloader._opened().hooks.graph_memory, "holds", lambda address: address == mine)
            loss = y.sin().exp().sum()
        stats = offloader.stats
        assert stats.num_kept_foreign == 1
        assert stats.num_saved == 1
        loss.backward()


def test_graphs_that_train_want_no_hooks(monkeypatch):
    memory = GraphMemory(CUDA)
    assert not memory.wants_no_hooks
    trees(monkeypatch, Node(64))
    assert memory.holds(64)
    assert not memory.wants_no_hooks, "they do not train: what they give is kept"
    trees(monkeypatch, None, modes=("FORWARD", "BACKWARD"))
    assert memory.wants_no_hooks
    assert not GraphMemory(torch.device("cuda", 0)).wants_no_hooks, "another device's"
    assert not GraphMemory(torch.device("cpu")).wants_no_hooks


def test_a_node_of_graphs_is_not_held(monkeypatch):
    """It holds their memory, which goes with ``torch.compiler.reset()``."""
    node = Node(64)
    manager = trees(monkeypatch, node)
    memory, reference = GraphMemory(CUDA), weakref.ref(node)
    assert memory.holds(64)
    manager.current_node = None
    del node
    assert reference() is None
    assert not memory.holds(64)


_KINDS = (
    Setup(min_tensor_bytes=0),
    Setup(activations="auto", min_tensor_bytes=0, max_slowdown=50.0, settled=True),
    Setup(activations="auto", min_tensor_bytes=0, activation_budget=1 << 20, settled=True),
)


@pytest.mark.parametrize(("setup", "signature"), list(zip(_KINDS, (None, "batch", "batch"), strict=True)))
def test_passes_of_graphs_run_as_without_us(signature, setup, tmp_path, monkeypatch):
    """From the second one on. The first one has hooks, since nobody knows yet."""
    plain, mine = (torch.nn.Linear(64, 64) for _ in range(2))
    mine.load_state_dict(plain.state_dict())
    with open_offloader(tmp_path, setup) as offloader:
        monkeypatch.setattr(offloader._opened().hooks.graph_memory, "_device", CUDA)
        said = []
        for step in range(5):
            x = torch.rand(32, 64, generator=torch.Generator().manual_seed(step))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with offloader.saved_tensors(signature=signature):
                    loss = mine(x).sin().exp().square().sum()
            said += [str(warning.message) for warning in caught]
            loss.backward()
            offloader.end_backward()
            plain(x).sin().exp().square().sum().backward()
            assert torch.equal(mine.weight.grad, plain.weight.grad)
            if step == 0:
                num_saved = offloader.stats.num_saved
                assert num_saved > 0
                trees(monkeypatch, None, modes=("FORWARD", "BACKWARD"))
        assert offloader.stats.num_plain_passes == 4
        assert offloader.stats.num_saved == num_saved
        assert len(said) == 1
        assert 'mode="default"' in said[0]
        monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees")
        with offloader.saved_tensors(signature="another"):
            loss = mine(torch.rand(32, 64)).sin().exp().sum()
        loss.backward()
        offloader.end_backward()
        assert offloader.stats.num_saved > num_saved, "the graphs are gone"
