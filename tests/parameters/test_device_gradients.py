"""Gradients of a device that wait between backward and update: the bits of plain training."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_ssd import Offloader, OffloadPolicy
from lightning_ssd.parameters.guard.guard import is_guarded
from lightning_ssd.planning import update_memory
from tests.parameters.test_device_training import (
    NUM_BYTES,
    NUM_WEIGHTS,
    Uncounted,
)
from tests.parameters.test_device_weights import eventually
from tests.parameters.test_everything_away import (
    HOLDERS,
    gradient_twice,
)
from tests.support.offloaders import offloaders
from tests.support.weight_loops import MIN_TENSOR, Loop, batches, same

GRADIENTS = {"gradients": "offload", "optimizer_states": "offload"}
NUM_GRADIENTS = NUM_WEIGHTS
Opened = Callable[..., Offloader]


@pytest.fixture(autouse=True)
def small_subgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of this model in many parts, of which some are slices of a gradient."""
    monkeypatch.setattr(update_memory, "_MIN_SUBGROUP_BYTES", 1 << 17)


def policy(**options: Any) -> OffloadPolicy:
    chosen = GRADIENTS | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options
    if chosen["optimizer_states"] == "offload":
        chosen = {"per_parameter_optimizers": ("Uncounted", "Scribbler")} | chosen
    return OffloadPolicy(**chosen)


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Opened]:
    """Makes offloaders for a device whose copies end late; they are closed at the end."""
    with offloaders(spill_dir, policy, is_late=True) as make:
        yield make


def gone(model: nn.Module) -> list[str]:
    """Names of parameters whose gradients have no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [n for n, p in model.named_parameters() if p.grad is not None and p.grad.untyped_storage().nbytes() == 0]


def have_left(offloader: Offloader, model: nn.Module) -> bool:
    """Whether all leave in time, but for one that may be on its way again."""
    return eventually(offloader, lambda: len(gone(model)) >= NUM_GRADIENTS - 1)


def pager_of(offloader: Offloader) -> Any:
    return offloader._parts.parameters.gradients.pager  # type: ignore[union-attr]


def backward(loop: Loop, *, step: int = 0) -> None:
    ids = list(batches(step + 1))[step]
    if loop.offloader is None:
        loop._loss(ids).backward()
        return
    with loop.offloader.saved_tensors():
        loss = loop._loss(ids)
    loss.backward()
    loop.offloader.end_backward()


# -- the bits of plain training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_memory", [0, "1GiB"])
def test_gradients_leave_and_host_memory_is_first(host_memory: Any, opened: Opened) -> None:
    offloader = opened(host_memory=host_memory)
    tier = offloader._parts.parameters.gradients._tiers.ssd  # type: ignore[union-attr]
    left = []

    def look(model: nn.Module, *_: object) -> None:
        left.append(have_left(offloader, model))

    loop, plain = Loop(offloader, before_step=look), Loop()
    assert same(loop.run(3).result(), plain.run(3).result())
    assert left == [True] * 3
    written = tier.progress().written_bytes
    if host_memory == 0:
        assert written == 3 * NUM_BYTES  # once per backward: an update and a clone change nothing
    else:
        assert written == 0


def test_few_are_in_memory_in_backward_and_update(opened: Opened) -> None:
    """One is accumulated, one written, one on its way, and with these the two largest."""
    offloader = opened()
    loop = Loop(offloader, accumulate=2, before_step=lambda *_: None)
    backward(loop)
    assert have_left(offloader, loop.model)
    pager = pager_of(offloader)
    pager.resident_peak_bytes = pager.resident_bytes
    backward(loop, step=1)
    largest = max(p.nbytes for p in loop.model.parameters())
    assert pager.resident_peak_bytes <= 4 * largest < NUM_BYTES / 2
    assert have_left(offloader, loop.model)
    pager.resident_peak_bytes = pager.resident_bytes
    loop.optimizer.step()
    assert pager.resident_peak_bytes <= 5 * largest


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_brings_them_in_pieces(clip: str, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.parameters.guard.guard._PIECE_BYTES", 1 << 18)
    clip_it = {
        "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        "value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    }[clip]
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader)
        backward(loop)
        if offloader is not None:
            assert have_left(offloader, loop.model)
            pager_of(offloader).resident_peak_bytes = pager_of(offloader).resident_bytes
        total = clip_it(loop.model)
        found.append(
            [torch.as_tensor(0.0 if total is None else total), *(p.grad.clone() for p in loop.model.parameters())]
        )
        if offloader is not None:
            assert pager_of(offloader).resident_peak_bytes < NUM_BYTES / 2
    assert same(*found)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_takes_the_implementation_that_it_takes_in_plain_training(
    foreach: bool | None, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CUDA card, that for lists gives a norm of a matrix other last bits than that for one tensor."""
    called: list[str] = []
    for owner, name in [
        (torch, "_foreach_norm"),
        (torch, "_foreach_mul_"),
        (torch, "_foreach_clamp_max_"),
        (torch.linalg, "vector_norm"),
    ]:
        plain = getattr(owner, name)

        def told(*args: Any, _plain: Any = plain, _name: str = name, **kwargs: Any) -> Any:
            called.append(_name)
            return _plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, told)
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader)
        backward(loop)
        assert offloader is None or have_left(offloader, loop.model)
        called.clear()
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01, foreach=foreach)
        nn.utils.clip_grad_value_(loop.model.parameters(), 1e-4, foreach=foreach)
        found.append(list(called))
    assert found[0] == found[1]


