"""What a ``Function`` was given dies when the ``Function`` lets go of it, unless it may become a leaf's gradient."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_ssd.common.tensors import StorageKey
from tests.support.late import SeveralStreams
from tests.support.opened import offloader_in


class _Stopped(SeveralStreams):
    """A device that computes nothing before it is let: whatever is saved stays, and is handed over as it is."""

    def __init__(self):
        super().__init__()
        self.may_go_on = threading.Event()

    def mark(self):
        return self.work(self.may_go_on.wait)


@pytest.fixture
def offloader(tmp_path):
    copies = _Stopped()
    settings = {"activations": "offload", "min_tensor_bytes": 1, "host_memory": 0}
    with offloader_in(tmp_path, **settings, _copies=copies) as opened:
        yield opened
        copies.may_go_on.set()
    copies.close()


class _Wide(torch.autograd.Function):
    """Saves a tensor that is wider than what it is given, as a compiled block does, and lets go of it."""

    keys: list[StorageKey] = []  # noqa: RUF012
    left: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        wide = x.repeat(1, 4).exp()
        _Wide.keys.append(StorageKey(wide.untyped_storage()))
        ctx.save_for_backward(wide)
        return wide[:, : x.shape[1]] + wide[:, -x.shape[1] :]

    @staticmethod
    def backward(ctx, gradient):
        (wide,) = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        gradient = (gradient.repeat(1, 4) * wide)[:, : gradient.shape[1]].clone()
        del wide
        _Wide.left.append(sum(key.alive() for key in _Wide.keys))
        return gradient


def _left(forward):
    _Wide.keys.clear()
    _Wide.left.clear()
    x = torch.rand(64, 32, requires_grad=True)
    with forward():
        loss = _Wide.apply(_Wide.apply(_Wide.apply(x * 1))).sum()
    loss.backward()
    return list(_Wide.left)


def test_what_a_function_was_given_dies_as_without_hooks(offloader):
    assert _left(nullcontext) == [2, 1, 0]
    assert _left(offloader.saved_tensors) == [2, 1, 0]


class _GivesSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(gradient)
        return x.sum()

    @staticmethod
    def backward(ctx, _):
        return (*ctx.saved_tensors, None)


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_when_the_backward_is_over(offloader, retain_graph, fails):
    """Also where nobody tells us, and the graph lives on."""
    given = torch.rand(64, 32)
    key = StorageKey(given.untyped_storage())
    x = torch.rand(64, 32, requires_grad=True)
    with offloader.saved_tensors():
        before = x * 1
        loss = _GivesSaved.apply(before, given)
    del given
    if fails:
        before.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        loss.backward(retain_graph=retain_graph)
    x.grad = None
    assert all(held() is None or not held().given for held in offloader._opened().hooks.handed_out.held.values())
    del loss, before
    assert not key.alive()


def test_the_end_of_one_backward_leaves_another_one_alone(offloader):
    """A thread ends its backward where one of another has got past all that it has saved, and not to its leaves."""
    leaf, batch = torch.rand(64, 32, requires_grad=True), torch.rand(64, 32)
    expected = batch.clone()
    with offloader.saved_tensors():
        between = leaf + 1
        loss = _GivesSaved.apply(between, batch)

    def other_ends(gradient):
        thread = threading.Thread(target=offloader.end_backward)
        thread.start()
        thread.join()

    between.grad_fn.register_prehook(lambda gradients: other_ends(gradients[0]))
    loss.backward()
    leaf.grad.zero_()
    assert torch.equal(batch, expected)


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("min_tensor_bytes", [1, 1 << 30])
def test_two_leaves_get_gradients_of_their_own_from_one_intermediate_result(activations, min_tensor_bytes, tmp_path):
    """Autograd makes a tensor of its own from what a hook returns for it, and takes that for a leaf's gradient."""
    first, second = (torch.zeros(4096, requires_grad=True) for _ in range(2))
    with offloader_in(tmp_path, activations=activations, min_tensor_bytes=min_tensor_bytes) as offloader:
        with offloader.saved_tensors():
            x = torch.arange(4096.0).requires_grad_() * 1
            loss = _GivesSaved.apply(first, x) + _GivesSaved.apply(second, x)
        loss.backward()
        offloader.end_backward()
    assert first.grad.data_ptr() not in (second.grad.data_ptr(), x.data_ptr())
    assert torch.equal(first.grad, torch.arange(4096.0))
    torch.nn.utils.clip_grad_norm_([first, second], 1.0)
    assert first.grad.norm() > 0.7


class _Times(torch.nn.Module):
    """Its weight's gradient is its input."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = torch.nn.Parameter(torch.zeros(64, 64)), torch.nn.Sequential(torch.nn.Linear(64, 64))

    def forward(self, x):
        return _GivesSaved.apply(self.weight, x) + self.inner(x).sin().sum()


@pytest.mark.parametrize("activations", ["offload", "keep", "auto", "recompute", "recompute_offload"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_batch_that_a_checkpoint_hands_on_is_no_gradient(activations, is_checkpointed, tmp_path):
    """A hook gives an object of its own over the batch, which nothing else refers to once it was handed on."""
    model = torch.nn.ModuleList([_Times(), _Times()])
    block = partial(checkpoint, model[0], use_reentrant=False) if is_checkpointed else model[0]
    batch = torch.randn(64, 64)
    before = batch.clone()
    settings = {"activations": activations, "min_tensor_bytes": 1, "max_slowdown": 1000.0}
    with offloader_in(tmp_path, **settings) as offloader:
        offloader.register_module(model)
        for _ in range(3):
            with offloader.saved_tensors():
                loss = block(batch)
            offloader.flush()
            loss.backward()
            offloader.end_backward()
            assert torch.equal(model[0].weight.grad, before)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            model.zero_grad(set_to_none=False)
    assert torch.equal(batch, before)


class _Multiplies(torch.autograd.Function):
    """Adds up what it has saved, and tells its strides."""

    strides = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        _Multiplies.strides = x.stride()
        return gradient * weight.sum(), (x.sum() * gradient.sum()).expand_as(weight)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.chunk(3, 1)[1],
        lambda x: x[:, ::3],
        lambda x: x[:, :1].expand(64, 64),
        lambda x: x.to_sparse().to_dense()[:, :64],
    ],
    ids=["chunk", "every third", "expand", "part"],
)
@pytest.mark.parametrize("activations", ["keep", "offload", "auto"])
def test_a_copy_has_the_strides_of_what_was_saved(view, activations, tmp_path):
    """They decide in which order a kernel adds up, and so on the last bits."""

    def gradients(context):
        torch.manual_seed(0)
        layer, weight = torch.nn.Linear(64, 192), torch.nn.Parameter(torch.randn(64, 64))
        with context:
            loss = _Multiplies.apply(view(layer(torch.randn(64, 64))), weight).square().mean()
        loss.backward()
        return weight.grad, layer.weight.grad, _Multiplies.strides

    expected = gradients(nullcontext())
    with offloader_in(tmp_path, activations=activations, min_tensor_bytes=1) as offloader:
        found = gradients(offloader.saved_tensors())
    assert all(map(torch.equal, found[:2], expected[:2]))
    assert found[2] == expected[2]
