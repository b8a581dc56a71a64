"""Recomputed blocks, bit for bit: losses, gradients and weights are those of the same training kept."""

import functools
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd.errors import RecomputeError
from lightning_ssd.recompute.blocks import Blocks
from lightning_ssd.recompute.fingerprint import Fingerprint
from tests.parity import models
from tests.parity.models import TRAININGS, Perceptrons, floats, inputs, mean_square
from tests.parity.recomputing import EVERY, NONE, SECOND, Recomputing, assert_recompute_parity
from tests.support.helpers import (
    DRAINED,
    EAGER,
    Session,
    Setup,
    Training,
    assert_identical,
    assert_released,
    open_offloader,
    outcome,
)
from tests.support.opened import offloader_in


@pytest.mark.parametrize("name", ["dropout", "autocast", "accumulation", "frozen-blocks", "convolutions-channels-last"])
def test_training(name, tmp_path):
    """Some blocks or all, with what they are given on the drive. ``test_trainings`` has more models."""
    training = TRAININGS[name]()
    expected = outcome(training, Session())
    saved = {}
    for chooses, setup in ((NONE, DRAINED), (SECOND, EAGER), (EVERY, DRAINED)):
        with open_offloader(tmp_path, setup) as offloader:
            session = Recomputing(chooses, wants_inputs=chooses is NONE, offloader=offloader, drained=setup.drained)
            assert_identical(outcome(training, session), expected)
            assert_released(offloader)
            assert bool(session.repeated) == bool(session.asked) == (chooses is not NONE)
            assert bool(session.nbytes) == (chooses is NONE)
            saved[chooses] = offloader.stats.bytes_saved
            assert not setup.drained or offloader.stats.bytes_read > 0
    assert 0 < saved[EVERY] < saved[SECOND] < saved[NONE]


def forgets_random_numbers(function, *args, **settings):
    return checkpoint(function, *args, **{**settings, "preserve_rng_state": False})


@pytest.mark.parametrize(
    ("name", "what", "mutant"),
    [
        ("dropout", "checkpoint", forgets_random_numbers),
        ("convolutions-channels-last", "CallState.as_before", lambda state, run, *args: run(*args)),
    ],
)
def test_the_parity_check_can_fail(name, what, mutant, monkeypatch):
    monkeypatch.setattr(f"lightning_ssd.recompute.checkpointed_call.{what}", mutant)
    with pytest.raises(AssertionError, match="RecomputeError"):
        assert_recompute_parity(TRAININGS[name]())
    monkeypatch.setattr(Fingerprint, "difference", lambda one, other: None)
    with pytest.raises(AssertionError, match="the bits differ"):
        assert_recompute_parity(TRAININGS[name]())


def test_only_the_inputs_are_saved():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, scale, *, mask, more):
            return (self.linear(x).exp() * mask * scale[0]).sin() + more["bias"]

    block = Block()
    x, scale, mask, bias = (torch.rand(5, 8) for _ in range(4))
    packed = []

    def pack(tensor):
        if tensor.numel():  # older versions save an empty one of their own
            packed.append(tensor)
        return tensor

    session = Recomputing(EVERY)
    session.blocks.append(Blocks({"block": block}))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), session.saved():
        y = block(x, (scale, None), mask=mask, more={"bias": [bias, bias][0], "again": x})
    assert {tensor.data_ptr() for tensor in packed} == {tensor.data_ptr() for tensor in (x, scale, mask, bias)}
    assert len(packed) == 4
    y.sum().backward()
    assert len(packed) == 4
    assert block.linear.weight.grad is not None


def test_the_graph_holds_what_was_packed_and_nothing_else():
    block = models.Residual(4)
    hidden = floats(0, 2, 4, 9, 9).requires_grad_() * 1
    expected = torch.autograd.grad(block(hidden).square().sum(), block.parameters())
    copy = hidden.detach().clone()
    session = Recomputing(EVERY)
    session.blocks.append(Blocks({"block": block}))
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t.shape, lambda shape: copy if len(shape) else copy[:0]),
        session.saved(),
    ):
        y = block(hidden)
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None
    assert_identical(torch.autograd.grad(y.square().sum(), block.parameters()), expected)


