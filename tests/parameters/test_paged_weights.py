"""Frozen weights on a drive: the bits of plain training, whatever is done to a weight, and whoever holds it."""

from __future__ import annotations

import copy
import gc
import io
import os
import resource
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError, OffloaderClosedError, OutOfSpaceError, StorageError
from lightning_ssd.parameters.mapped_pager import MappedPager
from lightning_ssd.parameters.mapped_weights import MappedWeights
from lightning_ssd.storage.backend import WrappedBackend
from lightning_ssd.storage.spill_file import Arena
from tests.support.helpers import meaning_of
from tests.support.offloaders import offloaders

WIDTH, NUM_BLOCKS, VOCABULARY = 128, 4, 600
MIN_TENSOR = "16KiB"


class Block(nn.Module):
    """A small adapter is trained beside two large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) + self.adapter(x)


class Net(nn.Module):
    """Tied embedding and head; blocks in between."""

    def __init__(self, *, repeats: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._repeats = repeats

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self._repeats is None else self._repeats(block, x)
        return self.head(x)


def frozen(model: nn.Module) -> nn.Module:
    """All but the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    return model


def built(kind: type[nn.Module] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return frozen((kind or Net)(**options))


def batches(num: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num):
        yield torch.randint(0, VOCABULARY, (3, 20), generator=generator)


Between = Callable[[nn.Module, int], object]


def train(
    model: nn.Module,
    offloader: Offloader | None = None,
    *,
    steps: int = 4,
    between: Between = lambda model, step: None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[torch.Tensor]:
    """Losses, and the gradients of each step."""
    update = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step, ids in enumerate(batches(steps)):
        if offloader is None:
            loss = model(ids).logsumexp(-1).mean()
            loss.backward()
        else:
            with offloader.saved_tensors():
                loss = model(ids).logsumexp(-1).mean()
            loss.backward()
            offloader.end_backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        update.step()
        update.zero_grad()
        between(model, step)
    return found


def policy(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"parameters": "offload", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Callable[..., Offloader]]:
    with offloaders(spill_dir, policy) as make:
        yield make


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def equal_weights(one: nn.Module, other: nn.Module) -> bool:
    return same(list(one.state_dict().values()), list(other.state_dict().values()))


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute", "recompute_offload"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_training_is_bit_for_bit_that_of_plain_pytorch(
    activations: str, optimizer: Any, opened: Callable[..., Offloader]
) -> None:
    plain, model = built(), built()
    expected = train(plain, optimizer=optimizer)
    offloader = opened(model, activations=activations)
    assert same(train(model, offloader, optimizer=optimizer), expected)
    assert equal_weights(model, plain)
    # Two matrices a block, and the embedding; biases are too small.
    assert offloader.stats.weights_bytes == 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    assert 0 < offloader.stats.weights_resident_peak_bytes < offloader.stats.weights_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpoints_of_the_model_s_own(reentrant: bool, opened: Callable[..., Offloader]) -> None:
    def repeats(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    plain, model = built(repeats=repeats), built(repeats=repeats)
    for one in (plain, model):
        one.embedding.weight.requires_grad_(reentrant)  # else a reentrant one has nothing to differentiate
    assert same(train(model, opened(model)), train(plain))


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("trains_all", [False, True])
def test_with_autocast(trains_all: bool, activations: str, is_cached: bool, opened: Callable[..., Offloader]) -> None:
    """Autocast computes with copies of weights that wait; those that backward needs are saved like activations."""

    class Mixed(Net):
        @torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=is_cached)
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)

    plain, model = built(Mixed), built(Mixed)
    for one in (plain, model) if trains_all else ():
        one.requires_grad_(True)
    offloader = opened(model, activations=activations, optimizer_states="offload")

    def adamw(*args: Any, **options: Any) -> torch.optim.Optimizer:
        return offloader.offload_optimizer(torch.optim.AdamW(*args, **options))

    assert same(train(model, offloader, optimizer=adamw), train(plain))
    assert equal_weights(model, plain)
    assert offloader.stats.weights_bytes > 0


