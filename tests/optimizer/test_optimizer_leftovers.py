"""What an offloaded optimizer leaves behind when it is dropped, refused, shared or forked: nothing."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.errors import StorageError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.optimizer_pairs import Pair, adamw, offloaded_pair, opened

pytestmark = pytest.mark.usefixtures("small_subgroups")


# -- nothing is left ---------------------------------------------------------------------------------------------------


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return sum(thread.name.startswith("lightning_ssd") for thread in threading.enumerate())


def test_dropping_everything_leaves_no_thread_and_no_file(spill_dir: Path) -> None:
    files, threads = num_files(), num_threads()
    pair = Pair(adamw)
    policy = OffloadPolicy(activations="keep", optimizer_states="offload")
    offloader = Offloader(policy=policy, hardware=HardwareProfile(paths=[str(spill_dir)])).open()
    optimizer = offloader.offload_optimizer(pair.inner)
    pair.step(optimizer)
    gone = weakref.ref(optimizer)
    del offloader, optimizer
    for _ in range(1000):
        gc.collect()
        if gone() is None and num_files() == files and num_threads() == threads:
            break
        threading.Event().wait(0.01)
    assert gone() is None
    assert (num_files(), num_threads()) == (files, threads)
    assert not list(spill_dir.iterdir())


def test_refused_optimizers_leave_no_thread_and_no_file(spill_dir: Path) -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    with opened(spill_dir) as offloader:
        files, threads = num_files(), num_threads()
        for _ in range(3):
            with pytest.raises(ValueError, match="LBFGS"):
                offloader.offload_optimizer(torch.optim.LBFGS(parameters))
        assert (num_files(), num_threads()) == (files, threads)


def test_two_optimizers_share_an_offloader(spill_dir: Path) -> None:
    one, two = Pair(adamw), Pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with opened(spill_dir) as offloader:
        first, second = offloader.offload_optimizer(one.inner), offloader.offload_optimizer(two.inner)
        for _ in range(3):
            one.step(first)
            two.step(second)
        assert isinstance(first, OffloadedOptimizer)
        first.close()  # the other one stays good
        two.step(second)
        two.check(second)
    one.check(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_not_to_use_it(spill_dir: Path) -> None:
    """It has no workers: whoever waited for one there would wait for ever."""
    with offloaded_pair(adamw, spill_dir, steps=2) as (pair, optimizer):
        saved = optimizer.state_dict()
        pair.set_gradients()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(_child(optimizer, saved))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()
        pair.twin.step()
        pair.check(optimizer)


def _child(optimizer: OffloadedOptimizer, saved: dict[str, Any]) -> int:
    """Which check failed; 0: none."""
    uses: list[Callable[[], Any]] = [optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)]
    for number, use in enumerate(uses, 1):
        try:
            use()
        except StorageError:
            continue
        except BaseException:
            return number
        return number
    value = saved["state"][0]["exp_avg"][0, 0].item()  # what is mapped can be read
    optimizer.close()
    saved.clear()
    gc.collect()
    return 0 if value == value else 9
