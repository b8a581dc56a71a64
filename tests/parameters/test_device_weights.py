"""Frozen weights of a device: the bits of plain training, with copies that end late and memory that is really gone."""

import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.tiers.ssd import SsdTier
from tests.parameters.test_paged_weights import (  # noqa: F401  # these are tests, here with our own offloaders
    policy,
    test_a_step_that_fails_in_forward_and_the_next_one,
    test_accumulation_and_evaluation_in_between,
    test_an_edit_between_forward_and_backward_is_pytorch_s_error,
    test_copies_are_memory_of_their_own,
    test_edits_between_steps_are_not_lost,
    test_parts_of_one_storage_move_together,
    test_training_is_bit_for_bit_that_of_plain_pytorch,
    test_two_backwards_through_one_graph,
    test_with_autocast,
    test_with_checkpoints_of_the_model_s_own,
)
from tests.support.faults import FaultyBackend, always, eio
from tests.support.patience import PATIENCE_S
from tests.support.residency import NUM_WEIGHTS
from tests.support.switched_faults import Switch
from tests.support.weight_loops import NUM_BLOCKS, VOCABULARY, WIDTH, batches, built, equal_weights, frozen, same, train

IS_LATE = True


NUM_BYTES = 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)


class Scale(nn.Module):
    """Its weight is in the graph itself, not a view of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 256), requires_grad=False)

    def forward(self, x):
        return x * self.weight


def away(model):
    with torch._C.DisableTorchFunctionSubclass():
        return [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() == 0]


def eventually(offloader, is_so):
    """Whether it is so when all copies have ended: until then they hold the memory."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline_s:
        offloader.send_out_weights()
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize("host_memory", [0, "1MiB", "1GiB"])
def test_frozen_weights_are_written_once(host_memory, opened):
    plain, model = built(), built()
    offloader = opened(model, host_memory=host_memory)
    expected = train(plain, steps=5)
    found = train(model, offloader, steps=2)
    written = offloader._parts.parameters.weights.stats.bytes_written
    assert (written == 0) == (host_memory == "1GiB")
    found += train(model, offloader, steps=3)
    assert offloader._parts.parameters.weights.stats.bytes_written == written
    del found, expected


def test_after_closing_everything_is_as_before(opened):
    plain, model = built(), built()
    facts = [(id(p), p.shape, p.stride(), type(p)) for p in model.parameters()]
    offloader = opened(model)
    assert [(id(p), p.shape, p.stride()) for p in model.parameters()] == [fact[:3] for fact in facts]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    offloader.close()
    assert away(model) == []
    assert [(id(p), p.shape, p.stride(), type(p)) for p in model.parameters()] == facts
    assert equal_weights(model, plain)
    assert same(train(model), train(plain))
    assert "data" not in vars(nn.Parameter)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, which it means to hide
def test_what_is_compiled_as_a_whole_stays(opened):
    plain, model = built(), built()
    for one in (plain, model):
        one.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="compiled as a whole"):
        offloader = opened(model)
    assert away(model) == []
    assert same(train(model, offloader), train(plain))


# -- who uses a weight outside of its unit -----------------------------------------------------------------------------


def test_facts_about_a_weight_bring_nothing_back(opened):
    plain, model = built(), built()
    opened(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        for fact in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "_version", "ndim", "nbytes"):
            assert getattr(one, fact) == getattr(other, fact)
        assert one.numel() == other.numel()
        assert one.stride() == other.stride()
        assert hash(one) == id(one)
    assert len(away(model)) == NUM_WEIGHTS


def test_who_holds_a_view_keeps_the_weight(opened):
    plain, model = built(), built()
    offloader = opened(model)
    view = model.blocks[1].up.weight.detach()
    row = view[3]
    train(model, offloader, steps=2)
    assert torch.equal(view, plain.blocks[1].up.weight)
    assert torch.equal(row, plain.blocks[1].up.weight[3])
    assert "blocks.1.up.weight" not in away(model)
    del view, row
    train(model, offloader, steps=1)
    assert eventually(offloader, lambda: "blocks.1.up.weight" in away(model))


# -- building, moving, saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_built_inside", [False, True])
def test_what_left_early_comes_with_its_block(is_built_inside, opened):
    """Not each weight by itself, when it is used: that would be waited for. A model is never whole in memory."""
    offloader, plain = opened(), built()
    with offloader.streamed_init() if is_built_inside else nullcontext():
        model = built()
    if is_built_inside:
        assert len(away(model)) >= NUM_WEIGHTS - 2  # what is trained, or in no module yet, is here
    else:
        offloader.move_in(model)
        assert len(away(model)) == NUM_WEIGHTS
        model.to("cpu")  # what is there already is not touched
        assert len(away(model)) == NUM_WEIGHTS
    frozen(model)
    offloader.register_module(model)
    assert len(away(model)) == NUM_WEIGHTS
    units = {unit.name: len(unit.weights) for unit in offloader._parts.parameters.pager.units if unit.weights}
    assert units == {"embedding": 1} | {f"blocks.{number}": 2 for number in range(NUM_BLOCKS)}
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)


