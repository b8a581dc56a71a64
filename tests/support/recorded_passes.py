"""A clock that is set by hand, and what passes under a recorder save."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.scheduling.recorder import Recorder

NBYTES = 4096


@dataclass
class FakeClock:
    """A device that is as far as it is told; reading a stamp that it has not passed is an error."""

    lag: int = 0
    now_s: float = 0.0
    passed_s: float = float("inf")

    def stamp(self):
        return self.now_s

    def seconds(self, start, end):
        assert max(start, end) <= self.passed_s, "the host would wait for the device"
        return end - start

    def at(self, now_s):
        self.now_s = now_s
        return now_s


@dataclass
class Saved:
    """One storage as autograd and we hold it: ``ours`` is the one reference that the cache has."""

    variable: torch.Tensor | None
    ours: torch.UntypedStorage | None
    key: StorageKey


def saved(nbytes=NBYTES):
    variable = torch.zeros(nbytes, dtype=torch.uint8)
    storage = variable.untyped_storage()
    return Saved(variable, storage, StorageKey(storage))


def pack(recorder, clock, now_s, *, held=False):
    one = saved()
    clock.at(now_s)
    recorder.packed(NBYTES, one.key)
    if not held:
        one.variable = None
    return one


def begun(clock):
    return Recorder(clock, lambda: 0, now=clock.stamp)
