"""Frozen weights of a device: the bits of plain training, with copies that end late and memory that is really gone."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError, StorageError
from tests.parameters.test_paged_weights import (  # noqa: F401  # these are tests, here with our own offloaders
    policy,
    test_a_step_that_fails_in_forward_and_the_next_one,
    test_accumulation_and_evaluation_in_between,
    test_an_edit_between_forward_and_backward_is_pytorch_s_error,
    test_copies_are_memory_of_their_own,
    test_edits_between_steps_are_not_lost,
    test_parts_of_one_storage_move_together,
    test_two_backwards_through_one_graph,
    test_with_autocast,
    test_with_checkpoints_of_the_model_s_own,
)
from tests.support.faults import FaultyBackend, always, eio
from tests.support.late import late_copies
from tests.support.patience import PATIENCE_S
from tests.support.residency import NUM_WEIGHTS
from tests.support.weight_loops import NUM_BLOCKS, VOCABULARY, WIDTH, batches, built, equal_weights, frozen, same, train


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Callable[..., Offloader]]:
    """Makes offloaders for a device whose copies end late; they are closed at the end."""
    made = []
    with late_copies(max_delay_s=0.001) as copies:

        def make(*modules: nn.Module, **options: Any) -> Offloader:
            hardware = HardwareProfile(paths=[spill_dir], host_memory=options.pop("host_memory", 0))
            named = {name: options.pop(name) for name in ("_wrap_backend",) if name in options}
            made.append(Offloader(policy=policy(**options), hardware=hardware, _copies=copies, **named))
            return made[-1].open(*modules)

        yield make
        for offloader in made:
            offloader.close()


NUM_BYTES = 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)


class Scale(nn.Module):
    """Its weight is in the graph itself, not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 256), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def loss_of(model: nn.Module, offloader: Offloader | None) -> torch.Tensor:
    """Of one batch, with its graph."""
    with nullcontext() if offloader is None else offloader.saved_tensors():
        return model(next(batches(1))).logsumexp(-1).mean()


def away(model: nn.Module) -> list[str]:
    """Names of the weights whose memory is gone."""
    with torch._C.DisableTorchFunctionSubclass():
        return [name for name, p in model.named_parameters() if p.untyped_storage().nbytes() == 0]


