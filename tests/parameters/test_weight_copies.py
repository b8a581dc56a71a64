"""Autocast's copies of frozen weights that wait: none is held for backward, and every bit is that of plain PyTorch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_ssd import Offloader, OffloadPolicy
from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.parameters import casts
from tests.parameters.test_paged_weights import in_a_fork
from tests.support.interrupted_points import PointsIn
from tests.support.offloaders import offloaders

WIDTH, VOCABULARY, BATCH = 128, 300, 5
MIN_TENSOR = "16KiB"
NUM_COPIES = 2 * 4 + 1
"""Of frozen weights in a forward of :class:`Net`."""
Make = Callable[..., Offloader]


class Adapted(nn.Module):
    """A frozen layer, and a small adapter beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Block(nn.Module):
    """A frozen weight for each kind of operation that autocast casts for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Adapted()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.mixer = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(x)
        halves = self.wide(x).relu().unflatten(-1, (2, WIDTH)).permute(1, 0, 2)
        x = x + torch.bmm(halves, self.mixer).sum(0)
        return x + self.conv(x.t().unsqueeze(0)).squeeze(0).t()


class Net(nn.Module):
    def __init__(self, repeats: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self._repeats = repeats

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if self._repeats is None else self._repeats(block, x)
        return self.head(x)


def frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name)
    return model


def built(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return frozen(Net(**options))


def policy(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**{"parameters": "offload", "activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Make]:
    with offloaders(spill_dir, policy) as make:
        yield make


def ids(step: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH * 4,), generator=torch.Generator().manual_seed(step))


def registered(model: Any, offloader: Offloader | None) -> Any:
    """The model, which the offloader knows where there is one."""
    if offloader is not None:
        offloader.register_module(model)
    return model


def saved(offloader: Offloader | None) -> Any:
    return nullcontext() if offloader is None else offloader.saved_tensors()


def lowered(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return torch.autocast("cpu", dtype=dtype, **options)


def train(
    model: nn.Module,
    offloader: Offloader | None = None,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    between: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Losses, and the gradients of each step."""
    update = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(steps):
        with saved(offloader), lowered(dtype):
            loss = model(ids(step)).float().logsumexp(-1).mean()
        between()
        loss.backward()
        if offloader is not None:
            offloader.end_backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        update.step()
        update.zero_grad()
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit, also of what is no number."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


