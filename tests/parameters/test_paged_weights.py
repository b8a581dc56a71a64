"""Frozen weights on a drive: the bits of plain training, whatever is done to a weight, and whoever holds it."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import OffloadPolicy
from tests.support.helpers import meaning_of
from tests.support.pairs import pairwise
from tests.support.weight_loops import (
    MIN_TENSOR,
    NUM_BLOCKS,
    PLAIN,
    VOCABULARY,
    WIDTH,
    Net,
    batches,
    built,
    equal_weights,
    frozen,
    passed,
    same,
    train,
)


def policy(**options):
    return OffloadPolicy(**{"parameters": "offload", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activations", "optimizer"),
    [
        *((one, torch.optim.AdamW) for one in ("keep", "offload", "auto", "recompute", "recompute_offload")),
        *(("offload", one) for one in (torch.optim.SGD, torch.optim.Adagrad)),
    ],
)
def test_training_is_bit_for_bit_that_of_plain_pytorch(activations, optimizer, opened):
    plain, model = built(), built()
    expected = train(plain, optimizer=optimizer)
    offloader = opened(model, activations=activations)
    assert same(train(model, offloader, optimizer=optimizer), expected)
    # Two matrices a block, and the embedding; biases are too small.
    assert offloader.stats.weights_bytes == 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    assert 0 < offloader.stats.weights_resident_peak_bytes < offloader.stats.weights_bytes
    assert equal_weights(model, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpoints_of_the_model_s_own(reentrant, opened):
    def repeats(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    plain, model = built(repeats=repeats), built(repeats=repeats)
    for one in (plain, model):
        one.embedding.weight.requires_grad_(reentrant)  # else a reentrant one has nothing to differentiate
    assert same(train(model, opened(model)), train(plain))


@pairwise("trains_all, activations, is_cached", [False, True], ["keep", "offload"], [True, False])
def test_with_autocast(trains_all, activations, is_cached, opened):
    """Autocast computes with copies of weights that wait; those that backward needs are saved like activations."""

    class Mixed(Net):
        @torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached)
        def forward(self, ids):
            return super().forward(ids)

    plain, model = built(Mixed), built(Mixed)
    for one in (plain, model) if trains_all else ():
        one.requires_grad_(True)
    offloader = opened(model, activations=activations, optimizer_states="offload")

    def adamw(*args, **options):
        return offloader.offload_optimizer(torch.optim.AdamW(*args, **options))

    assert same(train(model, offloader, optimizer=adamw), train(plain))
    assert equal_weights(model, plain)
    assert offloader.stats.weights_bytes > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, which it means to hide
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_with_compiled_code(scope, opened):
    plain, model = built(), built()
    for one in (plain, model):
        for part in one.blocks if scope == "blocks" else [one]:
            part.compile(backend="aot_eager")
    offloader = opened(model)
    assert same(train(model, offloader), train(plain))
    assert offloader.stats.weights_bytes > 0


def test_accumulation_and_evaluation_in_between(opened):
    def evaluate(model, step):
        with torch.no_grad():
            seen.append(model(next(batches(1))))

    plain, model = built(), built()
    seen = []
    expected = train(plain, between=evaluate)
    half = len(seen)
    assert same(train(model, opened(model), between=evaluate), expected)
    assert same(seen[half:], seen[:half])


def test_a_step_that_fails_in_forward_and_the_next_one(opened):
    plain, model = built(), built()
    offloader = opened(model)
    model.blocks[2].up.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), offloader.saved_tensors():
        model(next(batches(1)))
    model.blocks[2].up._forward_hooks.clear()
    assert same(train(model, offloader), train(plain))


def test_two_backwards_through_one_graph(opened):
    plain, model = built(), built()
    offloader = opened(model)
    for _ in range(2):
        gradients = []
        for one, context in ((plain, PLAIN), (model, offloader)):
            with context.saved_tensors():
                loss = one(next(batches(1))).logsumexp(-1).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            context.end_backward()
            gradients.append([p.grad for p in one.parameters() if p.grad is not None])
        assert same(*gradients)


# -- edits of frozen weights, seen and unseen ------------------------------------------------------------------------


def _averaged(model, step):
    with torch.no_grad():
        for weight in (model.blocks[0].up.weight, model.embedding.weight):
            weight.lerp_(torch.full_like(weight, 0.01 * step), 0.1)


def _past_autograd(model, step):
    model.blocks[1].down.weight.data.mul_(1.01)
    model.embedding.weight.detach().numpy()[3] += 0.5


def _exchanged(model, step):
    model.blocks[2].up.weight.data = model.blocks[2].up.weight.data * 1.5
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight * 2, requires_grad=False)


def _loaded(model, step):
    state = {name: value * 1.01 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=step == 1)
    frozen(model)


def _unfrozen(model, step):
    if step == 1:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    if step >= 1:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("edit", [_averaged, _past_autograd, _exchanged, _loaded, _unfrozen])
def test_edits_between_steps_are_not_lost(edit, opened):
    plain, model = built(), built()
    expected = train(plain, between=edit, steps=5)
    assert same(train(model, opened(model), between=edit, steps=5), expected)
    assert equal_weights(model, plain)


def test_an_edit_between_forward_and_backward_is_pytorch_s_error(opened):
    messages = []
    for offloader in (PLAIN, opened()):
        model = built()
        offloader.register_module(model)
        with offloader.saved_tensors():
            loss = model(next(batches(1))).sum()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            loss.backward()
        messages.append(str(refused.value))
    assert meaning_of(messages[0]) == meaning_of(messages[1])


def test_a_thread_that_edits_while_training_runs(opened):
    """Edits of bytes that nobody reads: none may be lost when pages leave meanwhile."""
    model = built()
    offloader = opened(model)
    target = model.embedding.weight.data.view(-1)[: VOCABULARY * WIDTH // 2]  # rows that no batch asks for, see below
    ends = threading.Event()
    counts = torch.zeros_like(target)

    def edit():
        while not ends.is_set():
            target.add_(1.0)
            counts.add_(1.0)

    before = target.clone()
    thread = threading.Thread(target=edit)
    thread.start()
    try:
        for _ in range(30):
            passed(offloader, lambda: model.blocks[0](torch.ones(2, WIDTH)).sum())
    finally:
        ends.set()
        thread.join()
    assert counts[0] > 0
    for _ in range(int(counts[0])):
        before.add_(1.0)
    assert torch.equal(target, before)


# -- who holds a weight ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        (lambda weight: weight.data, "something else holds its memory \\(1 tensor\\)"),
        (lambda weight: weight.detach()[:2], "something else holds its memory \\(2 tensors\\)"),
        (lambda weight: weight.detach().numpy(), "its memory was not made by PyTorch"),
        (lambda weight: torch.utils.dlpack.to_dlpack(weight), "something outside of Python holds it"),
        (lambda weight: weight.untyped_storage(), "something else holds its storage object"),
        (lambda weight: (weight * torch.ones(1, requires_grad=True)).sum(), "something outside of Python holds it"),
        (lambda weight: weight.untyped_storage().share_memory_(), "it is in memory that processes share"),
    ],
)
def test_what_somebody_else_holds_stays(hold, reason, opened):
    model = built()
    weight = model.blocks[1].up.weight
    held = hold(weight)
    address = weight.data_ptr()
    with pytest.warns(UserWarning, match=rf"1 weights stay in memory.*blocks\.1\.up\.weight: {reason}"):
        offloader = opened(model)
    assert weight.data_ptr() == address
    assert offloader.stats.weights_bytes < 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    del held


def test_parts_of_one_storage_move_together(opened):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
            self.q, self.k, self.v = (nn.Parameter(part, requires_grad=False) for part in whole.chunk(3))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return (x * self.scale) @ self.q.t() @ self.k @ self.v

    plain, model = Fused(), Fused()
    offloader = opened(model)
    assert offloader.stats.weights_bytes == 3 * WIDTH * WIDTH * 4
    assert model.q.untyped_storage().data_ptr() == model.v.untyped_storage().data_ptr()
    results = []
    for one in (plain, model):
        loss = passed(offloader, lambda one=one: one(torch.ones(2, WIDTH)).sum())
        results.append([loss.detach(), one.scale.grad])
    assert same(*results)


def test_a_buffer_in_the_same_memory_keeps_it_there(opened):
    model = built()
    model.register_buffer("shown", model.blocks[0].up.weight.data)
    with pytest.warns(UserWarning, match="a buffer lies in the same memory"):
        opened(model)


def test_identity_shape_and_version_stay(opened):
    model = built()

    def facts():
        named = model.named_parameters()
        return [(n, id(p), p.shape, p.stride(), p._version, p.requires_grad, p.is_leaf, type(p)) for n, p in named]

    before = facts()
    opened(model)
    assert facts() == before


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)], ids=["built", "registered", "both"])
def test_inference_mode(modes, opened):
    """While the model is built, or while it is registered."""
    with torch.inference_mode(modes[0]):
        plain, model = built().requires_grad_(False), built().requires_grad_(False)
    offloader = opened()
    with torch.inference_mode(modes[1]):
        offloader.register_module(model)
    assert offloader.stats.weights_bytes > 0
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(model(next(batches(1))), plain(next(batches(1))))


def test_copies_are_memory_of_their_own(opened):
    plain, model = built(), built()
    opened(model)
    twin = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream)
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
    assert equal_weights(twin, plain)
    assert same(list(loaded.values()), list(plain.state_dict().values()))
    assert same(train(twin), train(plain))