def test_a_forward_on_the_meta_device_tells_shapes_as_ever(opened: Callable[..., Offloader]) -> None:
    block = Block()
    block.up.requires_grad_(False)
    opened(block)
    meta = {name: torch.empty_like(parameter, device="meta") for name, parameter in block.named_parameters()}
    shown = torch.func.functional_call(block, meta, torch.empty(3, WIDTH, device="meta"))
    assert shown.shape == (3, WIDTH)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own, which it means to hide
@pytest.mark.parametrize("scope", ["blocks", "model"])
def test_with_compiled_code(scope: str, opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    for one in (plain, model):
        for part in one.blocks if scope == "blocks" else [one]:
            part.compile(backend="aot_eager")
    offloader = opened(model)
    assert same(train(model, offloader), train(plain))
    assert offloader.stats.weights_bytes > 0


def test_accumulation_and_evaluation_in_between(opened: Callable[..., Offloader]) -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            seen.append(model(next(batches(1))))

    plain, model = built(), built()
    seen: list[torch.Tensor] = []
    expected = train(plain, between=evaluate)
    half = len(seen)
    assert same(train(model, opened(model), between=evaluate), expected)
    assert same(seen[half:], seen[:half])


def test_a_step_that_fails_in_forward_and_the_next_one(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    model.blocks[2].up.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), offloader.saved_tensors():
        model(next(batches(1)))
    model.blocks[2].up._forward_hooks.clear()
    assert same(train(model, offloader), train(plain))


def test_two_backwards_through_one_graph(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    for _ in range(2):
        losses = []
        for one, context in ((plain, None), (model, offloader)):
            if context is None:
                loss = one(next(batches(1))).logsumexp(-1).mean()
            else:
                with context.saved_tensors():
                    loss = one(next(batches(1))).logsumexp(-1).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            losses.append([p.grad for p in one.parameters() if p.grad is not None])
        offloader.end_backward()
        assert same(*losses)


# -- edits of frozen weights, seen and unseen ------------------------------------------------------------------------


def _averaged(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for weight in (model.blocks[0].up.weight, model.embedding.weight):
            weight.lerp_(torch.full_like(weight, 0.01 * step), 0.1)


def _past_autograd(model: nn.Module, step: int) -> None:
    model.blocks[1].down.weight.data.mul_(1.01)
    model.embedding.weight.detach().numpy()[3] += 0.5


def _exchanged(model: nn.Module, step: int) -> None:
    model.blocks[2].up.weight.data = model.blocks[2].up.weight.data * 1.5
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight * 2, requires_grad=False)


def _loaded(model: nn.Module, step: int) -> None:
    state = {name: value * 1.01 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=step == 1)
    frozen(model)


def _unfrozen(model: nn.Module, step: int) -> None:
    if step == 1:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    if step >= 1:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)


@pytest.mark.parametrize("edit", [_averaged, _past_autograd, _exchanged, _loaded, _unfrozen])
def test_edits_between_steps_are_not_lost(edit: Between, opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    expected = train(plain, between=edit, steps=5)
    assert same(train(model, opened(model), between=edit, steps=5), expected)
    assert equal_weights(model, plain)


def test_an_edit_between_forward_and_backward_is_pytorch_s_error(opened: Callable[..., Offloader]) -> None:
    messages = []
    for offloader in (None, opened()):
        model = built()
        if offloader is not None:
            offloader.register_module(model)
            with offloader.saved_tensors():
                loss = model(next(batches(1))).sum()
        else:
            loss = model(next(batches(1))).sum()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            loss.backward()
        messages.append(str(refused.value))
    assert meaning_of(messages[0]) == meaning_of(messages[1])


def test_a_thread_that_edits_while_training_runs(opened: Callable[..., Offloader]) -> None:
    """Edits of bytes that nobody reads: none may be lost when pages leave meanwhile."""
    model = built()
    offloader = opened(model)
    target = model.embedding.weight.data.view(-1)[: VOCABULARY * WIDTH // 2]  # rows that no batch asks for, see below
    ends = threading.Event()
    counts = torch.zeros_like(target)

    def edit() -> None:
        while not ends.is_set():
            target.add_(1.0)
            counts.add_(1.0)

    before = target.clone()
    thread = threading.Thread(target=edit)
    thread.start()
    try:
        for _ in range(30):
            with offloader.saved_tensors():
                loss = model.blocks[0](torch.ones(2, WIDTH)).sum()
            loss.backward()
            offloader.end_backward()
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
def test_what_somebody_else_holds_stays(
    hold: Callable[[torch.Tensor], object], reason: str, opened: Callable[..., Offloader]
) -> None:
    model = built()
    weight = model.blocks[1].up.weight
    held = hold(weight)
    address = weight.data_ptr()
    with pytest.warns(UserWarning, match=rf"1 weights stay in memory.*blocks\.1\.up\.weight: {reason}"):
        offloader = opened(model)
    assert weight.data_ptr() == address
    assert offloader.stats.weights_bytes < 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    del held


def test_foreign_memory_stays(opened: Callable[..., Offloader]) -> None:
    """Of a parameter made of an array: only the array's owner knows who else uses it."""
    array = torch.randn(WIDTH, 4 * WIDTH).numpy()
    model = built()
    model.blocks[0].down.weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
    with pytest.warns(UserWarning, match="its memory was not made by PyTorch"):
        opened(model)
    array[:] = 0
    assert not model.blocks[0].down.weight.any()


def test_parts_of_one_storage_move_together(opened: Callable[..., Offloader]) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
            self.q, self.k, self.v = (nn.Parameter(part, requires_grad=False) for part in whole.chunk(3))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale) @ self.q.t() @ self.k @ self.v

    plain, model = Fused(), Fused()
    offloader = opened(model)
    assert offloader.stats.weights_bytes == 3 * WIDTH * WIDTH * 4
    assert model.q.untyped_storage().data_ptr() == model.v.untyped_storage().data_ptr()
    results = []
    for one in (plain, model):
        with offloader.saved_tensors():
            loss = one(torch.ones(2, WIDTH)).sum()
        loss.backward()
        results.append([loss.detach(), one.scale.grad])
    assert same(*results)


def test_a_buffer_in_the_same_memory_keeps_it_there(opened: Callable[..., Offloader]) -> None:
    model = built()
    model.register_buffer("shown", model.blocks[0].up.weight.data)
    with pytest.warns(UserWarning, match="a buffer lies in the same memory"):
        opened(model)


class Renamed(Net):
    """Names its parameters in a way of its own, and has PyTorch's arguments of long ago."""

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix, recurse):
            yield f"wrapped.{name}", parameter


def test_names_that_are_not_those_of_the_modules(opened: Callable[..., Offloader]) -> None:
    plain = built()
    torch.manual_seed(0)
    model = frozen(Renamed())
    offloader = opened(model)
    assert same(train(model, offloader), train(plain))
    assert equal_weights(model, plain)
    assert offloader.stats.weights_bytes == 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)