def test_converting_a_model_that_waits(opened):
    plain, model = built(), built()
    offloader = opened(model)
    model.to(torch.float64)
    assert same(train(model, offloader), train(plain.to(torch.float64)))
    assert equal_weights(model, plain)


def test_a_checkpoint_is_made_of_host_copies(opened):
    plain, model = built(), built()
    offloader = opened(model)
    offloader.reset_peaks()
    with offloader.host_copies():
        state = model.state_dict()
    assert same(list(state.values()), list(plain.state_dict().values()))
    assert offloader.stats.weights_resident_peak_bytes < NUM_BYTES / 2
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    doubled = {name: value * 2 for name, value in state.items()}
    for one in (model, plain):
        one.load_state_dict(doubled)
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    assert same(train(model, offloader), train(plain))


# -- when the drive fails ----------------------------------------------------------------------------------------------


def test_a_read_that_fails_names_the_weight_and_may_be_tried_again(opened):
    failing = Switch(fail_read=eio)
    plain, model = built(), built()
    offloader = opened(model, _wrap_backend=failing.wrap)
    failing.is_on = True
    with pytest.raises(StorageError) as refused:
        train(model, offloader, steps=1)
    assert "weight embedding.weight" in "".join(refused.value.__notes__)
    failing.is_on = False
    model.zero_grad()
    assert same(train(model, offloader), train(plain))


def test_a_weight_that_cannot_be_written_stays(opened):
    plain, model = built(), built()
    with pytest.raises(StorageError, match=r"weight embedding\.weight could not be written"):
        opened(model, _wrap_backend=partial(FaultyBackend, fail_write=always(eio)))
    assert equal_weights(model, plain)
    assert same(train(model), train(plain))


def test_a_changed_weight_that_cannot_be_written_stays(opened):
    failing = Switch(fail_write=eio)

    def change(model, step):
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(1.5)

    plain, model = built(), built()
    offloader = opened(model, _wrap_backend=failing.wrap)
    failing.is_on = True
    with pytest.warns(UserWarning, match=r"weight blocks\.1\.up\.weight was changed and cannot be written") as told:
        assert same(train(model, offloader, between=change), train(plain, between=change))
    assert len(told) == 1
    assert "blocks.1.up.weight" not in away(model)
    assert equal_weights(model, plain)


def test_what_was_made_in_inference_mode_stays(opened):
    plain, model = built(), built()
    with torch.inference_mode():
        model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.clone(), requires_grad=False)
    offloader = opened()
    offloader.move_in(model)
    assert len(away(model)) == NUM_WEIGHTS - 1
    with pytest.warns(UserWarning, match="it was made in inference mode"):
        offloader.register_module(model)
    with torch.no_grad():
        assert torch.equal(model(next(batches(1))), plain(next(batches(1))))


def test_a_weight_that_does_not_come_back_at_the_end_is_an_error(opened):
    failing, model = Switch(fail_read=eio), built()
    offloader = opened(model, _wrap_backend=failing.wrap)
    failing.is_on = True
    with pytest.raises(StorageError):
        offloader.close()
    with pytest.raises(OffloaderClosedError, match="did not come back when the offloader was closed"):
        model.blocks[0].up.weight.sum()
    assert "data" not in vars(nn.Parameter)


def test_memory_that_was_taken_is_not_taken_twice(opened, monkeypatch):
    """Where a unit gets but a part of its memory and asks again: ``resize_`` to the present size takes all anew."""
    plain, model = built(), built()
    offloader = opened(model)
    resize, failed, twice = torch.UntypedStorage.resize_, [], []

    def short(storage, nbytes):
        if storage.nbytes() == nbytes > 0:
            twice.append(nbytes)
        if nbytes and not failed and storage._cdata == last.cdata:
            failed.append(nbytes)
            raise torch.OutOfMemoryError("injected")
        return resize(storage, nbytes)

    with torch._C.DisableTorchFunctionSubclass():
        last = StorageKey(model.blocks[2].down.weight.untyped_storage())
    monkeypatch.setattr(torch.UntypedStorage, "resize_", short)
    assert same(train(model, offloader), train(plain))
    assert failed
    assert twice == []


def test_room_is_taken_beside_what_waits_already(opened, monkeypatch):
    asked = []
    monkeypatch.setattr(SsdTier, "reserve", lambda self, nbytes, what: asked.append(nbytes - self.used_bytes))
    models = built(), built()
    opened(models[0]).register_module(models[1])
    assert asked == [NUM_BYTES] * 2
