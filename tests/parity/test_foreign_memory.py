"""Somebody gives a saved storage other memory while it is written: never a wrong gradient, never freed memory."""

import threading
from contextlib import contextmanager

import pytest
import torch

from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.support.helpers import open_offloader
from tests.support.patience import PATIENCE_S

N = 1 << 18
NBYTES = 4 * N


class HeldBackend(WrappedBackend):
    """Writes wait, with the address in hand, until they are let go; then they see what is at that address."""

    def __init__(self, inner, begun, go):
        super().__init__(inner)
        self._begun, self._go = begun, go

    def write(self, arena, region, offset):
        self._begun.set()
        self._go.wait(PATIENCE_S)
        self.inner.write(arena, region, offset)


def share(x):
    x.share_memory_()


def grow(x):
    x.untyped_storage().resize_(2 * NBYTES)


@contextmanager
def holding(directory):
    """An offloader; an event when a write has begun, and one to let writes go."""
    begun, go = threading.Event(), threading.Event()
    with open_offloader(directory, _wrap_backend=lambda inner: HeldBackend(inner, begun, go)) as offloader:
        yield offloader, begun, go


@pytest.mark.parametrize("change", [share, grow])
def test_other_memory_during_the_write(change, tmp_path):
    with holding(tmp_path) as (offloader, begun, go):
        w = torch.full((N,), 3.0, requires_grad=True)
        x = torch.ones(N)
        with offloader.saved_tensors():
            y = (x * w).sum()
        assert begun.wait(PATIENCE_S)
        change(x)
        junk = [torch.full((N,), 7.0) for _ in range(8)]  # what has the old memory now
        go.set()
        offloader.flush()
        del x, junk
        y.backward()
        assert torch.equal(w.grad, torch.ones(N))
        with pytest.warns(UserWarning, match="given other memory"):
            offloader.end_backward()
        assert offloader.stats.failures >= 1


def test_other_memory_before_the_write(tmp_path):
    """Emptied while its write is queued, and filled again: the write has nothing to take, and the tensor stays."""
    with holding(tmp_path) as (offloader, begun, go):
        w = torch.full((N,), 3.0, requires_grad=True)
        others = [torch.ones(N) for _ in range(4)]
        x = torch.ones(N)
        with offloader.saved_tensors():
            y = sum((other * w).sum() for other in others) + (x * w).sum()
        assert begun.wait(PATIENCE_S)
        x.untyped_storage().resize_(0)
        go.set()
        offloader.flush()
        x.untyped_storage().resize_(NBYTES)
        x.data.fill_(1.0)
        del x
        y.backward()
        assert torch.equal(w.grad, torch.full((N,), 5.0))
        with pytest.warns(UserWarning, match="must not be resized"):
            offloader.end_backward()