def test_identity_shape_and_version_stay(opened: Callable[..., Offloader]) -> None:
    model = built()
    weights = dict(model.named_parameters())
    facts = {
        n: (id(p), p.shape, p.stride(), p._version, p.requires_grad, p.is_leaf, type(p)) for n, p in weights.items()
    }
    opened(model)
    now = dict(model.named_parameters())
    assert facts == {
        n: (id(p), p.shape, p.stride(), p._version, p.requires_grad, p.is_leaf, type(p)) for n, p in now.items()
    }


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True)], ids=["built", "registered", "both"])
def test_inference_mode(modes: tuple[bool, bool], opened: Callable[..., Offloader]) -> None:
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


def test_copies_are_memory_of_their_own(opened: Callable[..., Offloader]) -> None:
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


def test_a_weight_that_is_gone_gives_its_place_back(opened: Callable[..., Offloader]) -> None:
    model = built()
    offloader = opened(model)
    used = offloader.stats.weights_bytes
    del model.blocks[3]
    gc.collect()
    offloader.send_out_weights()
    assert offloader.stats.weights_bytes == used - 4 * 8 * WIDTH * WIDTH
    size = offloader.stats.disk_bytes
    offloader.register_module(frozen(Block()))
    assert offloader.stats.disk_bytes == size


# -- a model that is never whole in memory ---------------------------------------------------------------------------


def test_a_model_built_inside_has_the_same_weights_from_the_same_random_numbers(
    opened: Callable[..., Offloader],
) -> None:
    plain = built()
    state = torch.get_rng_state()
    offloader = opened()
    with offloader.streamed_init():
        model = built()
        assert offloader.stats.weights_bytes > 0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.bias) if module.bias is not None else None
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.bias) if module.bias is not None else None
    assert equal_weights(model, plain)
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))


