"""Frozen weights of a device under programs that are not kind to them: the bits of plain PyTorch, or an error."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.common import sent_storages
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.parameters import device_memory
from tests.parameters.test_device_weights import NUM_WEIGHTS, Scale, away, eventually, opened  # noqa: F401  # a fixture
from tests.parameters.test_paged_weights import (
    policy,
)
from tests.support.pairs import each_once
from tests.support.pretended import PretendedDevice
from tests.support.pretended_training import on, pretended_device
from tests.support.pretended_weights import weights_of
from tests.support.weight_loops import WIDTH, batches, built, same, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]
Opened = Callable[..., Offloader]
Leave = Callable[[], object]


def assert_equal_to_plain(
    make: Callable[[], Any],
    run: Callable[[Any, Leave], Any],
    opened: Opened,  # noqa: F811
) -> None:
    """``run`` gets a model, and what sends its weights out as soon as they may."""
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = make()
        leave: Leave = lambda: None  # noqa: E731
        if is_ours:
            offloader = opened(model)
            names = away(model)
            assert names

            def leave(offloader: Offloader = offloader, model: Any = model) -> None:
                for _ in range(20):
                    offloader.send_out_weights()
                    time.sleep(0.005)

        results.append(run(model, leave))
    expected, got = ([value] if isinstance(value, torch.Tensor) else list(value) for value in results)
    assert same(got, expected)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", ["view", "row", "detach"])
def test_an_edit_of_the_data_of_a_view_is_not_lost(edit: str, opened: Opened) -> None:  # noqa: F811
    def run(model: nn.Module, leave: Leave) -> torch.Tensor:
        weight = model.embedding.weight
        {"view": lambda: weight.view(-1), "row": lambda: weight[3], "detach": weight.detach}[edit]().data.mul_(2.0)
        leave()
        return model(torch.tensor([[3, 4]]))

    assert_equal_to_plain(built, run, opened)


@pytest.mark.parametrize("kind", ["encoder", "layer", "attention"])
def test_modules_choose_the_implementation_that_they_choose_in_plain_pytorch(
    kind: str,
    opened: Opened,  # noqa: F811
) -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        attention = nn.MultiheadAttention(128, 4, batch_first=True)
        model = {"encoder": nn.TransformerEncoder(layer, 3), "layer": layer, "attention": attention}[kind]
        return model.requires_grad_(False).eval()

    def run(model: nn.Module, leave: Leave) -> torch.Tensor:
        x, padding = torch.randn(3, 8, 128), torch.zeros(3, 8, dtype=torch.bool)
        padding[0, 2:] = padding[1, 5:] = padding[2, 7:] = True
        with torch.no_grad():
            if kind == "attention":
                return model(x, x, x, need_weights=False)[0]
            return model(x, src_key_padding_mask=padding)

    assert_equal_to_plain(make, run, opened)


def test_a_graph_sees_the_data_that_a_parameter_was_given(opened: Opened) -> None:  # noqa: F811
    results = []
    for is_ours in (False, True):
        model, x = Scale(), torch.ones(64, 256, requires_grad=True)
        with opened(model).saved_tensors() if is_ours else nullcontext():
            loss = model(x).sum()
        model.weight.data = torch.zeros(64, 256)
        loss.backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_pointers_stay_what_they_are_until_backward_is_over(opened: Opened) -> None:  # noqa: F811
    def run(model: nn.Module, leave: Leave) -> torch.Tensor:
        pointers = [(p.data_ptr(), p.numel()) for p in model.parameters()]
        assert len({address for address, _ in pointers}) == len(pointers)
        read = [ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[size - 1] for address, size in pointers]
        return torch.tensor(read)

    assert_equal_to_plain(built, run, opened)


# -- memory that is not there ------------------------------------------------------------------------------------------


def test_a_weight_that_an_array_may_show_stays(opened: Opened) -> None:  # noqa: F811
    """One of CuPy's, say, holds the tensor, and reads its memory whenever it likes."""
    plain, model = built(), built()
    offloader = opened(model)
    weight = model.blocks[0].up.weight
    with pytest.raises(AttributeError, match="CUDA"):  # there is no such array of a CPU's memory
        _ = weight.__cuda_array_interface__
    place = weight.data_ptr()
    assert same(train(model, offloader), train(plain))
    assert eventually(offloader, lambda: len(away(model)) >= NUM_WEIGHTS - 2)  # the next unit may be there
    assert type(weight) is nn.Parameter, "it waits still"
    assert weight.data_ptr() == place