class Scaled:
    """A training with a GradScaler whose scale is too large at first."""

    def __init__(self, offloader: Offloader | None) -> None:
        self.loop = Loop(offloader)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        self.found: list[torch.Tensor] = []
        for step in range(6):
            ids = list(batches(step + 1))[step]
            if offloader is None:
                scaler.scale(self.loop._loss(ids)).backward()
            else:
                with offloader.saved_tensors():
                    loss = scaler.scale(self.loop._loss(ids))
                loss.backward()
                offloader.end_backward()
            scaler.unscale_(self.loop.optimizer)
            self.found.append(nn.utils.clip_grad_norm_(self.loop.model.parameters(), 0.5))
            scaler.step(self.loop.optimizer)
            scaler.update()
            self.found.append(torch.tensor(scaler.get_scale()))
            self.loop.optimizer.zero_grad()
        self.found += self.loop.result()


@pytest.mark.parametrize(
    "options", [{}, {"parameters": "offload"}, {"parameters": "offload", "gradients": "keep"}], ids=str
)
def test_a_scaler(options: dict[str, Any], opened: Opened) -> None:
    plain, offloaded = Scaled(None), Scaled(opened(**options))
    assert len({float(scale) for scale in plain.found[1:12:2]}) > 1
    assert same(
        [torch.nan_to_num(one.float()) for one in offloaded.found],
        [torch.nan_to_num(one.float()) for one in plain.found],
    )


def test_identity_and_versions_are_those_of_plain_training(opened: Opened) -> None:
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader)
        backward(loop)
        held = {name: p.grad for name, p in loop.model.named_parameters()}
        versions = [[gradient._version for gradient in held.values()]]
        backward(loop, step=1)
        assert all(p.grad is held[name] for name, p in loop.model.named_parameters())
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)
        versions.append([gradient._version for gradient in held.values()])
        loop.optimizer.zero_grad(set_to_none=False)
        versions.append([gradient._version for gradient in held.values()])
        assert all(p.grad is held[name] for name, p in loop.model.named_parameters())
        found.append(versions)
    assert found[0] == found[1]


