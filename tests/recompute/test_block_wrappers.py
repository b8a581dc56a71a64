"""Blocks that are stood in for: where recomputing is refused, and that nothing of ours stays."""

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.errors import ConfigError
from lightning_ssd.recompute.block_discovery import find_blocks
from lightning_ssd.recompute.blocks import Blocks
from tests.support.helpers import assert_identical
from tests.support.watched_blocks import Half, Watch, chain, nothing_of_ours

# -- where recomputing is refused ------------------------------------------------------------------------------------


class Edits(Half):
    def forward(self, x, **_):
        return self.linear(x.mul_(2)).tanh()


class Stateful:
    """An argument that a call may change."""


class StatefulCache(Stateful):
    pass


def test_what_cannot_be_recomputed_is_known_after_a_measured_pass():
    edits, edited, opaque, fine = Edits(), Half(), Half(), Half()
    x = torch.ones(2, 6)
    with Blocks({"edits": edits, "edited": edited, "opaque": opaque, "fine": fine}) as blocks:
        for wants_inputs, expected in ((False, []), (True, ["edits", "edited", "opaque"])):
            with saved_tensors_hooks(lambda t: t, lambda t: t), blocks.observe(Watch(wants_inputs=wants_inputs)):
                edits(x.clone())
                y = x.clone()
                z = edited(y)
                y.add_(1)
                z.sum().backward()
                opaque(x, extra=Stateful())
                fine(x, extra=[None, 1, 2.0, "a", torch.float32, torch.Size([2]), {"x": (x,)}, len, fine])
            assert list(blocks.refused) == expected
        assert "edited in place" in blocks.refused["edits"]
        assert "a Stateful, which it may change" in blocks.refused["opaque"]
        # A buffer for inputs is filled anew for each step; that is no edit.
        z = torch.ones(2, 6)
        for _ in range(2):
            with blocks.observe(Watch(wants_inputs=True)):
                fine(z)
            z.copy_(x)
        with blocks.observe(Watch(wants_inputs=True)):
            pass
        assert "fine" not in blocks.refused


def test_a_stateful_argument_runs_plainly_and_says_so_once():
    block = Half()
    with Blocks({"block": block}) as blocks, blocks.observe(Watch(recompute=True)):
        with pytest.warns(UserWarning, match=r"'block' \(Half\) is not recomputed: .* StatefulCache.*use_cache=False"):
            block(torch.ones(2, 6), extra=StatefulCache())
        block(torch.ones(2, 6), extra=Stateful())  # warnings are errors here
        plain = block(torch.ones(2, 6))
        assert "Stateful" in blocks.refused["block"]  # one call of the pass is enough
    with Blocks({"block": block}) as blocks:
        with blocks.observe(Watch(wants_inputs=True)):
            block(torch.ones(2, 6), extra=Stateful())
        with blocks.observe(Watch(recompute=True, wants_inputs=True)):
            assert torch.equal(block(torch.ones(2, 6)), plain)
        assert blocks.refused == {}


def test_edits_between_forward_and_backward_raise():
    """Of an input, by the block or its caller, and of what plain PyTorch does not save but a repetition needs."""
    with (
        Blocks({"block": (edits := Edits())}) as blocks,
        blocks.observe(Watch(recompute=True)),
        pytest.raises(ConfigError, match="Edits edits an input in place"),
    ):
        edits(torch.ones(2, 6))
    block, x = Half(), torch.ones(2, 6)
    with Blocks({"block": block}) as blocks:
        with blocks.observe(Watch(recompute=True)):
            losses = [block(given).sum() for given in (x, torch.ones(2, 6))]
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        with torch.no_grad():
            block.linear.bias.add_(1)
        with pytest.raises(
            RuntimeError, match=r"block 'block' \(Half\).*Linear.bias was modified by an inplace operation"
        ):
            losses[1].backward()


# -- a trial in a measured pass --------------------------------------------------------------------------------------

FACTORS = [2.0]
"""Out of reach of every block."""


class Scales(Half):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Tanh()
        self.error = None

    def forward(self, x, **_):
        if self.error is not None and torch._C._current_autograd_node() is not None:
            raise self.error
        return self.part(self.linear(x) * FACTORS[-1]).sin()