# -- arguments and results -------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A block with arguments and results of many kinds, one of which it fills."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(40, 4, batch_first=True, dropout=0.2)
        self.norm = nn.LayerNorm(40)

    def forward(self, query, key, value, *, states, seen, flags):
        query = query[0] if isinstance(query, tuple) else query
        seen.append(query.detach().sum())
        y, weights = self.attention(query, key, value, need_weights=flags["weights"], attn_mask=states[0])
        return (self.norm(y),), {"weights": weights, "none": None, "query": query}


@pytest.mark.parametrize("weights", [True, False])
def test_arguments_and_results_of_many_kinds(weights):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Mixing(), Mixing(), Mixing()])
            self.seen = []

        def forward(self, x):
            self.seen = []
            mask = torch.zeros(17, 17)
            mask[:, 12:] = -1
            for block in self.blocks:
                (y,), rest = block(
                    (x,) if x.sum() > 0 else x, x, x, states=[mask, None], seen=self.seen, flags={"weights": weights}
                )
                assert rest["none"] is None
                x = x + y + 0.1 * rest["query"]
                if rest["weights"] is not None:
                    x = x + rest["weights"].mean()
            assert len(self.seen) == 3
            return x

    made = []

    def program(session):
        training = Training(lambda: made.append(Net()) or made[-1], inputs, mean_square)
        result = training(session)
        return result, made[-1].seen

    # Attention of one tensor with itself takes another path than of three: they must not become three.
    assert_recompute_parity(program)


def test_no_input_needs_a_gradient_and_no_tensor_at_all():
    class Source(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2))

        def forward(self, length):
            return self.inner(torch.rand(length, 40)).tanh()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.sources = nn.ModuleList([Source(), Source()])

        def forward(self, x):
            return sum((source(x.shape[1]) for source in self.sources), x)

    assert_recompute_parity(Training(Net, inputs, mean_square))


class Loop(nn.Module):
    """One block, called several times and standing in two places."""

    def __init__(self, block):
        super().__init__()
        self.first = nn.ModuleList([block, nn.Sequential(nn.Linear(40, 40), nn.GELU())])
        self.second = nn.ModuleList([block, block])

    def forward(self, x):
        for block in (*self.first, *self.second, self.first[0]):
            x = x + block(x)
        return x


@pytest.mark.parametrize("norm", [nn.LayerNorm, functools.partial(nn.BatchNorm1d, momentum=0.3)])
def test_a_block_called_several_times(norm):
    def make():
        return Loop(nn.Sequential(norm(40), nn.Linear(40, 40), nn.Dropout(0.2), nn.Tanh()))

    assert_recompute_parity(Training(make, lambda step: {"x": floats(step, 30, 40)}, mean_square))


@pytest.mark.parametrize("call", [2, 3], ids=["forward", "repetition"])
def test_a_call_that_fails_leaves_nothing(call, tmp_path):
    """Neither what has been saved up to there nor the graph that it belongs to."""
    model, num_calls = models.Perceptrons(num_blocks=3), [0]

    def fail(*_):
        num_calls[0] += 1
        if num_calls[0] == call:
            raise ZeroDivisionError

    model.blocks[1][3].register_forward_hook(fail)
    model.blocks[2][3].register_forward_hook(fail)
    with open_offloader(tmp_path, Setup(activations="recompute")) as offloader:
        offloader.register_module(model)
        inside = floats(1, 4, 40).requires_grad_()
        known = weakref.ref(inside)
        with pytest.raises((ZeroDivisionError, RecomputeError)), offloader.saved_tensors():
            model(inside).sum().backward()
        offloader.abort()
        del inside
        assert_released(offloader)
        assert known() is None


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "alternate"])
def test_checkpoints_of_the_model(mode):
    training = models.checkpointed(mode)
    expected = outcome(training, Session())
    for wants_inputs in (False, True):
        session = Recomputing(EVERY, wants_inputs=wants_inputs)
        assert_identical(outcome(training, session), expected)
        refused = session.blocks[0].refused
        assert len(refused) == {"reentrant": 0, "non-reentrant": 4, "alternate": 2}[mode]
        assert all("checkpoints it by itself" in reason for reason in refused.values())


def test_a_checkpoint_inside_of_a_block():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.2), nn.GELU())
            self.last = nn.Linear(40, 40)

        def forward(self, x):
            y = checkpoint(self.inner, x, use_reentrant=False)
            return self.last(y).tanh()

    training = Training(lambda: nn.Sequential(Inner(), Inner(), Inner()), inputs, mean_square)
    expected = outcome(training, Session())
    repeated = []
    for chooses in (EVERY, SECOND, NONE):
        session = Recomputing(chooses)
        assert_identical(outcome(training, session), expected)
        repeated.append(len(session.repeated))
    assert repeated[0] > repeated[1] > repeated[2] > 0


