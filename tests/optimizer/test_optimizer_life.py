"""A signal handler in the middle of a step asks for a checkpoint: it is told to wait, and nothing is lost."""

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import lightning_ssd
from lightning_ssd.errors import OffloaderClosedError, StorageError
from tests.support.helpers import within
from tests.support.opened import offloader_in
from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, offloaded, offloaded_pair, opened, wrapped
from tests.support.patience import PATIENCE_S
from tests.support.weight_loops import in_a_fork

pytestmark = pytest.mark.usefixtures("small_subgroups")

PACKAGE = str(Path(lightning_ssd.__file__).parent / "optimizer")
_EVERY = 11
"""Lines of the optimizer from one call to the next."""
WITHIN = r"in the middle of a step of this optimizer.*call it after step\(\)"


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


CALLS = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "state": lambda optimizer: optimizer.state,
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [torch.zeros(3)]}),
    "step": lambda optimizer: optimizer.step(),
    "state_dict of the inner": lambda optimizer: optimizer.inner.state_dict(),
    "state of the inner": lambda optimizer: optimizer.inner.state[optimizer.param_groups[0]["params"][-1]],
}


@contextmanager
def in_the_middle(optimizer, does):
    """While it is entered, each step does something else before its update."""
    update = optimizer._states._update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer._states, "_update", lambda *args, **named: (does(), update(*args, **named)))
        yield


def test_a_signal_handler_in_the_middle_of_a_step(spill_dir):
    pair, told = Pair(adamw, shapes=((128, 150),) * 9 + ((300, 200),)), dict[str, str]()
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)

        def handler(*_):
            for name, call in CALLS.items():
                with pytest.raises(RuntimeError, match=WITHIN) as raised:
                    call(optimizer)
                told[name] = str(raised.value)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with in_the_middle(optimizer, lambda: signal.raise_signal(signal.SIGUSR1)):
                pair.step(optimizer)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert told.keys() == CALLS.keys()
        assert all(text.startswith(n.removeprefix("full_").removesuffix(" of the inner")) for n, text in told.items())
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


def test_a_checkpoint_between_any_two_lines_of_a_step(spill_dir):
    """That of no step is refused; any other one is good."""
    pair = Pair(_sgd)
    refused, taken = [], []

    def train(optimizer):
        num_lines = 0

        def line(frame, event, arg):
            nonlocal num_lines
            num_lines += 1
            if num_lines % _EVERY == 0:
                try:
                    taken.append(optimizer.state_dict())
                except RuntimeError as error:
                    refused.append(str(error))
            return line

        pair.step(optimizer)
        pair.set_gradients()
        sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.startswith(PACKAGE) else None)
        try:
            optimizer.step()
        finally:
            sys.settrace(None)

    with wrapped(pair.inner, spill_dir) as optimizer:
        within(100, lambda: train(optimizer))
        before = copy.deepcopy(pair.twin.state_dict())
        pair.twin.step()
        after = pair.twin.state_dict()
        key = next(iter(before["state"][0]))  # of any state, which each step changes
        for found in taken:  # in the last lines of step() all is done
            is_after = bool(found["state"][0][key].equal(after["state"][0][key]))
            assert_same_states(found, after if is_after else before)
        assert len(refused) > 10
        assert {text[: len("state_dict() in the middle")] for text in refused} == {"state_dict() in the middle"}
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


def test_closing_in_the_middle_is_refused(spill_dir):
    pair, told = Pair(adamw), list[str]()
    with opened(spill_dir) as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        pair.step(optimizer)

        def close():
            with pytest.raises(RuntimeError, match=r"^close\(\) was called in .* a step .* Nothing was done") as raised:
                offloader.close()
            told.append(str(raised.value))

        with in_the_middle(optimizer, close):
            pair.step(optimizer)
        assert told
        pair.check(optimizer)


