"""Copies of models whose blocks are stood in for: nothing of ours travels along."""

import contextlib
import copy
import functools
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.recompute.blocks import Blocks
from tests.support.watched_blocks import LAYER, Half, Watch, nothing_of_ours


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# Classes that a pickle finds again are those of an imported module.
def transformer():
    torch.manual_seed(2)
    return nn.TransformerEncoder(LAYER(dropout=0.0), 2, enable_nested_tensor=False)


COPIES = pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch])


@COPIES
def test_a_copy_runs_with_its_own_weights(duplicate):
    model = transformer()
    x = torch.ones(2, 3, 8)
    with Blocks(find_blocks(model)) as blocks:
        assert [wrapper.name for wrapper in blocks._wrappers] == ["layers.0", "layers.1"]
        before = model(x)
        watch = Watch(recompute=True)
        with blocks.observe(watch):
            copied = duplicate(model)
            assert torch.equal(copied(x), before)
            with torch.no_grad():
                for parameter in copied.get_submodule("layers").parameters():
                    parameter.mul_(2)
            changed = copied(x)
            assert watch.told == []  # the copy is nobody's block
        assert not torch.equal(changed, before)
        assert torch.equal(model(x), before)
        nothing_of_ours(copied)
    assert torch.equal(copied(x), changed)
    assert list(copied.state_dict()) == list(model.state_dict())
    again = Watch()
    with Blocks(find_blocks(copied)) as blocks, blocks.observe(again):
        assert torch.equal(copied(x), changed)
    assert len(again.told) == 4
    nothing_of_ours(model)
    nothing_of_ours(copied)
    third = duplicate(copied)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(third(x), changed)


class Absent(Half):
    """What is not for copies is left out by a class itself, as DistributedDataParallel does and LightningModule."""

    def __init__(self):
        super().__init__()
        self.handle = threading.Lock()

    def __getstate__(self):
        return {**self.__dict__, "handle": None}


def test_a_class_that_says_what_its_copies_are_is_asked():
    block = Absent()
    before = set(vars(block))
    x = torch.ones(2, 6)
    both = Blocks({"block": block}), Blocks({"block": block})
    for blocks in both:
        copied = copy.deepcopy(block)
        assert copied.handle is None
        assert set(vars(copied)) == before
        assert torch.equal(copied(x), block(x))
        blocks.remove()
    assert set(vars(block)) == before


class ByItself(Half):
    """A class that copies its ``__dict__`` by itself, as parametrized modules do."""

    def __deepcopy__(self, memo):
        memo[id(self)] = copied = self.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


def test_a_class_that_copies_by_itself_gets_copies_that_run_without_us():
    block = ByItself()
    x = torch.ones(2, 6)
    with Blocks({"block": block}) as blocks:
        copied = copy.deepcopy(block)
        with torch.no_grad():
            copied.linear.weight.zero_()
        third = copy.deepcopy(copied)
        watch = Watch()
        with blocks.observe(watch):
            assert torch.equal(copied(x), third(x))
        assert watch.told == []
        assert not any(isinstance(value, MethodPatch) for value in vars(copied).values())
        assert {id(copied.forward.__self__), id(third.forward.__self__)} == {id(copied), id(third)}


def test_a_copy_keeps_a_forward_that_was_set_before_us():
    block = transformer().get_submodule("layers.0")
    with Blocks({"block": block}):
        shallow = copy.copy(block)
        assert "forward" not in vars(shallow)
        assert shallow.forward.__self__ is shallow
    block.forward = torch.sin
    with Blocks({"block": block}), Blocks({"block": block}):
        for copied in (copy.copy(block), copy.deepcopy(block), by_pickle(block), by_torch(block)):
            assert vars(copied)["forward"] is torch.sin
            assert "__getstate__" not in vars(copied)
    assert vars(block)["forward"] is torch.sin
    assert "__getstate__" not in vars(block)


def _doubled(block, x):
    return 2 * block.own(x)


def _wrapped_as_accelerate_does(block):
    block.own = block.forward
    block.forward = functools.update_wrapper(functools.partial(_doubled, block), block.own)


def _called_instead(block):
    block.forward = block.linear.forward


@COPIES
@pytest.mark.parametrize("keep", [_wrapped_as_accelerate_does, _called_instead])
def test_what_somebody_keeps_of_ours_calls_the_copy(keep, duplicate):
    def results(blocks):
        torch.manual_seed(4)
        block, x = Half(), torch.ones(2, 6)
        with blocks({"block": block, "linear": block.linear}):
            keep(block)
            copied = duplicate(block)
            assert not any(isinstance(value, MethodPatch) for value in vars(copied).values())
            with torch.no_grad():
                block.linear.weight.zero_()
            return [getattr(copied, name)(x) for name in ("forward", "own") if hasattr(copied, name)]

    ours, plain = results(Blocks), results(lambda _: contextlib.nullcontext())
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_a_saved_model_names_nothing_of_ours(tmp_path):
    """It loads where we are not installed."""
    model = transformer()
    path = tmp_path / "model.pt"
    with Blocks(find_blocks(model)):
        torch.save(model, path)
    assert b"lightning_ssd" not in path.read_bytes()