def test_hooks_of_somebody_else_around_a_use_outside_of_the_unit(opened: Opened) -> None:  # noqa: F811
    def run(model: nn.Module, leave: Leave) -> torch.Tensor:
        x = torch.randn(7, 4 * WIDTH, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = x @ model.blocks[1].up.weight
        leave()
        y.sum().backward()
        return x.grad

    assert_equal_to_plain(built, run, opened)


GIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Parameter": lambda weight: nn.Parameter(weight).detach() + 0,
    "its class": lambda weight: type(weight)(weight.data, requires_grad=False).sum(),
    "make_subclass": lambda weight: torch.Tensor._make_subclass(torch.Tensor, weight) + 0,
    "set_": lambda weight: torch.empty(0).set_(weight) + 0,
    "source of set_": lambda weight: torch.empty(0).set_(source=weight).mul_(2) + weight,
    "data of a tensor": lambda weight: _with_data(torch.zeros(64, 256), weight) + 0,
    "data of a parameter": lambda weight: _with_data(nn.Parameter(torch.zeros(64, 256)), weight).detach() + 0,
    "grad": lambda weight: torch.func.grad(lambda w: w.square().sum())(weight),
    "jacrev": lambda weight: torch.func.jacrev(lambda w: w.sum(1))(weight),
    "vjp": lambda weight: torch.func.vjp(torch.sin, weight)[1](torch.ones(64, 256))[0],
    "functionalize": lambda weight: torch.func.functionalize(lambda w: w * 2)(weight),
    "linearize": lambda weight: torch.func.linearize(torch.sin, weight)[1](torch.ones(64, 256)),
    "compiled": lambda weight: torch.compile(lambda w: w.sin(), backend="aot_eager")(weight),
    "gradient": lambda weight: _prehook(weight, "argument"),
    "gradient of a function": lambda weight: _prehook(weight, "backward"),
}


def _with_data(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor.data = value
    return tensor


@pytest.mark.parametrize("name", GIVES)
def test_who_is_given_a_weight_that_is_away(name: str, opened: Opened) -> None:  # noqa: F811
    assert_equal_to_plain(Scale, lambda model, leave: GIVES[name](model.weight), opened)


def _prehook(weight: torch.Tensor, where: str) -> torch.Tensor:
    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return weight

    x = torch.ones(64, 256, requires_grad=True)
    if where == "hook":
        x.register_hook(lambda gradient: weight)
    (Gives.apply(x) if where == "backward" else x * 2).backward(weight if where == "argument" else torch.ones(64, 256))
    return x.grad


def _of_a_class(weight: torch.Tensor) -> torch.Tensor:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return (torch.ones(64, 256).as_subclass(Own) * weight).as_subclass(torch.Tensor)


IN_C: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.tensor": torch.tensor,
    "as_tensor": lambda weight: torch.as_tensor(weight, dtype=torch.float64),
    "asarray": lambda weight: torch.asarray(weight, copy=True),
    "new_tensor": lambda weight: torch.ones(1).new_tensor(weight),
    "Tensor": lambda weight: torch.Tensor(weight) + 0,
    "nested": lambda weight: torch.nested.nested_tensor([weight, weight]).to_padded_tensor(0.0),
    "sparse": lambda weight: torch.sparse_coo_tensor(torch.arange(64)[None], weight, (64, 256)).to_dense(),
    "to_dlpack": lambda weight: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight)) + 0,
    "gradient of a hook": lambda weight: _prehook(weight, "hook"),
    "another class": _of_a_class,
    "script": lambda weight: torch.jit.script(_scripted)(weight),
}


def _scripted(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


_CRASHES = pytest.mark.xfail(strict=True, reason="this entry in C asks no class: it reads memory that is not there")


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=_CRASHES) for name in IN_C), "control"])
def test_entries_in_c(name: str, opened: Opened) -> None:  # noqa: F811
    """In a process of its own, which may not survive it. The fork has no offloader: away must be an error, no crash."""
    weight = Scale().weight
    holder = nn.Module()
    holder.weight = weight
    opened(holder)
    assert away(holder)
    pid = os.fork()
    if pid == 0:
        os.close(2)
        try:
            IN_C.get(name, torch.sin)(weight)
        except OffloaderClosedError:
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- what is left ------------------------------------------------------------------------------------------------------


def test_a_weight_that_was_sent_to_another_process_stays(
    opened: Opened,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other process would see no update of memory that this one has given back."""
    model = built()
    offloader = opened(model)
    *_, sent = offloader._parts.parameters.weights.pager.by_storage  # type: ignore[union-attr]  # no first one, which is fetched ahead
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    monkeypatch.setattr(device_memory, "is_in_other_processes", lambda storage: storage._cdata == sent)
    train(model, offloader)
    for _ in range(20):
        offloader.send_out_weights()
        time.sleep(0.005)
    with torch._C.DisableTorchFunctionSubclass():
        stays = [p for p in model.parameters() if p.untyped_storage()._cdata == sent]
        assert stays
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in stays)


def test_sending_a_weight_is_noted_while_others_wait(
    opened: Opened,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what all memory of a card is sent with: PyTorch's cache has one storage of each allocation alone."""
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: None, raising=False)
    model = built()
    offloader = opened(model)
    assert eventually(offloader, lambda: len(away(model)) == NUM_WEIGHTS)
    monkeypatch.setattr(sent_storages, "_sent", sent := {})
    weights = [model.blocks[number].up.weight for number in (1, 2)]
    for weight in weights:
        weight.untyped_storage()._share_cuda_()
    with torch._C.DisableTorchFunctionSubclass():
        assert {weight.untyped_storage()._cdata for weight in weights} == set(sent)