class Casts(TorchDispatchMode):
    """Notes the memory of what is cast to a lower precision and no gradient goes to."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[StorageKey] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_large = isinstance(result, torch.Tensor) and result.numel() >= WIDTH * WIDTH
        if func is torch.ops.aten._to_copy.default and is_large and result.dtype is torch.bfloat16:
            self.keys.append(StorageKey(result.untyped_storage()))
        return result

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(key.alive() for key in self.keys)


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the copies that were made again."""
    sizes = []

    def count(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(flat.numel())
        return casts.cast(flat, dtype)

    monkeypatch.setattr("lightning_ssd.activations.weight_copies.cast", count)
    return sizes


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["keep", "offload", "auto", "recompute", "recompute_offload"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_is_bit_for_bit_that_of_plain_pytorch(
    activations: str, dtype: torch.dtype, opened: Make, made_again: list[int]
) -> None:
    plain, model = built(), built()
    expected = train(plain, dtype=dtype, steps=5)
    assert same(train(model, opened(model, activations=activations), dtype=dtype, steps=5), expected)
    if "recompute" not in activations:
        # Backward wants the copies of all layers behind the first adapter.
        assert len(made_again) == 5 * (NUM_COPIES - 1)
    assert made_again


def test_no_copy_is_in_memory_between_forward_and_backward(opened: Make) -> None:
    alive = []
    for offloader in (None, opened(activations="keep")):
        model = registered(built(), offloader)
        with Casts() as made:
            train(model, offloader, steps=1, between=lambda made=made: alive.append(made.num_alive))
    assert alive[0] >= NUM_COPIES - 1
    assert alive[1] == 0


def test_no_copy_is_written(opened: Make) -> None:
    """What is saved besides are activations: as many bytes less as the copies of frozen weights have."""
    sizes = []
    for parameters in ("keep", "offload"):
        model = built()
        offloader = opened(model, parameters=parameters, activations="offload")
        train(model, offloader, steps=1)
        offloader.flush()
        sizes.append(offloader.stats.bytes_saved)
    weights = [p.numel() for p in model.parameters() if not p.requires_grad and p.dim() > 1]
    assert sizes[0] - sizes[1] == 2 * (sum(weights) - WIDTH * WIDTH)  # the first layer's is not wanted


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 1e-41, 1e-39])
def test_weights_of_any_value(value: float, opened: Make) -> None:
    models = built(), built()
    for model in models:
        with torch.no_grad():
            for block in model.blocks:
                block.wide.weight.view(-1)[::7] = value
                block.inner.frozen.weight[0, :5] = value
                block.inner.frozen.weight.view(-1)[-3:] = value
    plain, model = models
    assert same(train(model, opened(model)), train(plain))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_that_come_and_go_make_no_other_copy(num_threads: int, opened: Make) -> None:
    """In PyTorch's cast it depends on them which bits a NaN has."""
    before = torch.get_num_threads()
    plain, model = nn.Linear(509, 257, bias=False), nn.Linear(509, 257, bias=False)
    results = []
    try:
        for one in (plain, model):
            one.requires_grad_(False).weight.fill_(float("nan"))
            offloader = opened(model) if one is model else None
            torch.set_num_threads(3 - num_threads)
            x = torch.ones(3, 509, requires_grad=True)
            with saved(offloader), lowered():
                loss = one(x).sum()
            torch.set_num_threads(num_threads)
            loss.backward()
            results.append([x.grad])
    finally:
        torch.set_num_threads(before)
    assert same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpoints_of_the_model_s_own(reentrant: bool, opened: Make) -> None:
    def repeats(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    plain, model = built(repeats=repeats), built(repeats=repeats)
    for one in (plain, model):
        one.embedding.weight.requires_grad_(reentrant)
    assert same(train(model, opened(model)), train(plain))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_with_compiled_blocks(opened: Make) -> None:
    plain, model = built(), built()
    for one in (plain, model):
        for block in one.blocks:
            block.compile(backend="aot_eager")
    assert same(train(model, opened(model)), train(plain))


def test_weights_in_place(opened: Make, tmp_path: Path, made_again: list[int]) -> None:
    model = built()
    save_file({k: v for k, v in model.state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors")
    results = []
    for offloads in (False, True):
        model = built()
        model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True, strict=False)
        model.head.weight = model.embedding.weight
        frozen(model)
        offloader = opened(model) if offloads else None
        results.append(train(model, offloader))
    assert same(*results)
    assert made_again
    assert offloader is not None
    assert offloader.stats.weights_bytes > 0


def test_parts_of_one_storage(opened: Make, made_again: list[int]) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
            self.q, self.k, self.v = (nn.Parameter(part, requires_grad=False) for part in whole.chunk(3))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale) @ self.q.t() @ self.k @ self.v

    results = []
    for offloads in (False, True):
        model = Fused()
        offloader = opened(model) if offloads else None
        with saved(offloader), lowered():
            loss = model(torch.ones(2, WIDTH)).float().sum()
        loss.backward()
        results.append([loss.detach(), model.scale.grad])
    assert same(*results)
    assert len(made_again) == 3


def test_a_weight_with_strides_of_its_own(opened: Make, made_again: list[int]) -> None:
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        conv = nn.Conv2d(32, 32, 5).requires_grad_(False).to(memory_format=torch.channels_last)
        conv.weight.data = conv.weight.data.transpose(0, 3).contiguous().transpose(0, 3)
        x = torch.rand(2, 32, 9, 9, requires_grad=True)
        offloader = opened(conv) if offloads else None
        with saved(offloader), lowered():
            loss = conv(x).float().square().sum()
        loss.backward()
        results.append([loss.detach(), x.grad])
    assert same(*results)
    assert len(made_again) == 1


def test_a_weight_that_shows_its_memory_several_times(opened: Make, made_again: list[int]) -> None:
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(8192, 64, bias=False)
        linear.weight = nn.Parameter(torch.randn(1, 8192).expand(64, 8192), requires_grad=False)
        x = torch.rand(2, 8192, requires_grad=True)
        offloader = opened(linear) if offloads else None
        with saved(offloader), lowered():
            loss = linear(x).float().square().sum()
        loss.backward()
        results.append([loss.detach(), x.grad])
    assert same(*results)
    assert not made_again


# -- what is no copy, or stays one -------------------------------------------------------------------------------------


class Times(nn.Module):
    """Multiplies with its weight, and with another tensor; ``given`` is saved as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x * given + (x * 2) * self.weight


def run(given: Callable[[Times], torch.Tensor], offloader: Offloader | None = None, **options: Any) -> torch.Tensor:
    """The gradient of the input."""
    model = registered(Times(), offloader)
    x = torch.ones(WIDTH, 4 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    tensor = given(model)
    with saved(offloader):
        loss = model(x, tensor).float().square().sum()
    for action in options.get("then", ()):
        action(model, tensor)
    del tensor
    loss.backward()
    assert x.grad is not None
    return x.grad


def other_in_one_element(index: int) -> Callable[[Times], torch.Tensor]:
    def make(model: Times) -> torch.Tensor:
        copy = model.weight.detach().to(torch.bfloat16)
        copy.view(-1)[index] += 1
        return copy

    return make


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("index", [0, 12345, -1])
def test_what_differs_in_one_element_is_not_taken_for_a_copy(
    index: int, activations: str, opened: Make, made_again: list[int]
) -> None:
    given = other_in_one_element(index)
    assert torch.equal(run(given, opened(activations=activations)), run(given))
    assert made_again == []


@pytest.mark.parametrize("dtype", [torch.bits8, torch.float4_e2m1fn_x2, torch.complex64])
@pytest.mark.filterwarnings("error:Casting complex values")
def test_a_weight_that_cannot_be_cast_is_left_alone(dtype: torch.dtype, opened: Make, made_again: list[int]) -> None:
    """Though something of as many elements is saved."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.zeros(256 * WIDTH * dtype.itemsize, dtype=torch.uint8).view(dtype)
            self.codes = nn.Parameter(codes.view(256, WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.zeros(256, WIDTH, dtype=torch.bfloat16)

    model = Packed()
    x = torch.ones(256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with opened(model).saved_tensors():
        loss = model(x).sum()
    loss.backward()
    assert same([x.grad], [torch.zeros_like(x)])
    assert not made_again


def test_another_sign_of_zero_is_another_value(opened: Make, made_again: list[int]) -> None:
    def given(model: Times) -> torch.Tensor:
        model.weight.zero_()
        return -model.weight.detach().to(torch.bfloat16)

    found, expected = run(given, opened()), run(given)
    assert same([found], [expected])
    assert made_again == []


def test_what_equals_a_copy_is_made_from_the_weight(opened: Make, made_again: list[int]) -> None:
    def given(model: Times) -> torch.Tensor:
        return torch.stack([model.weight.detach().to(torch.bfloat16)])[0].clone()

    assert torch.equal(run(given, opened()), run(given))


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_copy_that_nobody_else_has_is_let_go_of(activations: str, opened: Make, made_again: list[int]) -> None:
    found = run(lambda model: model.weight.detach().to(torch.bfloat16), opened(activations=activations))
    assert torch.equal(found, run(lambda model: model.weight.detach().to(torch.bfloat16)))
    assert made_again == []  # run() has it during forward: nobody looks again after that


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c.data.mul_(3),
        lambda c: c.untyped_storage().fill_(0x3F),
        lambda c: c.view(torch.int16).numpy().fill(0x4040),
    ],
)
def test_an_edit_of_a_copy_that_no_version_shows(edit: Callable[[torch.Tensor], object], opened: Make) -> None:
    """Plain PyTorch goes on with what the copy shows then."""
    given = lambda model: model.weight.detach().to(torch.bfloat16)  # noqa: E731
    then = [lambda model, copy: edit(copy)]
    assert torch.equal(run(given, opened(), then=then), run(given, then=then))


def test_an_edit_of_a_copy_is_pytorch_s_error(opened: Make) -> None:
    messages = []
    for offloader in (None, opened()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as refused:
            run(
                lambda model: model.weight.detach().to(torch.bfloat16),
                offloader,
                then=[lambda model, copy: copy.add_(1)],
            )
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_what_an_operation_fills_after_having_saved_it(opened: Make) -> None:
    """Memory that had a copy before: the noise of ``rrelu`` is drawn when it has been saved."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.rand(WIDTH, 4 * WIDTH), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = self.weight.to(torch.bfloat16)
            y = torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.5, True)
            del noise
            return (y * 2) * self.weight

    results = []
    for offloader in (None, opened()):
        model = registered(Noisy(), offloader)
        x = torch.linspace(-1, 1, WIDTH * 4 * WIDTH).to(torch.bfloat16).view(WIDTH, -1).requires_grad_()
        torch.manual_seed(1)
        with saved(offloader):
            loss = model(x).float().square().sum()
        loss.backward()
        results.append([loss.detach(), x.grad])
    assert same(*results)


def test_trained_weights_are_left_to_autocast(opened: Make, made_again: list[int]) -> None:
    plain, model = built(), built()
    for one in (plain, model):
        one.requires_grad_(True)
    offloader = opened(model, optimizer_states="offload")
    update = offloader.offload_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for one, context, optimizer in ((plain, None, expected), (model, offloader, update)):
            with saved(context), lowered():
                loss = one(ids()).float().logsumexp(-1).mean()
            loss.backward()
            if context is not None:
                context.end_backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])
    assert made_again == []


def test_a_weight_that_stays_is_left_alone(opened: Make, made_again: list[int]) -> None:
    plain, model = built(), built()
    held = [block.wide.weight.data for block in model.blocks]
    with pytest.warns(UserWarning, match="2 weights stay in memory"):
        offloader = opened(model)
    assert same(train(model, offloader, steps=1), train(plain, steps=1))
    assert len(made_again) == NUM_COPIES - 1 - len(held)


class Shared(Times):
    """Casts once, and computes with several views of the copy."""

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        copy = self.weight.to(torch.bfloat16)
        y = x * copy + (x * given) * copy
        return y[:, :WIDTH] @ copy.t()[:WIDTH, :] + torch.nn.functional.linear(y, copy)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_views_of_one_copy_go_together(activations: str, opened: Make, made_again: list[int]) -> None:
    results = []
    for offloader in (None, opened(activations=activations)):
        model = registered(Shared(), offloader)
        x = torch.rand(WIDTH, 4 * WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        with Casts() as made, saved(offloader):
            loss = model(x, torch.ones((), dtype=torch.bfloat16)).float().square().sum()
        num_alive = made.num_alive
        loss.backward()
        results.append([loss.detach(), x.grad])
    assert same(*results)
    assert num_alive == 0
    assert len(made_again) == 4


def test_a_copy_whose_memory_was_taken(opened: Make) -> None:
    with pytest.raises(
        RuntimeError, match="had 131,072 bytes of memory and has 0 now, because its storage was resized"
    ):
        run(
            lambda model: model.weight.detach().to(torch.bfloat16),
            opened(),
            then=[lambda model, copy: copy.untyped_storage().resize_(0)],
        )


# -- the weight is another one by then ---------------------------------------------------------------------------------


def _by_version(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _past_the_version(weight: torch.Tensor) -> None:
    weight.data[-1, -1] += 1


def _by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[3, 3] = 7.0


@pytest.mark.parametrize("edit", [_by_version, _past_the_version, _by_numpy])
def test_a_weight_that_was_changed_is_an_error(edit: Callable[[torch.Tensor], None], opened: Make) -> None:
    model = built()
    offloader = opened(model)
    with offloader.saved_tensors(), lowered():
        loss = model(ids()).float().logsumexp(-1).mean()
    edit(model.blocks[1].wide.weight)
    with pytest.raises(
        RuntimeError, match=r"frozen weight blocks\.1\.wide\.weight .*other values now.*parameters='keep'"
    ):
        loss.backward()


def _replaced(model: nn.Module) -> None:
    model.blocks[1].wide.weight.data = torch.zeros_like(model.blocks[1].wide.weight)


def _unfrozen(model: nn.Module) -> None:
    model.blocks[1].wide.weight.requires_grad_(True)


def _loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [_replaced, _unfrozen, _assigned])
def test_a_change_that_leaves_the_old_bytes(change: Callable[[nn.Module], None], opened: Make) -> None:
    results = []
    for offloader in (None, opened()):
        model = registered(built(), offloader)
        adapters = [p for p in model.parameters() if p.requires_grad]
        with saved(offloader), lowered():
            loss = model(ids()).float().logsumexp(-1).mean()
        change(model)
        loss.backward()
        results.append([p.grad for p in adapters])
    assert same(*results)


def test_a_model_that_is_gone_before_backward(opened: Make) -> None:
    results = []
    for offloader in (None, opened()):
        model = registered(built(), offloader)
        adapters = [p for p in model.parameters() if p.requires_grad]
        with saved(offloader), lowered():
            loss = model(ids()).float().logsumexp(-1).mean()
        del model
        gc.collect()
        loss.backward()
        results.append([p.grad for p in adapters])
    assert same(*results)


def test_after_the_offloader_was_closed(opened: Make) -> None:
    results = []
    for offloader in (None, opened(activations="keep")):
        model = registered(built(), offloader)
        with saved(offloader), lowered():
            loss = model(ids()).float().logsumexp(-1).mean()
        if offloader is not None:
            offloader.close()
        loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*results)


def gradients_of(model: nn.Module, offloader: Offloader | None = None) -> list[torch.Tensor]:
    """Of the adapters, and the loss."""
    with saved(offloader), lowered():
        loss = model(ids()).float().logsumexp(-1).mean()
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return [loss.detach(), *found]


# -- graphs ------------------------------------------------------------------------------------------------------------


def _twice(loss: torch.Tensor, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in wanted if p.grad is not None]


def _by_grad(loss: torch.Tensor, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, wanted))


def _doubled(loss: torch.Tensor, wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    first = torch.autograd.grad(loss, wanted, create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [*(g.detach() for g in first), *(p.grad for p in wanted if p.grad is not None)]


@pytest.mark.parametrize("differentiate", [_twice, _by_grad, _doubled])
@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_graphs(differentiate: Callable[..., list[torch.Tensor]], activations: str, opened: Make) -> None:
    results = []
    for offloader in (None, opened(activations=activations)):
        model = registered(built(), offloader)
        with saved(offloader), lowered():
            loss = model(ids()).float().logsumexp(-1).mean()
        results.append(differentiate(loss, [p for p in model.parameters() if p.requires_grad]))
        if offloader is not None:
            offloader.end_backward()
    assert same(*results)


def test_a_function_that_returns_the_copy_as_a_gradient(opened: Make) -> None:
    """The leaf's gradient is memory of its own, to which a second backward adds."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(copy)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ctx.saved_tensors[0], None

    class Scaled(Times):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(x, self.weight.to(torch.bfloat16))

    results = []
    for offloader in (None, opened()):
        model = registered(Scaled(), offloader)
        x = torch.ones(WIDTH, 4 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with saved(offloader):
            loss = model(x).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        results.append([x.grad])
    assert same(*results)


@pytest.mark.parametrize("edit", [torch.Tensor.mul_, lambda copy, factor: copy.data.mul_(factor)])
def test_a_function_that_edits_one_of_two_views_of_a_copy(
    edit: Callable[[torch.Tensor, int], object], opened: Make
) -> None:
    """The other one shows it."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(copy, copy.t())
            return x @ copy

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            copy, transposed = ctx.saved_tensors
            edit(copy, 2)
            return gradient @ transposed, None

    class Multiplied(Times):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight.to(torch.bfloat16))

    results = []
    for offloader in (None, opened()):
        model = registered(Multiplied(), offloader)
        x = torch.ones(3, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with saved(offloader):
            loss = model(x).sum()
        loss.backward()
        results.append([x.grad])
    assert same(*results)


def test_autocast_that_is_off_inside(opened: Make) -> None:
    class Exact(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.inner(x.float())

    plain, model = built(), built()
    for one in (plain, model):
        one.blocks[0].inner = Exact(one.blocks[0].inner)
    assert same(train(model, opened(model)), train(plain))


def test_what_is_saved_without_gradients(opened: Make) -> None:
    def evaluate(model: nn.Module) -> torch.Tensor:
        with torch.no_grad(), lowered():
            return model(ids(9))

    plain, model = built(), built()
    seen: list[torch.Tensor] = []
    expected = train(plain, between=lambda: seen.append(evaluate(plain)))
    half = len(seen)
    assert same(train(model, opened(model), between=lambda: seen.append(evaluate(model))), expected)
    assert same(seen[half:], seen[:half])


def test_threads(opened: Make) -> None:
    """Several forwards at once, each with its backward, through one model."""
    plain, model = built(), built()
    offloader = opened(model)
    wanted = [[p for p in one.parameters() if p.requires_grad] for one in (plain, model)]

    def gradients(number: int, one: int, context: Offloader | None) -> list[torch.Tensor]:
        with saved(context), lowered():
            loss = (plain, model)[one](ids(number)).float().logsumexp(-1).mean()
        return list(torch.autograd.grad(loss, wanted[one]))

    expected = [gradients(number, 0, None) for number in range(4)]
    found: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        for _ in range(5):
            found[number] = gradients(number, 1, offloader)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[number], expected[number]) for number in range(4))


def test_a_step_that_fails_in_forward_holds_nothing(opened: Make) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    handle = model.blocks[1].conv.register_forward_hook(lambda *args: 1 / 0)
    with Casts() as made:
        with pytest.raises(ZeroDivisionError), offloader.saved_tensors(), lowered():
            model(ids())
        handle.remove()
        assert same(train(model, offloader), train(plain))
    assert offloader._opened()._weight_copies._held == {}
    del made


def test_without_weights_that_wait_nobody_looks(opened: Make) -> None:
    assert opened(built(), parameters="keep", activations="offload")._opened()._weight_copies is None


def test_an_interrupt_at_each_point_leaves_all_in_order(opened: Make) -> None:
    plain, model = built(), built()
    offloader = opened(model)
    train(model, offloader, steps=1)
    model.load_state_dict(plain.state_dict())
    expected = gradients_of(plain)
    points = PointsIn("activations/weight_copies.py", "parameters/casts.py")
    places = set()
    while (where := points.interrupt(lambda: gradients_of(model, offloader))) is not None:
        places.add(where)
        offloader.end_backward()
        assert same(gradients_of(model, offloader), expected), where
        offloader.end_backward()
        assert offloader._opened()._weight_copies._held == {}
    assert len(places) > 20


def test_a_fork_is_refused_the_copies(opened: Make) -> None:
    model = built()
    offloader = opened(model)
    with offloader.saved_tensors(), lowered():
        y = model.blocks[0].wide(torch.ones(2, WIDTH, requires_grad=True))
    node = y.grad_fn
    while not hasattr(node, "_raw_saved_mat2"):
        node = node.next_functions[-1][0] if node.next_functions[0][0] is None else node.next_functions[0][0]

    def look() -> None:
        with pytest.raises(OffloaderClosedError, match="this is its fork"):
            _ = node._saved_mat2

    assert in_a_fork(look) == 0
    assert node._saved_mat2.dtype is torch.bfloat16