class Scribbler(torch.optim.SGD):
    """Writes to gradients as a kernel does that gets an address: no version tells."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    halved = (parameter.grad * 0.5).contiguous()
                    ctypes.memmove(parameter.grad.data_ptr(), halved.data_ptr(), halved.nbytes)
        return super().step(closure)


@pytest.mark.parametrize("make", [Scribbler, Uncounted])
def test_what_an_update_does_to_gradients_unseen_is_not_lost(make: Any, opened: Opened) -> None:
    """They are used after the update, and added to."""
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader, make=make)
        for step in range(3):
            backward(loop, step=step)
            loop.optimizer.step()
        if offloader is not None:
            assert have_left(offloader, loop.model)
        found.append([*(p.grad.clone() for p in loop.model.parameters()), *loop.result()])
    assert same(*found)


# -- programs that are not kind to gradients ---------------------------------------------------------------------------


def _array(model: nn.Module, optimizer: Any, step: int) -> None:
    model.blocks[0].up.weight.grad.numpy()[2] *= 0.5
    model.blocks[1].up.weight.grad.data.mul_(0.5)


def _views(model: nn.Module, optimizer: Any, step: int) -> None:
    model.__dict__.setdefault("held", []).append(model.blocks[1].up.weight.grad[3:7])
    model.held[-1].mul_(0.5)


def _kept(model: nn.Module, optimizer: Any, step: int) -> None:
    model.__dict__.setdefault("held", []).append(model.blocks[1].up.weight.grad)


def _exchanged(model: nn.Module, optimizer: Any, step: int) -> None:
    one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    one.grad, other.grad = other.grad, one.grad


def _one_for_two(model: nn.Module, optimizer: Any, step: int) -> None:
    model.blocks[0].up.weight.grad = model.blocks[1].up.weight.grad.clone()


def _copied(model: nn.Module, optimizer: Any, step: int) -> None:
    copies = copy.deepcopy([p.grad for p in model.parameters()])
    model.__dict__.setdefault("held", []).extend(copies)
    for parameter, gradient in zip(model.parameters(), copies, strict=True):
        parameter.grad = gradient if step % 2 else parameter.grad


def _noise(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


def _foreach(model: nn.Module, optimizer: Any, step: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_add_(gradients, [p.detach() for p in model.parameters()], alpha=1e-3)
    model.__dict__.setdefault("held", []).extend(torch._foreach_norm(gradients, 1))
    model.held.append(nn.utils.parameters_to_vector(gradients).sum())
    model.held.append(torch.stack([g.norm() for g in gradients]).max())


def _counted(model: nn.Module, optimizer: Any, step: int) -> None:
    """What lists are written to in a mode leaves no sign in versions."""
    with FlopCounterMode(display=False):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _halve(gradient: torch.Tensor) -> None:
    halved = (gradient.detach() * 0.5).contiguous()
    ctypes.memmove(gradient.data_ptr(), halved.data_ptr(), halved.nbytes)


_OPERATORS = torch.library.Library("lightning_ssd_tests", "DEF")
_OPERATORS.define("halve_(Tensor(a!) gradient) -> ()")
_OPERATORS.impl("halve_", _halve, "CPU")


def _operator(model: nn.Module, optimizer: Any, step: int) -> None:
    """An extension's, which leaves no sign."""
    for parameter in model.parameters():
        torch.ops.lightning_ssd_tests.halve_(parameter.grad)


def _shared(model: nn.Module, optimizer: Any, step: int) -> None:
    torch.empty(0).set_(model.blocks[0].up.weight.grad).mul_(0.5)
    model.blocks[1].up.weight.grad.set_(model.blocks[2].up.weight.grad.clone())


UNKIND = [_array, _views, _kept, _exchanged, _one_for_two, _copied, _noise, _foreach, _counted, _operator, _shared]


@pytest.mark.parametrize(
    ("does", "set_to_none"),
    [
        pytest.param(does, is_none, marks=() if (number + is_none) % 2 else pytest.mark.exhaustive)
        for number, does in enumerate(UNKIND)
        for is_none in (True, False)
    ],
)
def test_what_is_done_to_gradients(does: Any, set_to_none: bool, opened: Opened) -> None:
    options = {"before_step": does, "accumulate": 2, "set_to_none": set_to_none}
    plain, loop = Loop(**options).run(4), Loop(opened(), **options).run(4)
    assert same(loop.result(), plain.result())
    assert same(loop.model.__dict__.get("held", []), plain.model.__dict__.get("held", []))


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_has(holder: str, opened: Opened) -> None:
    offloader = opened()
    offloader.expect_no_optimizer()
    assert same(gradient_twice(HOLDERS[holder], offloader), gradient_twice(HOLDERS[holder], None))