def test_weights_that_turn_out_to_be_trained_come_back(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    with offloader.streamed_init():
        model = built()
    model.blocks[0].requires_grad_(True)
    offloader.register_module(model)
    offloader.send_out_weights()
    assert offloader.stats.weights_bytes == 4 * ((NUM_BLOCKS - 1) * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    plain = built()
    plain.blocks[0].requires_grad_(True)
    assert same(train(model, offloader), train(plain))


@pytest.mark.parametrize(
    ("options", "num_processes", "expected"),
    [
        ({}, 1, True),
        ({}, 1000, False),
        ({"memory_budget": "100GiB", "activations": "auto"}, 1, False),
        ({"parameters": "auto"}, 1, False),
    ],
    ids=["one", "of_many", "less_memory", "auto"],
)
def test_frozen_weights_are_mapped_ahead_where_the_machine_has_room(
    spill_dir: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_processes: int, expected: bool
) -> None:
    """And for an update of what is trained: whether all that waits fits into memory, each process with its share."""
    model = built()
    nbytes = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr("lightning_ssd.memory.host_room.host_available_bytes", lambda cached_bytes: 100 * nbytes)
    chosen = OffloadPolicy(**{"activations": "keep", "parameters": "offload", "min_tensor_bytes": 0, **options})
    hardware = HardwareProfile(paths=[spill_dir], allow_unsuitable_paths=True)
    with Offloader(policy=chosen, hardware=hardware, device="cpu", num_local_processes=num_processes) as offloader:
        offloader.register_module(model)
        with torch.no_grad():
            for _ in range(2):
                model(torch.zeros(1, 2, dtype=torch.long))
        parts = offloader._parts.parameters
        assert isinstance(parts.weights, MappedWeights)
        pager = parts.weights.pager
        assert isinstance(pager, MappedPager)
        assert pager._has_room is expected
        assert parts.pages is not None
        assert parts.files is not None
        assert parts.pages._room.is_enough(lambda: 50 * nbytes) is (num_processes == 1)


@pytest.mark.parametrize("inside", [False, True], ids=["registered", "built_inside"])
def test_trained_and_frozen_weights_lie_in_files_of_their_own(inside: bool, opened: Callable[..., Offloader]) -> None:
    """While a model is built inside, nobody knows which will be trained."""
    offloader = opened(optimizer_states="offload")
    with offloader.streamed_init() if inside else nullcontext():
        model = built()
    offloader.register_module(model)
    parts = offloader._parts.parameters
    assert parts.files is not None
    assert parts.weights is not None
    is_still = {name: parts.files.is_still(one.memory) for one in parts.weights.pager.weights for name in one.names}
    assert is_still == {name: not p.requires_grad for name, p in model.named_parameters() if p.nbytes >= 16 << 10}
    plain = built()
    update = lambda parameters, lr: offloader.offload_optimizer(torch.optim.AdamW(parameters, lr=lr))  # noqa: E731
    assert same(train(model, offloader, optimizer=update), train(plain))
    assert equal_weights(model, plain)


def test_other_threads_build_as_ever(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    with offloader.streamed_init():
        thread = threading.Thread(target=built)
        thread.start()
        thread.join()
    assert offloader.stats.weights_bytes == 0
    nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH))
    assert offloader.stats.weights_bytes == 0, "the hooks are gone"


def test_without_offloaded_parameters_building_is_as_ever(opened: Callable[..., Offloader]) -> None:
    offloader = opened(parameters="keep")
    with offloader.streamed_init():
        model = built()
    assert equal_weights(model, built())
    assert offloader.stats.weights_bytes == 0


# -- the end, and what goes wrong ------------------------------------------------------------------------------------


def test_after_closing_weights_are_there_and_a_second_opening_takes_them_over_again(
    opened: Callable[..., Offloader], spill_dir: Path
) -> None:
    plain, model = built(), built()
    expected = train(plain) + train(plain)
    offloader = opened(model)
    found = train(model, offloader)
    offloader.close()
    assert not list(spill_dir.iterdir()), "no name is left"
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.0)
    assert equal_weights(model, built()) is False
    again = opened(model)
    assert again.stats.weights_bytes == 4 * (NUM_BLOCKS * 8 * WIDTH * WIDTH + VOCABULARY * WIDTH)
    assert same(found + train(model, again), expected)