def test_another_thread_may_close_in_the_middle_of_a_step(spill_dir):
    """As the main thread does when an interrupt, or the end of the interpreter, comes while a daemon trains."""
    pair, raised = Pair(adamw), list[BaseException]()
    is_within, is_closed = threading.Event(), threading.Event()
    with pytest.raises(KeyboardInterrupt), opened(spill_dir) as offloader:  # noqa: PT012
        optimizer = offloader.offload_optimizer(pair.inner)
        pair.step(optimizer)

        def until_closed():
            is_within.set()
            assert is_closed.wait(PATIENCE_S)

        def train():
            try:
                with in_the_middle(optimizer, until_closed):
                    pair.train(optimizer, 3)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        try:
            assert is_within.wait(PATIENCE_S)
            raise KeyboardInterrupt
        finally:
            offloader.close()
            is_closed.set()
            thread.join(PATIENCE_S)
    assert not offloader.is_open
    assert not thread.is_alive()
    assert list(map(type, raised)) == [OffloaderClosedError]
    with pytest.raises((OffloaderClosedError, RuntimeError)):
        optimizer.state_dict()


class Scaled(Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.scale = 1.0
        self.count = 0

    @property
    def halved(self):
        return self.scale == 0.5

    @halved.setter
    def halved(self, is_halved):
        self.scale = 0.5 if is_halved else 1.0

    def rate(self):
        return float(self.scale * getattr(self, "extra", 1.0))

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"] * self.rate())


def test_attributes_reach_the_step(spill_dir):
    with offloaded_pair(Scaled, spill_dir) as (pair, optimizer):
        for name, value in (("scale", 0.25), ("extra", 2.0), ("extra", 3.0), ("halved", True), ("count", 7)):
            setattr(optimizer, name, value)
            setattr(pair.twin, name, value)
            pair.step(optimizer)
            assert vars(pair.inner)["scale"] == vars(pair.twin)["scale"]
            pair.check(optimizer)
        assert optimizer.count == 8, "what a step counts is what is read"
        del optimizer.extra
        del pair.twin.extra
        pair.step(optimizer)
        pair.check(optimizer)
        with pytest.raises(AttributeError):
            del optimizer.extra


def test_what_frameworks_set_stays_on_the_wrapper(spill_dir):
    with offloaded_pair(Scaled, spill_dir) as (pair, optimizer):
        schedules = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, pair.twin)]
        assert "step" not in vars(pair.inner)
        optimizer._mark = 1
        assert "_mark" not in vars(pair.inner)
        for _ in range(3):
            pair.step(optimizer)
            for schedule in schedules:
                schedule.step()
        del optimizer._mark
        assert "_mark" not in vars(optimizer)
        pair.check(optimizer)
        optimizer.step = optimizer.step
        del optimizer.step


def test_it_is_neither_copied_nor_pickled(spill_dir):
    with offloaded(Pair(Scaled).inner, spill_dir) as (optimizer, _):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="state_dict"):
                copied(optimizer)


# -- nothing is left ---------------------------------------------------------------------------------------------------


def num_files():
    return len(os.listdir("/proc/self/fd"))


def num_threads():
    return sum(thread.name.startswith("lightning_ssd") for thread in threading.enumerate())


def test_dropping_everything_leaves_no_thread_and_no_file(spill_dir):
    files, threads = num_files(), num_threads()
    pair = Pair(adamw)
    offloader = offloader_in(spill_dir, activations="keep", optimizer_states="offload").open()
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


def test_two_optimizers_share_an_offloader(spill_dir):
    one, two = Pair(adamw), Pair(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    with opened(spill_dir) as offloader:
        first, second = offloader.offload_optimizer(one.inner), offloader.offload_optimizer(two.inner)
        for _ in range(3):
            one.step(first)
            two.step(second)
        first.close()  # the other one stays good
        two.step(second)
        two.check(second)
    one.check(first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_not_to_use_it(spill_dir):
    """It has no workers: whoever waited for one there would wait for ever."""
    with offloaded_pair(adamw, spill_dir, steps=2) as (pair, optimizer):
        saved = optimizer.state_dict()
        pair.set_gradients()

        def use():
            for call in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
                with pytest.raises(StorageError):
                    call()
            value = saved["state"][0]["exp_avg"][0, 0].item()  # what is mapped can be read
            optimizer.close()
            saved.clear()
            gc.collect()
            assert value == value

        assert in_a_fork(use) == 0
        optimizer.step()
        pair.twin.step()
        pair.check(optimizer)