def eventually(offloader: Offloader, is_so: Callable[[], bool]) -> bool:
    """Whether it is so when all copies have ended: until then they hold the memory."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so() and time.monotonic() < deadline_s:
        offloader.send_out_weights()
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute", "recompute_offload"])
def test_training_is_exact(activations: str, opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    expected = train(plain)
    offloader = opened(model, activations=activations)
    assert len(away(model)) == NUM_WEIGHTS
    assert same(train(model, offloader), expected)
    assert eventually(offloader, lambda: len(away(model)) >= NUM_WEIGHTS - 1)  # the first one may be on its way again
    stats = offloader.stats
    assert stats.weights_bytes == NUM_BYTES
    assert 0 < stats.weights_resident_peak_bytes < stats.weights_bytes
    assert equal_weights(model, plain)


@pytest.mark.parametrize("host_memory", [0, "1MiB", "1GiB"])
def test_frozen_weights_are_written_once(host_memory: Any, opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(model, host_memory=host_memory)
    expected = train(plain, steps=5)
    found = train(model, offloader, steps=2)
    written = offloader._parts.parameters.weights.stats.bytes_written
    assert (written == 0) == (host_memory == "1GiB")
    found += train(model, offloader, steps=3)
    assert offloader._parts.parameters.weights.stats.bytes_written == written
    del found, expected


def test_after_closing_everything_is_as_before(opened: Callable[..., Offloader]) -> None:
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
def test_what_is_compiled_as_a_whole_stays(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    for one in (plain, model):
        one.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="compiled as a whole"):
        offloader = opened(model)
    assert away(model) == []
    assert same(train(model, offloader), train(plain))


# -- who uses a weight outside of its unit -----------------------------------------------------------------------------


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda weight: weight.sum(),
    "foreach": lambda weight: torch._foreach_norm([weight, weight])[1],
    "view": lambda weight: weight.view(-1)[3:70].clone(),
    "linear": lambda weight: nn.functional.linear(torch.ones(2, weight.shape[1]), weight),
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy().copy()),
    "data": lambda weight: weight.data[0].clone(),
    "item": lambda weight: torch.tensor(weight[0, 0].item()),
    "iteration": lambda weight: torch.stack([row.clone() for row in weight]),
    "deepcopy": lambda weight: copy.deepcopy(weight),
    "comparison": lambda weight: weight == 0,
    "storage": lambda weight: torch.tensor(weight.untyped_storage().tolist()[:8]),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "to": lambda weight: weight.to(torch.float64),
    "in a dict": lambda weight: torch.func.functional_call(
        nn.Linear(1, 1), {"weight": weight, "bias": weight[:, 0]}, ONES
    ),
    "repr": lambda weight: torch.tensor([ord(letter) for letter in repr(weight)]),
    "vmap": lambda weight: torch.vmap(lambda row: row.sum())(weight),
    "out": lambda weight: torch.add(weight, 1, out=torch.empty_like(weight)),
    "einsum": lambda weight: torch.einsum("ij->j", weight),
    "norm": lambda weight: torch.nn.utils.get_total_norm([weight]),
}
ONES = torch.ones(2, WIDTH)


@pytest.mark.parametrize("name", USES)
def test_any_use_brings_a_weight_back(name: str, opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    opened(model)
    weight = model.blocks[1].up.weight
    assert "blocks.1.up.weight" in away(model)
    got, expected = USES[name](weight), USES[name](plain.blocks[1].up.weight)
    assert torch.equal(got, expected)
    assert type(got) is type(expected)


def test_facts_about_a_weight_bring_nothing_back(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    opened(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        for fact in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "_version", "ndim", "nbytes"):
            assert getattr(one, fact) == getattr(other, fact)
        assert one.numel() == other.numel()
        assert one.stride() == other.stride()
        assert hash(one) == id(one)
    assert len(away(model)) == NUM_WEIGHTS


def test_who_holds_a_view_keeps_the_weight(opened: Callable[..., Offloader]) -> None:
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


@pytest.mark.parametrize("kind", ["Conv2d", "Linear", "mul", "Bilinear", "LSTM"])
def test_a_graph_that_nobody_watches_keeps_its_weights(kind: str, opened: Callable[..., Offloader]) -> None:
    """Saved without our hooks, a weight itself is in the graph, not a view of it."""

    make: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
        "Conv2d": lambda: (nn.Conv2d(64, 64, 3), torch.randn(1, 64, 8, 8)),
        "Linear": lambda: (nn.Linear(256, 64), torch.randn(4, 256)),
        "mul": lambda: (Scale(), torch.randn(64, 256)),
        "Bilinear": lambda: (nn.Bilinear(64, 16, 32), torch.randn(4, 64)),
        "LSTM": lambda: (nn.LSTM(64, 64), torch.randn(5, 2, 64)),
    }
    gradients = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        module, x = make[kind]()
        module.requires_grad_(False)
        x.requires_grad_()
        if is_ours:
            opened(module)
            assert away(module)
        out = module(x) if kind != "Bilinear" else module(x, torch.ones(4, 16))
        loss = (out[0] if kind == "LSTM" else out).square().sum()
        gc.collect()
        loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_hooks_of_somebody_else_keep_what_they_may_hold(opened: Callable[..., Offloader]) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 64 * 256).view(64, 256), requires_grad=False)
            self.inside = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.inside:
                return x * self.weight
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return x * self.weight

    for inside in (False, True):
        module, x = Scale(), torch.ones(64, 256, requires_grad=True)
        module.inside = inside
        expected = module.weight.detach().clone()
        offloader = opened(module)
        with offloader.saved_tensors():
            if inside:
                loss = module(x).sum()
            else:
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    loss = module(x).sum()
        loss.backward()
        assert torch.equal(x.grad, expected)
        offloader.end_backward()
        assert eventually(offloader, lambda module=module: away(module) == ["weight"])


def test_an_edit_of_data_inside_of_a_forward_is_not_lost(opened: Callable[..., Offloader]) -> None:
    class Drifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 256), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(1.5)
            return x * self.weight

    results = []
    for is_ours in (False, True):
        module = Drifting()
        offloader = opened(module) if is_ours else None
        for _ in range(3):
            x = torch.ones(64, 256, requires_grad=True)
            if offloader is None:
                module(x).sum().backward()
            else:
                with offloader.saved_tensors():
                    loss = module(x).sum()
                loss.backward()
                offloader.end_backward()
        results.append((x.grad, module.weight.detach().clone()))
    assert same(*[list(result) for result in results])


def test_other_storage_while_a_graph_wants_the_old_one(opened: Callable[..., Offloader]) -> None:
    results = []
    for is_ours in (False, True):
        model = built()
        offloader = opened(model) if is_ours else None
        loss = loss_of(model, offloader)
        model.blocks[1].down.weight.data = torch.zeros_like(model.blocks[1].down.weight)
        gc.collect()
        loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*results)


def test_the_model_is_gone_before_backward(opened: Callable[..., Offloader]) -> None:
    results = []
    for is_ours in (False, True):
        model = built()
        adapters = [p for p in model.parameters() if p.requires_grad]
        offloader = opened(model) if is_ours else None
        loss = loss_of(model, offloader)
        del model
        gc.collect()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        results.append([p.grad for p in adapters])
    assert same(*results)


@pytest.mark.parametrize("how", ["requires_grad_", "attribute", "module"])
def test_a_weight_that_is_unfrozen_stays_from_then_on(how: str, opened: Callable[..., Offloader]) -> None:
    def unfreeze(model: nn.Module) -> list[torch.Tensor]:
        block = model.blocks[1]
        if how == "module":
            block.requires_grad_(True)
        elif how == "attribute":
            block.up.weight.requires_grad = True
        else:
            block.up.weight.requires_grad_()
        return [p for p in model.parameters() if p.requires_grad]

    plain, model = built(), built()
    results = []
    for one in (plain, model):
        offloader = opened(model) if one is model else None
        found = train(one, offloader, steps=2)
        unfreeze(one)
        found += train(one, offloader, steps=3, optimizer=torch.optim.AdamW)
        results.append(found)
    assert same(*results)
    assert type(model.blocks[1].up.weight) is nn.Parameter
    assert equal_weights(model, plain)


# -- building, moving, saving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_built_inside", [False, True])
def test_what_left_early_comes_with_its_block(is_built_inside: bool, opened: Callable[..., Offloader]) -> None:
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


def test_converting_a_model_that_waits(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    model.to(torch.float64)
    assert same(train(model, offloader), train(plain.to(torch.float64)))
    assert equal_weights(model, plain)


def test_a_checkpoint_is_made_of_host_copies(opened: Callable[..., Offloader]) -> None:
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


def test_a_read_that_fails_names_the_weight_and_may_be_tried_again(opened: Callable[..., Offloader]) -> None:
    failing = [False]

    plain, model = built(), built()
    offloader = opened(
        model, _wrap_backend=lambda inner: FaultyBackend(inner, fail_read=lambda call: eio() if failing[0] else None)
    )
    failing[0] = True
    with pytest.raises(StorageError) as refused:
        train(model, offloader, steps=1)
    assert "weight embedding.weight" in "".join(refused.value.__notes__)
    failing[0] = False
    model.zero_grad()
    assert same(train(model, offloader), train(plain))


def test_a_weight_that_cannot_be_written_stays(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    with pytest.raises(StorageError, match=r"weight embedding\.weight could not be written"):
        opened(model, _wrap_backend=lambda inner: FaultyBackend(inner, fail_write=always(eio)))
    assert equal_weights(model, plain)
    assert same(train(model), train(plain))


def test_a_changed_weight_that_cannot_be_written_stays(opened: Callable[..., Offloader]) -> None:
    failing = [False]

    def change(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(1.5)

    plain, model = built(), built()
    offloader = opened(
        model, _wrap_backend=lambda inner: FaultyBackend(inner, fail_write=lambda call: eio() if failing[0] else None)
    )
    failing[0] = True
    with pytest.warns(UserWarning, match=r"weight blocks\.1\.up\.weight was changed and cannot be written") as told:
        assert same(train(model, offloader, between=change), train(plain, between=change))
    assert len(told) == 1
    assert "blocks.1.up.weight" not in away(model)
    assert equal_weights(model, plain)


def test_what_was_made_in_inference_mode_stays(opened: Callable[..., Offloader]) -> None:
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


def test_a_weight_that_does_not_come_back_at_the_end_is_an_error(spill_dir: Path) -> None:
    failing = [False]

    model = built()
    with late_copies() as copies:
        hardware = HardwareProfile(paths=[spill_dir])
        offloader = Offloader(
            policy=policy(),
            hardware=hardware,
            _copies=copies,
            _wrap_backend=lambda inner: FaultyBackend(inner, fail_read=lambda call: eio() if failing[0] else None),
        ).open(model)
        failing[0] = True
        with pytest.raises(StorageError):
            offloader.close()
        with pytest.raises(OffloaderClosedError, match="did not come back when the offloader was closed"):
            model.blocks[0].up.weight.sum()
        assert "data" not in vars(nn.Parameter)


# -- the order of copies -----------------------------------------------------------------------------------------------


def test_memory_that_was_taken_is_not_taken_twice(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a unit gets but a part of its memory and asks again: ``resize_`` to the present size takes all anew."""
    plain, model = built(), built()
    offloader = opened(model)
    resize, failed, twice = torch.UntypedStorage.resize_, [], []

    def short(storage: torch.UntypedStorage, nbytes: int) -> Any:
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
