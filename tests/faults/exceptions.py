"""Exceptions on purpose, out of what a user has written and out of our own workers; see ``tests/faults/trials.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ssd import HardwareProfile, SSDOffloadStrategy
from tests.faults.models import Runner, Task, WrongBitsError, random_task
from tests.faults.world import InjectedError, Report, World

__all__ = ["EXCEPTIONS"]


def _raising(where: str) -> Callable[[World], Report]:
    """An exception out of the user's own code in one step; the step is made anew."""

    def trial(world: World) -> Report:
        def work() -> int:
            with world.offloader() as offloader:
                twins = world.twins(offloader, is_drained=world.dice.random() < 0.5)
                world.train(twins, 1, tolerated=())
                harm = _HARMS[where](twins.ours, world)
                world.train(twins, 3, tolerated=(InjectedError,), mend=harm)
            return 1

        return world.report(work)

    return trial


def _once(world: World) -> Callable[[], None]:
    calls = iter(range(1 << 30))
    wanted = world.dice.randrange(3)

    def raise_once() -> None:
        if next(calls) == wanted:
            raise InjectedError("injected")

    return raise_once


def _in_forward(runner: Runner, world: World) -> Callable[[], None]:
    stumble = _once(world)
    module = world.dice.choice([module for module in runner.model.modules() if not list(module.children())])
    return module.register_forward_hook(lambda *_: stumble()).remove


def _in_backward(runner: Runner, world: World) -> Callable[[], None]:
    stumble = _once(world)
    parameter: Any = world.dice.choice(list(runner.model.parameters()))
    handle = parameter.register_hook(lambda gradient: stumble())

    def remove() -> None:
        handle.remove()

    return remove


def _in_optimizer(runner: Runner, world: World) -> Callable[[], None]:
    """In the user's optimizer, which an offloaded one calls for each subgroup: some may have stepped by then."""
    stumble = _once(world)
    inner = getattr(runner.optimizer, "optimizer", runner.optimizer)
    real = type(inner).step

    def step(self: Any, *args: Any, **options: Any) -> Any:
        if self is inner:  # the plain twin's has the same class
            stumble()
        return real(self, *args, **options)

    patch = mock.patch.object(type(inner), "step", step)
    patch.start()
    return patch.stop


_HARMS: dict[str, Callable[[Runner, World], Callable[[], None]]] = {
    "forward": _in_forward,
    "backward": _in_backward,
    "optimizer": _in_optimizer,
}


def _in_worker(world: World) -> Report:
    """An error of no known kind inside a worker of ours."""

    def work() -> int:
        with world.offloader(world.policy(optimizer_states="keep", activations="offload")) as offloader:
            twins = world.twins(offloader)
            tier = offloader._parts.tiers.ssd
            if tier is None:
                raise RuntimeError("the policy opened no tier; please report this as a bug")
            injected: list[int] = []
            share = world.dice.choice((0.02, 0.2))

            def harmed(method: Callable[..., Any]) -> Callable[..., Any]:
                def call(*args: Any, **options: Any) -> Any:
                    if share and world.dice.random() < share:
                        injected.append(1)
                        raise InjectedError("injected")
                    return method(*args, **options)

                return call

            def mend() -> None:
                nonlocal share
                share = 0.0

            store, load = harmed(tier.mover.store), harmed(tier.mover.load)
            with mock.patch.object(tier.mover, "store", store), mock.patch.object(tier.mover, "load", load):
                world.train(twins, 4, tolerated=(InjectedError,), mend=mend)
            offloader.abort()
            return len(injected)

    return world.report(work)


_CALLBACK_HOOKS = (
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_end",
)


class _Module(pl.LightningModule):
    """A task as Lightning wants it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.model = task, task.model()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.manual_seed(self.task.seed + batch_idx)
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def _fit(task: Task, strategy: Any, *callbacks: pl.Callback) -> dict[str, Tensor]:
    module = _Module(task)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = [task.inputs(step) for step in range(3)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.state_dict()


def _in_callback(world: World) -> Report:
    """A Lightning callback raises out of ``fit``; the next ``fit`` has the bits of plain Lightning."""
    task = random_task(world.dice)

    def ours() -> SSDOffloadStrategy:
        return SSDOffloadStrategy(policy=world.policy(), hardware=HardwareProfile(paths=[world.spill]))

    def fail(*_: Any) -> None:
        raise InjectedError("injected")

    def work() -> int:
        world.spill.mkdir()
        harmful = pl.Callback()
        setattr(harmful, world.dice.choice(_CALLBACK_HOOKS), fail)
        try:
            _fit(task, ours(), harmful)
        except InjectedError as error:
            world.note(error)
        got, expected = _fit(task, ours()), _fit(task, "auto")
        if any(not torch.equal(got[name], expected[name]) for name in expected):
            raise WrongBitsError("the weights after the second fit are not those of plain Lightning")
        world.steps += 3
        world.spill.rmdir()  # an error here is a file that we have left
        return 1

    return world.report(work)


EXCEPTIONS: dict[str, Callable[[World], Report | None]] = {
    "exception in forward": _raising("forward"),
    "exception in backward": _raising("backward"),
    "exception in the optimizer": _raising("optimizer"),
    "exception in a callback": _in_callback,
    "exception in a worker": _in_worker,
}
