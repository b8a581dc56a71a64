"""Trained weights, gradients and optimizer states on a drive, all at once: the bits of plain training."""

from __future__ import annotations

import copy
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import ConfigError, OutOfSpaceError, StorageError
from lightning_ssd.parameters.files import mapped_storage, weight_files, write_back
from tests.parameters.test_paged_weights import MIN_TENSOR, VOCABULARY, Net, batches, equal_weights, in_a_fork, same
from tests.support.offloaders import offloaders

EVERYTHING = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}
Between = Callable[[nn.Module, torch.optim.Optimizer, int], object]


def nothing(*_: object) -> None:
    """No more than training."""


class Loop:
    """A training loop, with an offloader or without."""

    accumulate = 1
    set_to_none = True
    autocast = False

    def __init__(
        self,
        offloader: Offloader | None = None,
        *,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        before_step: Between = nothing,
        after_step: Between = nothing,
        dtype: torch.dtype = torch.float32,
        repeats: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net(repeats=repeats).to(dtype)
        self.offloader = offloader
        self._before, self._after = before_step, after_step
        self.__dict__.update(options)
        if offloader is not None:
            offloader.register_module(self.model)
        self.optimizer = make(self.model.parameters(), lr=1e-2)
        if offloader is not None:
            self.optimizer = offloader.offload_optimizer(self.optimizer)
        self.found: list[torch.Tensor] = []

    def _loss(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return self.model(ids).float().logsumexp(-1).mean()

    def run(self, steps: int = 4) -> Loop:
        for step in range(steps):
            for ids in list(batches(steps * self.accumulate))[step * self.accumulate :][: self.accumulate]:
                if self.offloader is None:
                    loss = self._loss(ids)
                    loss.backward()
                else:
                    with self.offloader.saved_tensors():
                        loss = self._loss(ids)
                    loss.backward()
                    self.offloader.end_backward()
                self.found.append(loss.detach())
                del loss  # PyTorch lets weights that a graph has be swapped, and spoils what the next graph shares
            self._before(self.model, self.optimizer, step)
            self.found += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)
            self._after(self.model, self.optimizer, step)
        return self

    def result(self) -> list[torch.Tensor]:
        """Losses, gradients, weights, states."""
        states = self.optimizer.state_dict()["state"]
        held = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
        return [*self.found, *self.model.state_dict().values(), *(value.clone() for value in held)]


def policy(**options: Any) -> OffloadPolicy:
    return OffloadPolicy(**EVERYTHING | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR} | options)


@pytest.fixture
def opened(spill_dir: Path) -> Iterator[Callable[..., Offloader]]:
    with offloaders(spill_dir, policy) as make:
        yield make


def clip_norm(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_value(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def edit_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.blocks[0].up.weight.grad.mul_(0.5)
    model.blocks[1].up.weight.grad = model.blocks[1].up.weight.grad * 2
    model.blocks[2].up.weight.grad = None


def clamp(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def repeated(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


PROGRAMS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"make": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True)},
    "adafactor": {"make": torch.optim.Adafactor},
    "fused": {"make": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)},
    "accumulate": {"accumulate": 3},
    "zeros": {"set_to_none": False},
    "accumulated zeros": {"accumulate": 2, "set_to_none": False},
    "clip norm": {"before_step": clip_norm},
    "clip value": {"before_step": clip_value},
    "edited gradients": {"before_step": edit_gradients},
    "clamped weights": {"after_step": clamp},
    "autocast": {"autocast": True},
    "bfloat16": {"dtype": torch.bfloat16},
    "checkpointed": {"repeats": repeated},
}


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_bits(program: str, activations: str, opened: Callable[..., Offloader]) -> None:
    options = PROGRAMS[program]
    expected = Loop(**options).run().result()
    offloader = opened(activations=activations)
    assert same(Loop(offloader, **options).run().result(), expected)
    assert offloader.stats.weights_bytes > 4 * VOCABULARY * 2


def test_gradients_wait_in_the_files(opened: Callable[..., Offloader]) -> None:
    seen = []

    def look(model: nn.Module, *_: object) -> None:
        seen.append([mapped_storage.is_mapped(p.grad.untyped_storage()) for p in model.parameters() if p.dim() > 1])

    Loop(opened(), before_step=look).run(2)
    assert seen == [[True] * 13] * 2


def test_a_gradient_that_somebody_keeps_is_not_written_over(opened: Callable[..., Offloader]) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(model: nn.Module, *_: object) -> None:
        gradient = model.blocks[0].up.weight.grad
        assert gradient is not None
        kept.append((gradient[1:], gradient[1:].clone()))

    Loop(opened(), before_step=keep).run(4)
    assert all(torch.equal(held, copied) for held, copied in kept)
    assert len({held.data_ptr() for held, _ in kept}) == 4