def measured_pass(blocks, model, *, before_backward=int):
    """Returns how often each block ran, gradients, and the number of trials that were told of."""
    watch, runs = Watch(wants_inputs=True), [0] * len(model)

    def count(part, args):
        runs[next(number for number, block in enumerate(model) if block.part is part)] += 1

    handles = [block.part.register_forward_pre_hook(count) for block in model]
    model.zero_grad()
    with saved_tensors_hooks(lambda t: t, lambda t: t), blocks.observe(watch):
        loss = model(torch.linspace(-1, 1, 12).view(2, 6)).sum()
    before_backward()
    loss.backward()
    for handle in handles:
        handle.remove()
    return runs, [parameter.grad for parameter in model.parameters()], watch.num_trials


def test_one_call_of_each_class_is_run_again_and_a_difference_keeps_the_class(caplog):
    model = torch.nn.Sequential(Scales(), Scales(), Scales())
    with Blocks({}) as none:
        expected = measured_pass(none, model)[1]
    found = {str(number): block for number, block in enumerate(model)}
    with Blocks(found) as blocks:
        assert_identical(measured_pass(blocks, model), ([2, 1, 1], expected, 1))
        assert_identical(measured_pass(blocks, model), ([1, 1, 1], expected, 0))
        assert blocks.refused == {}
    with Blocks(found) as blocks:
        model[0].error = MemoryError()  # which tells nothing
        assert_identical(measured_pass(blocks, model), ([1, 1, 1], expected, 1))
        model[0].error = None
        with caplog.at_level("INFO", logger="lightning_ssd"):
            seen = measured_pass(blocks, model, before_backward=lambda: FACTORS.append(3.0))
        assert "blocks of the class Scales are kept, since one was run again: the values of" in caplog.text
        FACTORS.pop()
        assert_identical(seen, ([2, 1, 1], expected, 1), "what was kept serves backward")
        assert list(blocks.refused) == ["0", "1", "2"]
        assert "is not put back, or does not repeat its bits" in blocks.refused["2"]
        is_told = pytest.warns(UserWarning, match="block '1' .* is not recomputed: the values of saved tensor")
        with is_told, blocks.observe(Watch(recompute=True)):
            model(torch.ones(2, 6)).sum().backward()


def test_a_trial_is_made_where_backward_comes():
    model = torch.nn.Sequential(Scales(), Scales())
    with Blocks({"0": model[0], "1": model[1]}) as blocks:
        with blocks.observe(Watch(wants_inputs=True)):
            model(torch.ones(2, 6))
        model[0].requires_grad_(False)  # so that it saves nothing
        assert measured_pass(blocks, model)[0] == [1, 2]


SHOWN = set()
"""Address and size of the memory of inputs, when a block runs again."""