def in_a_fork(work: Callable[[], object]) -> int:
    """Return the status of a fork that did it: 0, or what it died of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and forks
        child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_fork_is_refused_what_the_parent_may_change(opened: Callable[..., Offloader]) -> None:
    """It would see later values. An error where a forward asks; the end of the fork where something else does."""
    model = built()
    offloader = opened(model)
    train(model, offloader, steps=2)
    expected = [weight.detach().clone() for weight in model.parameters()]

    def forward() -> None:
        with pytest.raises(OffloaderClosedError, match=r"wait on a drive for process \d+, and this is its fork"):
            model(next(batches(1)))

    assert in_a_fork(forward) == 0
    assert in_a_fork(lambda: model.blocks[0].up.weight.sum()) == signal.SIGSEGV
    assert same(list(model.parameters()), expected)
    assert same(train(model, offloader), train(resumed(expected)))


def resumed(weights: list[torch.Tensor]) -> nn.Module:
    """A model that has these weights."""
    model = built()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return model


def test_a_fork_after_closing_has_weights_of_its_own(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    expected = train(plain)
    assert same(train(model, offloader), expected)
    offloader.close()

    def change() -> None:
        assert equal_weights(model, plain)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    assert in_a_fork(change) == 0
    assert equal_weights(model, plain)


def test_a_drive_without_room_is_an_error_before_anything_moves(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    offloader = opened()
    monkeypatch.setattr(Arena, "_preallocate", lambda self, nbytes: False)
    with pytest.raises(OutOfSpaceError, match=r"weights need [\d,]+ bytes in .*is full"):
        offloader.register_module(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


class FailsAtThird(WrappedBackend):
    """The third write is refused."""

    num_writes = 0

    def write(self, *args: Any) -> None:
        self.num_writes += 1
        if self.num_writes == 3:
            raise StorageError(5, "refused")
        super().write(*args)


def test_a_write_that_fails_leaves_every_weight_good(opened: Callable[..., Offloader]) -> None:
    plain, model = built(), built()
    offloader = opened(_wrap_backend=FailsAtThird)
    with pytest.raises(StorageError, match="refused"):
        offloader.register_module(model)
    assert equal_weights(model, plain)
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))


def test_a_read_that_fails_is_an_error_that_names_the_weight(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    offloader = opened(model)
    train(model, offloader, steps=2)

    def refuse(self: Any, start: int, nbytes: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("lightning_ssd.memory.file_mapping.FileView.bring_in", refuse)
        with pytest.raises(StorageError, match=r"weight .*weight \([\d,]+ bytes\) could not be read from its drive"):
            train(model, offloader, steps=2)
    for _ in range(2):  # the drive is well again; a read ahead that has failed meanwhile is tried anew
        assert model(next(batches(1))).isfinite().all()


def test_edits_that_the_drive_has_lost_are_told_at_close(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built()
    offloader = opened(model)

    def refuse(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", refuse)
        with pytest.raises(StorageError, match="weights or gradients that were changed could not be written"):
            offloader.close()
    assert equal_weights(model, built())


def test_nothing_frozen_is_told(opened: Callable[..., Offloader]) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="moves nothing: no weight of at least min_tensor_bytes is frozen"):
        opened(Net())


def test_other_devices_are_refused(spill_dir: Path) -> None:
    offloader = Offloader(policy=policy(), hardware=HardwareProfile(paths=[spill_dir]), device="meta")
    with pytest.raises(ConfigError, match="Use another device"):
        offloader.open()


def test_an_interrupt_ends_the_wait_for_the_drive(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has been taken over by then waits, and is right."""
    go_on = threading.Event()
    plain, model = built(), built()
    offloader = opened()
    timer = threading.Timer(0.2, os.kill, args=(os.getpid(), signal.SIGINT))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lambda fd: go_on.wait(60))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            offloader.register_module(model)
        assert not go_on.is_set()
        go_on.set()
        timer.join()
    offloader.register_module(model)
    assert same(train(model, offloader), train(plain))
    assert offloader.stats.weights_bytes > 0
