"""Modes of the whole process are put back while a block runs again; no other thread's forward may see them so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ssd.errors import RecomputeError
from lightning_ssd.recompute import global_modes
from tests.support.helpers import Setup, open_offloader
from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once

SHORT_S = 0.5
RECOMPUTE = Setup(activations="recompute")
ATTENTION: Callable[[], AbstractContextManager[object]] = lambda: sdpa_kernel(SDPBackend.MATH)  # noqa: E731


MEETING: dict[str, Other] = {}
"""Out of reach of the blocks, which would put it back."""


@pytest.fixture(autouse=True)
def nobody_else_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaders that other tests have left open count as training, in the main thread, as long as it lives."""
    monkeypatch.setattr(global_modes, "_training", {})


class Block(nn.Module):
    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The repetition after which there is none: between two of them the other thread may begin, and is in the way.
        if self.is_first and torch._C._current_autograd_node() is not None:
            other = MEETING["other"]
            assert other.is_ready.wait(PATIENCE_S)
            other.may_begin.set()
            other.has_run.wait(SHORT_S)
        return self.linear(x).sin()


class Other:
    """Another thread's training: in each forward it looks at a mode."""

    def __init__(self, directory: Path) -> None:
        self.seen: list[bool] = []
        self.is_ready, self.may_begin, self.has_begun, self.has_run = (threading.Event() for _ in range(4))
        self._directory = directory
        MEETING["other"] = self

    def train(self, num_steps: int) -> None:
        with open_offloader(self._directory, Setup(activations="offload")) as offloader:
            weight = torch.ones(8, requires_grad=True)
            for step in range(num_steps):
                if step == num_steps - 1:
                    self.is_ready.set()
                    assert self.may_begin.wait(PATIENCE_S)
                with offloader.saved_tensors():
                    self.seen.append(torch.backends.cuda.flash_sdp_enabled())
                    loss = (weight * weight).sum()
                loss.backward()
                offloader.end_backward()
                self.has_begun.set()
        self.has_run.set()


def train(directory: Path, around: Callable[[], AbstractContextManager[object]]) -> None:
    """While the last block runs again the other one may begin."""

    with open_offloader(directory, RECOMPUTE) as offloader:
        model = nn.Sequential(Block(is_first=True), Block(is_first=False))
        offloader.register_module(model)
        try:
            with offloader.saved_tensors(), around():
                loss = model(torch.ones(4, 8)).sum()
            loss.backward()
        finally:
            MEETING["other"].may_begin.set()


def test_where_another_thread_trains_they_are_not_put_back(tmp_path: Path) -> None:
    other = Other(tmp_path)

    def refused() -> None:
        assert other.has_begun.wait(PATIENCE_S)
        with pytest.raises(RecomputeError, match="another thread trains"):
            train(tmp_path, ATTENTION)

    at_once(refused, lambda: other.train(2))
    assert other.seen == [True, True]


def test_a_thread_that_begins_meanwhile_waits(tmp_path: Path) -> None:
    other = Other(tmp_path)
    at_once(lambda: train(tmp_path, ATTENTION), lambda: other.train(1))
    assert other.seen == [True]


def test_where_they_are_the_same_nobody_waits(tmp_path: Path) -> None:
    other = Other(tmp_path)
    at_once(lambda: train(tmp_path, nullcontext), lambda: other.train(2))
    assert other.seen == [True, True]


def test_a_thread_that_has_closed_its_offloader_is_no_hindrance(tmp_path: Path) -> None:
    other = Other(tmp_path)
    other.may_begin.set()
    other.train(1)  # here, and this thread lives on
    at_once(lambda: train(tmp_path, ATTENTION))


def test_a_thread_that_has_ended_is_no_hindrance(tmp_path: Path) -> None:
    other = Other(tmp_path)
    other.may_begin.set()
    at_once(lambda: other.train(1))
    at_once(lambda: train(tmp_path, ATTENTION))