@pytest.mark.parametrize("alias", [False, True])
def test_what_a_graph_has_saved_is_not_swapped(alias: bool, opened: Opened) -> None:  # noqa: F811
    """As in plain PyTorch, but for an alias, of which that keeps the memory."""
    x = torch.ones(2, 4 * WIDTH, requires_grad=True)
    for offloads in (False, True):
        model = built()
        with opened(model).saved_tensors() if offloads else nullcontext():
            saved = model.blocks[3].down.weight
            loss = nn.functional.linear(x, saved.detach() if alias else saved).sum()
        plain_swaps = alias and not offloads
        with nullcontext() if plain_swaps else pytest.raises(RuntimeError, match="swap" if offloads else "edge"):
            torch.utils.swap_tensors(saved, nn.Parameter(torch.zeros_like(saved), requires_grad=False))
        loss.backward()


def test_the_copy_of_a_weight_that_was_given_other_data_is_given_back(opened: Opened) -> None:  # noqa: F811
    model = Scale()
    offloader = opened(model, host_memory="64MiB")
    weights = offloader._parts.parameters.weights
    used = []
    for _ in range(4):
        model.weight.data = torch.randn(64, 256)
        weights.register_module(model)
        used.append(weights._tiers.host.used_bytes)
    assert len(set(used)) == 1


def test_parts_of_a_storage_of_which_one_is_gone(opened: Opened) -> None:  # noqa: F811
    model = nn.Module()
    both = torch.randn(128, 256)
    model.one = nn.Parameter(both[:64], requires_grad=False)
    model.other = nn.Parameter(both[64:], requires_grad=False)
    del both
    offloader = opened(model)
    assert away(model) == ["one", "other"]
    del model.other
    model.one.sum()
    gc.collect()
    deadline_s = time.monotonic() + 3
    while not away(model) and time.monotonic() < deadline_s:
        offloader.send_out_weights()
        time.sleep(0.01)
    assert away(model) == ["one"]


# -- races -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def raced(spill_dir: Path) -> Callable[..., list[str]]:
    """Runs a program with and without an offloader; gives the faults."""

    def run(program: Callable[[Offloader | None, PretendedDevice], Any], seed: int, **options: Any) -> list[str]:
        hardware = HardwareProfile(
            paths=[spill_dir], allow_unsuitable_paths=True, host_memory=options.pop("host_memory", 0)
        )
        with pretended_device(seed=seed, lag_s=0.001 * (seed + 1)) as device, weights_of(device):
            expected = program(None, device)
            offloader = Offloader(policy=policy(**options), hardware=hardware, **on(device))
            got = program(offloader, device)
            offloader.close()
        assert same(got, expected)
        return device.faults

    return run


def _trained(offloader: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
    model, found = built(), []
    if offloader is not None:
        offloader.open(model)

    def between(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model.blocks[step % 4].up.weight.mul_(1.1)
            model.blocks[2].down.weight.data.mul_(0.9)
            with device.stream("side"):
                device.wait_stream("main")
                found.append(model(next(batches(1))))
            device.wait_stream("side")

    return train(model, offloader, between=between) + found


@each_once("activations, host_memory, seed", ["keep", "offload", "recompute"], [0, "1MiB", "1GiB"], range(2))
def test_no_race(seed: int, host_memory: Any, activations: str, raced: Callable[..., list[str]]) -> None:
    assert raced(_trained, seed, host_memory=host_memory, activations=activations) == []


class Aside(nn.Module):
    """Uses one of its weights on a stream of its own, which the model joins at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, constant: torch.Tensor, device: PretendedDevice) -> torch.Tensor:
        with device.stream("side"):
            self.found = nn.functional.linear(constant, self.there.weight)
        return x + self.here(x)[:, :WIDTH]


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_the_model_s_own_that_is_joined_later(seed: int, raced: Callable[..., list[str]]) -> None:
    def program(offloader: Offloader | None, device: PretendedDevice) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Aside() for _ in range(4)).requires_grad_(False)
        x, constant = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
        with device.stream("side"):
            device.wait_stream("main")
        if offloader is not None:
            offloader.open(blocks)
        found = []
        for _ in range(3):
            with torch.no_grad():
                y = x
                for block in blocks:
                    y = block(y, constant, device)
                device.wait_stream("side")
                found += [y, *(block.found + 0 for block in blocks)]
        return found

    assert raced(program, seed) == []