def test_a_sparse_gradient_stays(opened: Opened) -> None:
    found = []
    for offloader in (None, opened()):
        torch.manual_seed(4)
        table = nn.Embedding(500, 64, sparse=True)
        if offloader is not None:
            offloader.expect_no_optimizer()
            offloader.register_module(table)
        for row in range(2):
            table(torch.tensor([1, 2, row])).pow(2).sum().backward()
        assert table.weight.grad.is_sparse
        found.append([table.weight.grad.to_dense()])
    assert same(*found)


def test_a_gradient_that_a_graph_has_saved_stays(opened: Opened) -> None:
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader)
        backward(loop)
        weight, gradient = loop.model.blocks[0].up.weight, loop.model.blocks[0].up.weight.grad
        x = torch.ones_like(weight, requires_grad=True)
        graph = (x * gradient).sum()
        if offloader is not None:
            offloader.send_out_weights()
            assert "blocks.0.up.weight" not in gone(loop.model)
        graph.backward()
        found.append([x.grad, weight.grad.clone()])
        del graph, gradient
    assert same(*found)


def test_asking_for_gradients_adds_nothing_and_holds_nothing(opened: Opened) -> None:
    offloader = opened()
    loop = Loop(offloader)
    backward(loop)
    weights = [p for p in loop.model.parameters() if p.dim() > 1]
    torch.autograd.grad(loop._loss(next(batches(1))), weights)
    offloader.send_out_weights()
    assert have_left(offloader, loop.model)


def test_an_optimizer_in_backward(opened: Opened) -> None:
    found = []
    for offloader in (None, opened()):
        loop = Loop(offloader)
        optimizers = {id(p): torch.optim.SGD([p], lr=1e-2) for p in loop.model.parameters()}

        def step(parameter: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[id(parameter)].step()
            parameter.grad = None

        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            backward(loop, step=number)
        found.append(list(loop.model.state_dict().values()))
    assert same(*found)


@pytest.mark.parametrize("does", ["forward", "end_backward"])
def test_a_hook_that_uses_the_offloader_while_autograd_adds(does: str, opened: Opened) -> None:
    """What autograd is about to add to has come, and is there until it has: it adds in C, and asks no class."""
    torch.manual_seed(0)
    model, other = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), nn.Linear(16, 16)
    plain, x = copy.deepcopy(model), torch.rand(8, 256)
    offloader = opened()
    offloader.register_module(model)
    offloader.expect_no_optimizer()
    found: list[list[str]] = []

    def hook(name: str, _: torch.Tensor) -> None:
        if does == "forward":
            with offloader.saved_tensors():
                other(torch.rand(4, 16))
        else:
            offloader.end_backward()
        found.append(gone(model))
        assert name not in found[-1]

    for name, parameter in model.named_parameters():
        parameter.register_hook(partial(hook, name))
    for _ in range(3):
        with offloader.saved_tensors():
            loss = model(x).square().sum()
        loss.backward()
        offloader.end_backward()
        plain(x).square().sum().backward()
        assert eventually(offloader, lambda: len(gone(model)) >= 2)  # one may be on its way again
    assert any(found)
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # of a cycle, which the test ends
def test_gradients_of_gradients_stay(opened: Opened) -> None:
    found = []
    for offloader in (None, opened()):
        torch.manual_seed(4)
        layer = nn.Linear(128, 128, bias=False)
        if offloader is not None:
            offloader.expect_no_optimizer()
            offloader.register_module(layer)
        for _ in range(2):
            layer(torch.ones(2, 128)).square().sum().backward(create_graph=True)
        gradient = layer.weight.grad
        assert gradient is not None
        assert not is_guarded(gradient)
        found.append([gradient.detach().clone(), *torch.autograd.grad(gradient.square().sum(), layer.weight)])
        layer.weight.grad = None
    assert same(*found)