def gradient_twice(hold: Callable[[nn.Parameter], Any], offloader: Offloader | None) -> list[torch.Tensor]:
    """What a holder sees after two backwards, and the gradient itself."""
    torch.manual_seed(4)
    layer = nn.Linear(128, 128, bias=False)
    held = hold(layer.weight)
    if offloader is not None:
        offloader.register_module(layer)
    for scale in (1.0, 2.0):
        (layer(torch.ones(2, 128)) * scale).square().sum().backward()
    seen = held() if callable(held) else held
    gradient = layer.weight.grad
    assert gradient is not None
    return [torch.as_tensor(seen).clone(), gradient.clone()]


def _set(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    parameter.grad = gradient
    return gradient


def _array(parameter: nn.Parameter) -> Any:
    array = torch.zeros(128, 128).numpy()
    parameter.grad = torch.from_numpy(array)
    return array


def _hooked(parameter: nn.Parameter) -> Any:
    kept: list[torch.Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    return lambda: kept[0]


HOLDERS = {
    "a buffer of one's own": lambda p: _set(p, torch.zeros(128, 128)),
    "an array": _array,
    "shared memory": lambda p: _set(p, torch.zeros(128, 128).share_memory_()),
    "a view": lambda p: _set(p, torch.zeros(128, 128))[1:],
    "another hook": _hooked,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_gradient_that_somebody_has_is_not_exchanged(holder: str, opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    offloader.expect_no_optimizer()
    assert same(gradient_twice(HOLDERS[holder], offloader), gradient_twice(HOLDERS[holder], None))


def test_one_gradient_of_two_parameters(opened: Callable[..., Offloader]) -> None:
    found = []
    for offloader in (None, opened()):
        torch.manual_seed(4)
        layers = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        if offloader is not None:
            offloader.expect_no_optimizer()
            offloader.register_module(layers)
        layers[0].weight.grad = layers[1].weight.grad = torch.zeros(128, 128)
        layers(torch.ones(2, 128)).sum().backward()
        found.append([layer.weight.grad for layer in layers])
    assert same(*found)


def test_a_storage_object_that_was_kept_is_not_written_over(opened: Callable[..., Offloader]) -> None:
    kept = []

    def keep(model: nn.Module, *_: object) -> None:
        storage = model.blocks[0].up.weight.grad.untyped_storage()
        kept.append((storage, bytes(storage[:64])))

    Loop(opened(), before_step=keep).run(4)
    assert all(bytes(storage[:64]) == seen for storage, seen in kept)


def test_a_fork_does_not_reach_gradients_that_were_kept(opened: Callable[..., Offloader]) -> None:
    kept: list[torch.Tensor] = []

    def keep(model: nn.Module, *_: object) -> None:
        gradient = model.blocks[0].up.weight.grad
        assert gradient is not None
        kept.append(gradient)

    Loop(opened(), before_step=keep).run(3)
    before = [gradient.clone() for gradient in kept]
    assert in_a_fork(lambda: kept[0].zero_()) == signal.SIGSEGV
    assert same(kept, before)


def test_tensors_can_be_swapped(opened: Callable[..., Offloader]) -> None:
    loop = Loop(opened(parameters="keep")).run(1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        loop.optimizer.zero_grad()
        loop.model.load_state_dict({name: value.clone() for name, value in loop.model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("is_closed", [False, True])
def test_hooks_of_the_user_run_after_a_swap(is_closed: bool, opened: Callable[..., Offloader]) -> None:
    """A swap leaves a dictionary of hooks that nobody calls; one of ours would swallow the user's."""
    offloader, called = opened(), []
    loop = Loop(offloader).run(1)
    if is_closed:
        offloader.close()
    weight = loop.model.blocks[0].up.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones_like(weight)))
    weight.register_post_accumulate_grad_hook(called.append)
    loop._loss(next(batches(1))).backward()
    assert len(called) == 1


def test_threads_train_side_by_side(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    offloader.expect_no_optimizer()
    expected, found = [], []

    def train(into: list[torch.Tensor], offload: bool) -> None:
        model = nn.Linear(128, 128, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        if offload:
            offloader.register_module(model)
        for _ in range(20):
            model(torch.ones(2, 128)).sum().backward()
            if offload:
                offloader.send_out_weights()
        assert model.weight.grad is not None
        into.append(model.weight.grad.clone())

    train(expected, offload=False)
    threads = [threading.Thread(target=train, args=(found, True)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(found, expected * 4)


def test_the_place_of_gradients_that_were_kept_comes_back(opened: Callable[..., Offloader]) -> None:
    kept: list[torch.Tensor] = []

    def keep(model: nn.Module, *_: object) -> None:
        kept[:] = [p.grad for p in model.parameters() if p.grad is not None]

    offloader = opened()
    loop = Loop(offloader, before_step=keep).run(3)
    used = sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas)
    loop.run(6)
    assert sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas) == used


def test_gradients_of_models_that_are_gone_give_their_place_back(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    offloader.expect_no_optimizer()
    used = []
    for _ in range(4):
        model = Net()
        offloader.register_module(model)
        with offloader.saved_tensors():
            loss = model(next(batches(1))).sum()
        loss.backward()
        offloader.end_backward()
        del model, loss
        gc.collect()
        offloader.send_out_weights()
        used.append(sum(arena.used_bytes for arena in offloader._parts.parameters.files._arenas))
    assert used[1:] == used[:1] * 3


def test_a_gradient_without_a_place_stays_in_memory(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfSpaceError(28, "full")

    expected = Loop().run().result()
    loop = Loop(opened())
    monkeypatch.setattr(weight_files.WeightFiles, "map_new", refuse)
    with pytest.warns(UserWarning, match=r"a gradient has no place to wait in .*stays in memory") as told:
        loop.run()
    assert len(told) == 1
    assert same(loop.result(), expected)


def test_memory_of_gradients_is_used_again(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    loop = Loop(offloader).run(1)
    size = offloader.stats.disk_bytes
    loop.run(3)
    assert offloader.stats.disk_bytes == size


def test_resuming_from_state_dicts(opened: Callable[..., Offloader]) -> None:
    plain = Loop().run(4)
    first = Loop(opened()).run(2)
    saved = {name: value.clone() for name, value in first.model.state_dict().items()}, first.optimizer.state_dict()
    second = Loop(opened())
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    again = Loop().run(2)
    third = Loop()
    third.model.load_state_dict(again.model.state_dict())
    third.optimizer.load_state_dict(again.optimizer.state_dict())
    assert same(second.run(2).result(), third.run(2).result())
    assert equal_weights(first.model, again.model)
    assert not equal_weights(plain.model, again.model)


def test_after_closing_training_goes_on_in_memory(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    loop = Loop(offloader, make=torch.optim.SGD).run(2)
    model = loop.model
    offloader.close()
    plain = Loop(make=torch.optim.SGD).run(2)
    for one in (plain, loop):
        one.offloader = None
        one.optimizer = torch.optim.SGD(one.model.parameters(), lr=1e-2)
        one.found.clear()
    assert same(loop.run(2).result(), plain.run(2).result())
    assert not any(mapped_storage.is_mapped(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None)


def test_a_fork_trains_by_itself_what_was_copied_before(opened: Callable[..., Offloader]) -> None:
    loop = Loop(opened()).run(1)
    twin = copy.deepcopy(loop.model)

    def train() -> None:
        twin(next(batches(1))).sum().backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.sub_(parameter.grad)

    expected = [value.clone() for value in loop.model.state_dict().values()]
    assert in_a_fork(train) == 0
    assert same(list(loop.model.state_dict().values()), expected)


def test_what_the_drive_has_lost_ends_training(
    opened: Callable[..., Offloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(opened())
    monkeypatch.setattr(write_back, "_sync_file_range", lambda *_: -1)
    with pytest.raises(StorageError, match="weights or gradients that were changed could not be written"):
        loop.run(200)  # a thread looks, which a busy machine may keep from it for some steps


def test_nothing_is_left_of_a_model_that_is_gone(opened: Callable[..., Offloader]) -> None:
    offloader = opened()
    loop = Loop(offloader).run(1)
    keys = [mapped_storage._mapped[p.untyped_storage()._cdata] for p in loop.model.parameters() if p.dim() > 1]
    offloader.close()
    del loop
    gc.collect()
    assert not any(key.alive() for key, _ in keys)


def test_gradients_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradients='offload' needs optimizer_states='offload'; without it"):
        OffloadPolicy(gradients="offload")


def test_several_processes_are_refused(spill_dir: Path) -> None:
    policy = OffloadPolicy(gradients="offload", optimizer_states="offload")
    offloader = Offloader(policy=policy, hardware=HardwareProfile(paths=[spill_dir]), agree=list)
    with pytest.raises(ConfigError, match="gradients='offload' got several processes"):
        offloader.open()