def test_hooks_of_a_block_run_once():
    def program(session):
        model = Perceptrons(dropout=0.2)
        session.register(model)
        seen = []
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda m, a, n=number: seen.append(("pre", n)))
            block.register_forward_hook(lambda m, a, y, n=number: seen.append(("post", n, y.detach().sum())))
            block.register_full_backward_pre_hook(lambda m, g, n=number: seen.append(("back-pre", n)))
            block.register_full_backward_hook(
                lambda m, i, o, n=number: seen.append(("back", n, i[0].sum(), o[0].sum()))
            )
        x = floats(0, 6, 17, 40).requires_grad_()
        with session.saved():
            loss = mean_square(model, {"x": x})
        loss.backward()
        assert len(seen) == 16
        return seen, x.grad

    assert_recompute_parity(program)


def test_transforms_run_plainly():
    def program(session):
        model = Perceptrons(num_blocks=2)
        session.register(model)
        parameters = dict(model.named_parameters())
        x = floats(0, 6, 40)

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        with nullcontext() if session.offloader is None else session.saved():
            return torch.func.grad(loss)({name: p.detach() for name, p in parameters.items()})

    expected = outcome(program, Session())
    session = Recomputing(EVERY)
    with session.saved():
        assert_identical(outcome(program, session), expected)


def gradients_of_blocks(block, *inputs, directory=None, **policy):
    """Gradients of two of these blocks, one behind the other; without a policy by plain PyTorch."""
    torch.manual_seed(0)
    model = nn.ModuleList(block() for _ in range(2))
    context = nullcontext() if directory is None else offloader_in(directory, **policy)
    with context as offloader:
        if offloader is not None:
            offloader.register_module(model)
        with nullcontext() if offloader is None else offloader.saved_tensors():
            x, *others = inputs
            for one in model:
                x = one(x, *others)
            loss = x.square().mean()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
    return [parameter.grad for parameter in model.parameters()]


class Permuted(nn.Module):
    """Exchanges two rows more with each call: its indices are saved last, and are more than are compared whole."""

    num_calls = 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        index, at = torch.arange(len(x)), 300 + 3 * Permuted.num_calls
        Permuted.num_calls += 1
        index[at], index[at + 1] = at + 1, at
        return self.inner(x)[index]


@pytest.mark.parametrize("verify", ["off", "full"])
def test_all_of_many_indices_are_compared(verify, tmp_path):
    with pytest.raises(RecomputeError, match="integers, differ"):
        gradients_of_blocks(
            Permuted, torch.randn(20_000, 4), directory=tmp_path, activations="recompute", verify=verify
        )


class Neighbours(nn.Module):
    """Adds up over a graph."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x, graph):
        return torch.sparse.mm(graph, self.inner(x).relu())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("num", [1000, 30_000])
@pytest.mark.parametrize("activations", ["recompute", "recompute_offload"])
def test_a_large_sparse_tensor_is_saved(layout, num, activations, tmp_path):
    generator = torch.Generator().manual_seed(0)
    where = torch.randint(0, 3000, (2, num), generator=generator)
    graph = torch.sparse_coo_tensor(where, torch.rand(num, generator=generator), (3000, 3000)).coalesce()
    graph = graph if layout is torch.sparse_coo else graph.to_sparse_csr()
    x = torch.randn(3000, 16, generator=generator)
    expected = gradients_of_blocks(Neighbours, x, graph)
    found = gradients_of_blocks(Neighbours, x, graph, directory=tmp_path, activations=activations)
    assert all(map(torch.equal, found, expected))


class Averages(nn.Module):
    """Edits a buffer, and computes with it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))

    def forward(self, x):
        h = self.inner(x)
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return torch.tanh(h * self.average)


@pytest.mark.parametrize("activations", ["recompute", "recompute_offload"])
def test_a_buffer_that_is_edited_and_used(activations, tmp_path):
    x = torch.randn(4, 8)
    expected = gradients_of_blocks(Averages, x)
    found = gradients_of_blocks(Averages, x, directory=tmp_path, activations=activations)
    assert all(map(torch.equal, found, expected))