class Triples(Half):
    """Registers hooks with its inputs."""

    def forward(self, *xs, **_):
        for x in xs:
            x.register_hook(lambda gradient: gradient * 3)
            x.retain_grad()
        if torch._C._current_autograd_node() is not None and type(xs[0]) is torch.Tensor:
            SHOWN.update((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in xs)
        return torch.stack([self.linear(x).tanh() for x in xs]).sum(0)


@pytest.mark.parametrize("observed", [{"recompute": True}, {"wants_inputs": True}], ids=str)
def test_hooks_of_inputs_that_wrap_others_are_there_once(observed):
    results = []
    for options in ({}, observed):
        torch.manual_seed(0)
        model, x = torch.nn.Sequential(Triples(), Triples()), torch.ones(2, 6)
        given = TwoTensor(x, x.clone()).requires_grad_()
        inner = given * 2
        with Blocks({"0": model[0], "1": model[1]}) as blocks, saved_tensors_hooks(lambda t: t, lambda t: t):
            with blocks.observe(Watch(**options)):
                loss = model(inner).sum()
            loss.backward()
            assert blocks.refused == {}
        results.append([given.grad.a, inner.grad.a, *(p.grad.a for p in model.parameters())])
    assert_identical(results[0], results[1])


def test_a_trial_copies_the_storage_of_its_inputs_once():
    block, whole = Triples(), torch.rand(4000, 6, requires_grad=True)
    SHOWN.clear()
    with Blocks({"0": block}) as blocks, saved_tensors_hooks(lambda t: t, lambda t: t):
        with blocks.observe(Watch(wants_inputs=True)):
            loss = block(*torch.split(whole[2000:2100], 2)).sum()
        loss.backward()
    ((address, nbytes),) = SHOWN
    assert address != whole.data_ptr()
    assert nbytes == whole.nbytes


# -- installing and removing -----------------------------------------------------------------------------------------


def test_nothing_of_the_model_looks_different():
    model = chain()
    before = [(name, type(module)) for name, module in model.named_modules()]
    state, signature = list(model.state_dict()), inspect.signature(model[0].forward)
    attributes = [dict(block.__dict__) for block in model]
    blocks = Blocks(find_blocks(model))
    assert isinstance(model[0].forward, MethodPatch)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert list(model.state_dict()) == state
    assert inspect.signature(model[0].forward) == signature
    assert model[0].forward.__name__ == "forward"
    assert model[0].forward.__func__ is Half.forward
    assert model[0].forward.__self__ is model[0]
    assert inspect.getdoc(model[0].forward.__wrapped__) == "Halves."
    assert not hasattr(model[0].forward, "nonsense")
    blocks.remove()
    blocks.remove()
    assert [dict(block.__dict__) for block in model] == attributes
    assert not any(block in blocks for block in model)


def test_a_forward_that_was_set_before_us_is_called_and_comes_back():
    block = Half()
    old = block.forward

    def replaced(x):
        return old(x) + 1

    block.forward = replaced
    x = torch.ones(2, 6)
    expected = block(x)
    with Blocks({"block": block}) as blocks, blocks.observe(Watch(recompute=True)):
        y = block(x)
        assert torch.equal(y, expected)
        y.sum().backward()
    assert block.forward is replaced


def test_a_forward_that_was_set_after_us_stays():
    block, watch = Half(), Watch()
    blocks = Blocks({"block": block})
    ours = block.forward
    x = torch.ones(2, 6)
    expected = ours(x) + 1
    theirs = lambda x: ours(x) + 1  # noqa: E731
    block.forward = theirs
    with blocks.observe(watch):
        block(x)
        assert watch.told == ["block", "left"]
        blocks.remove()
        assert block.forward is theirs
        assert torch.equal(block(x), expected)
    assert watch.told == ["block", "left"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_at_once_in_any_order(first):
    block = Half()
    x = torch.ones(2, 6)
    both = [Blocks({"block": block}), Blocks({"block": block})]
    watches = [Watch(recompute=True), Watch(recompute=True)]
    with both[0].observe(watches[0]), both[1].observe(watches[1]):
        block(x).sum().backward()
    # The outer one recomputes, and with it the inner one.
    assert [watch.told for watch in watches] == [["block", "left"]] * 2
    both[first].remove()
    watch = Watch()
    with both[1 - first].observe(watch):
        block(x)
    assert watch.told == ["block", "left"]
    assert "forward" not in vars(copy.deepcopy(block))
    both[1 - first].remove()
    nothing_of_ours(block)


class WatchOfAll(Watch):
    recomputes_all = True


def test_a_block_that_got_another_forward_is_told_of_once():
    """Unless that calls ours, or ours only has another stand-in in front of it. Warnings are errors here."""
    model, x = chain(3), torch.ones(2, 6)
    replaced, around, unused = model.children()
    with Blocks(find_blocks(model)) as blocks, Blocks({"unused": unused}):
        around.forward = lambda x, ours=around.forward: 2 * ours(x)
        for _ in range(2):
            with blocks.observe(WatchOfAll(recompute=True)):
                around(replaced(x)).sum().backward()
        replaced.forward = torch.tanh
        is_told = pytest.warns(UserWarning, match=r"1 of 3 blocks .*block '0': its forward was replaced")
        with is_told, blocks.observe(WatchOfAll(recompute=True)):
            around(replaced(x)).sum().backward()
        with blocks.observe(WatchOfAll(recompute=True)):
            around(replaced(x)).sum().backward()


def test_no_reference_cycle_keeps_a_model():
    model = chain()
    blocks = Blocks(find_blocks(model))
    with blocks.observe(Watch(recompute=True, wants_inputs=True)):
        model(torch.ones(2, 6)).sum().backward()
    gone = weakref.ref(model[0])
    forward = model[0].forward
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="block '0' is gone"):
        forward(torch.ones(2, 6))
    blocks.remove()


def test_the_class_may_change_later():
    """As with ``fully_shard``."""
    block = Half()
    x = torch.ones(2, 6)
    expected = block(x)
    with Blocks({"block": block, "in another place": block}) as blocks:
        assert [wrapper.name for wrapper in blocks._wrappers] == ["block"]
        block.__class__ = type("Sharded", (Half,), {"forward": lambda self, x: Half.forward(self, x) + 1})
        assert torch.equal(block(x), expected + 1)
