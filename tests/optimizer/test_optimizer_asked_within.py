"""A signal handler in the middle of a step asks for a checkpoint: it is told to wait, and nothing is lost."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lightning_ssd
from lightning_ssd.errors import OffloaderClosedError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.support.helpers import within
from tests.support.optimizer_pairs import Pair, adamw, assert_same_states, offloaded_pair, opened, wrapped
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("small_subgroups")

PACKAGE = str(Path(lightning_ssd.__file__).parent / "optimizer")
_EVERY = 11
"""Lines of the optimizer from one call to the next."""
WITHIN = r"in the middle of a step of this optimizer.*call it after step\(\)"


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


CALLS: dict[str, Callable[[OffloadedOptimizer], object]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "full_state_dict": lambda optimizer: optimizer.full_state_dict(receive=True),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "state": lambda optimizer: optimizer.state,
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [torch.zeros(3)]}),
    "step": lambda optimizer: optimizer.step(),
    "state_dict of the inner": lambda optimizer: optimizer.inner.state_dict(),
    "state of the inner": lambda optimizer: optimizer.inner.state[optimizer.param_groups[0]["params"][-1]],
}


def test_a_signal_handler_in_the_middle_of_a_step(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, told = Pair(adamw, shapes=((128, 150),) * 9 + ((300, 200),)), dict[str, str]()
    with wrapped(pair.inner, spill_dir) as optimizer:
        pair.step(optimizer)

        def handler(*_: object) -> None:
            for name, call in CALLS.items():
                with pytest.raises(RuntimeError, match=WITHIN) as raised:
                    call(optimizer)
                told[name] = str(raised.value)

        update = optimizer._states._update
        monkeypatch.setattr(
            optimizer._states, "_update", lambda *a, **k: (signal.raise_signal(signal.SIGUSR1), update(*a, **k))
        )
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            pair.step(optimizer)
        finally:
            signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
        assert told.keys() == CALLS.keys()
        assert all(text.startswith(n.removeprefix("full_").removesuffix(" of the inner")) for n, text in told.items())
        pair.check(optimizer)
        pair.step(optimizer)
        pair.check(optimizer)


def test_a_checkpoint_between_any_two_lines_of_a_step(spill_dir: Path) -> None:
    """That of no step is refused; any other one is good."""
    pair = Pair(_sgd)
    refused, taken = list[str](), list[dict[str, Any]]()

    def train(optimizer: OffloadedOptimizer) -> None:
        num_lines = 0

        def line(frame: FrameType, event: str, arg: object) -> Any:
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


def test_a_closure_may_look(spill_dir: Path) -> None:
    """Nothing is fetched before it has been called."""
    with offloaded_pair(_sgd, spill_dir, steps=1) as (pair, optimizer):
        pair.set_gradients()
        expected = pair.twin.state_dict()
        optimizer.step(lambda: assert_same_states(optimizer.state_dict(), expected))
        pair.twin.step()
        pair.check(optimizer)


def test_closing_in_the_middle_is_refused(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, told = Pair(adamw), list[str]()
    with opened(spill_dir) as offloader:
        optimizer = offloader.offload_optimizer(pair.inner)
        assert isinstance(optimizer, OffloadedOptimizer)
        pair.step(optimizer)
        update = optimizer._states._update

        def closing(*args: Any, **kwargs: Any) -> None:
            with pytest.raises(RuntimeError, match=r"^close\(\) was called in .* a step .* Nothing was done") as raised:
                offloader.close()
            told.append(str(raised.value))
            update(*args, **kwargs)

        monkeypatch.setattr(optimizer._states, "_update", closing)
        pair.step(optimizer)
        monkeypatch.undo()
        assert told
        pair.check(optimizer)


def test_another_thread_may_close_in_the_middle_of_a_step(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the main thread does when an interrupt, or the end of the interpreter, comes while a daemon trains."""
    pair, raised = Pair(adamw), list[BaseException]()
    is_within, is_closed = threading.Event(), threading.Event()
    with pytest.raises(KeyboardInterrupt), opened(spill_dir) as offloader:  # noqa: PT012
        optimizer = offloader.offload_optimizer(pair.inner)
        assert isinstance(optimizer, OffloadedOptimizer)
        pair.step(optimizer)
        update = optimizer._states._update

        def updating(*args: Any, **kwargs: Any) -> None:
            is_within.set()
            assert is_closed.wait(PATIENCE_S)
            update(*args, **kwargs)

        def train() -> None:
            try:
                pair.train(optimizer, 3)
            except BaseException as error:
                raised.append(error)

        monkeypatch.setattr(optimizer._states, "_update", updating)
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
