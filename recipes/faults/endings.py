"""Ends, stops and forks of a process, and several trainings at once; see ``recipes/faults/trials.py``."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_ssd import HardwareProfile, Offloader
from lightning_ssd.errors import OffloaderClosedError, StorageError
from recipes.faults.models import KINDS, Twins
from recipes.faults.world import Report, World

__all__ = ["ENDINGS"]

_FOREVER_S = 40.0
_NO_CHANCE = ("convolution", "recurrent")
"""Models that draw no random numbers, for trainings that share PyTorch's one generator."""
_kept: list[Any] = []  # what a program that just ends leaves in its globals


# -- ends of the process ---------------------------------------------------------------------------------------------


def _until_killed(world: World) -> Report:
    """Trains until a signal comes. KeyboardInterrupt is what SIGINT becomes: everything is closed on its way."""

    def work() -> int:
        if early := world.dice.random() < 0.3:
            world.begin()  # so that some are hit while they open
        with world.offloader() as offloader:
            twins = world.twins(offloader, is_drained=world.dice.random() < 0.5)
            if not early:
                world.begin()
            end_s = time.monotonic() + _FOREVER_S
            while time.monotonic() < end_s:
                twins.step()
                world.steps += 1
        raise TimeoutError("no signal came")

    try:
        return world.report(work)
    except KeyboardInterrupt:
        return {"outcome": "killed", "note": "KeyboardInterrupt", "steps": world.steps}


def _clean(world: World) -> Report:
    """The next run after a killed one."""

    def work() -> None:
        with world.offloader() as offloader:
            world.begin()
            world.train(world.twins(offloader, is_drained=world.dice.random() < 0.5), 3, tolerated=())

    return world.report(work)


def _steady(world: World) -> Report:
    """Trains for most of a second, for who stops and continues the process meanwhile."""

    def work() -> None:
        with world.offloader() as offloader:
            twins = world.twins(offloader)
            world.begin()
            end_s = time.monotonic() + 0.8
            while time.monotonic() < end_s:
                world.train(twins, 1, tolerated=())

    return world.report(work)


def _clock_jumps(world: World) -> Report:
    """The wall clock goes back and forth by up to a year."""
    real, real_ns = time.time, time.time_ns

    def seconds() -> float:
        return real() + world.dice.uniform(-3e7, 3e7)

    def nanoseconds() -> int:
        return real_ns() + world.dice.randint(-(10**16), 10**16)

    with mock.patch.object(time, "time", seconds), mock.patch.object(time, "time_ns", nanoseconds):
        return _clean(world)


def _exit_without_teardown(world: World) -> Report:
    """The program ends with an open offloader, writes under way, and a graph that nobody has gone back through."""
    world.ends_regularly = True
    world.spill.mkdir()
    offloader = Offloader(policy=world.policy(), hardware=HardwareProfile(paths=[world.spill])).open()
    twins = world.twins(offloader, is_drained=False)
    world.train(twins, 2, tolerated=())
    current = offloader.saved_tensors()
    current.__enter__()
    loss = twins.ours.model(twins.ours.task.inputs(0)).sum()
    if world.dice.random() < 0.5:
        current.__exit__(None, None, None)
    _kept.extend([offloader, twins, loss, current])
    return {"outcome": "exact", "steps": world.steps}


def _fork_after_setup(world: World) -> Report | None:
    """A fork in the middle of a step: the child is told off, ends like any program, and harms the parent in nothing."""
    world.spill.mkdir()
    offloader = Offloader(policy=world.policy(), hardware=HardwareProfile(paths=[world.spill])).open()
    # Not batch norm: the pass of its own below would move its statistics on, which the twin knows nothing of.
    twins = world.twins(offloader, is_drained=False, kinds=("perceptron", "attention", "recurrent"))
    world.train(twins, 2, tolerated=())
    with offloader.saved_tensors():
        loss = twins.ours.model(twins.ours.task.inputs(0)).sum()
    held = world.dice.random() < 0.5 and offloader._cache is not None
    lock = offloader._cache.accounting.lock if held and offloader._cache is not None else threading.Lock()
    with lock:  # as another thread might at the moment of the fork
        pid = os.fork()
    world.ends_regularly = pid == 0
    if pid == 0:
        _try_everything(offloader, twins, loss)
        _kept.extend([offloader, twins, loss])
        return None
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def work() -> int:
        torch.autograd.backward(loss)
        offloader.end_backward()
        world.train(twins, 2, tolerated=())
        offloader.close()
        return 1

    report = world.report(work)
    return report if status == 0 else {"outcome": "broken", "note": f"the fork ended with code {status}"}


def _try_everything(offloader: Offloader, twins: Twins, loss: Tensor) -> None:
    """Each use of a parent's offloader must end, with our error or with none."""
    uses: list[Callable[[], object]] = [
        lambda: offloader.saved_tensors().__enter__(),
        lambda: torch.autograd.backward(loss),
        offloader.end_backward,
        offloader.flush,
        offloader.wait_for_plan,
        lambda: offloader.stats,
        offloader.reset_peaks,
        offloader.drain_metrics,
        lambda: offloader.machine,
        offloader.abort,
        lambda: twins.ours.optimizer.state_dict(),
    ]
    for use in uses:
        try:
            use()
        except (OffloaderClosedError, StorageError):
            continue
        except BaseException:
            traceback.print_exc()
            os._exit(9)


def _two_trainers(world: World) -> Report:
    """Two offloaders of one process in one directory: by turns in one thread, or each in a thread of its own."""

    def work() -> None:
        kinds = _NO_CHANCE if (threaded := world.dice.random() < 0.5) else KINDS
        with world.offloader() as one, Offloader(policy=world.policy(), hardware=one.hardware) as other:
            both = [world.twins(offloader, kinds=kinds) for offloader in (one, other)]
            if not threaded:
                for _ in range(3):
                    for twins in both:
                        world.train(twins, 1, tolerated=())
                return
            failed: list[BaseException] = []

            def train(twins: Twins) -> None:
                try:
                    for _ in range(4):
                        twins.step()
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=train, args=(twins,)) for twins in both]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if failed:
                raise failed[0]
            world.steps += 4

    return world.report(work)


def _two_processes(world: World) -> Report:
    """Two processes with one directory; either may be the last to leave."""
    world.spill.mkdir()
    pid = os.fork()
    if pid == 0:
        world.dice.seed(world.dice.random() + 1)
    report = _train_and_leave(world)
    if pid == 0:
        os._exit(0 if report["outcome"] == "exact" else 8)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    world.spill.rmdir()  # an error here is a file that one of them has left
    return report if status == 0 else {"outcome": "broken", "note": f"the other process ended with code {status}"}


def _train_and_leave(world: World) -> Report:
    def work() -> None:
        hardware = HardwareProfile(paths=[world.spill])
        with Offloader(policy=world.policy(), hardware=hardware) as offloader:
            world.train(world.twins(offloader), 3, tolerated=())

    return world.report(work)


ENDINGS: dict[str, Callable[[World], Report | None]] = {
    "until killed": _until_killed,
    "next run": _clean,
    "stopped and continued": _steady,
    "wall clock jumps": _clock_jumps,
    "exit without teardown": _exit_without_teardown,
    "fork after setup": _fork_after_setup,
    "two trainers": _two_trainers,
    "two processes": _two_processes,
}
"""Name -> what the child does. ``None`` instead of a report: a fork of the trial's own, which has nothing to tell."""
