"""Long trainings with everything in files beside a plain twin: the same bits, and nothing grows."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ssd.memory.malloc import trim
from lightning_ssd.parameters.files.mapped_storage import is_mapped
from tests.parity.models import VOCABULARY, Tied
from tests.support.everything_away import all_away, large
from tests.support.helpers import Session, assert_identical

pytestmark = pytest.mark.usefixtures("many_subgroups")

_MAY_GROW = {"memory": 8 << 20, "mappings": 20}
"""In 1,500 steps: the system divides and joins mappings as parts of them are touched."""


class Runner:
    """A model and its optimizer, to which everything is done that training code does."""

    def __init__(self, directory, offloader=None):
        torch.manual_seed(1)
        self.model, self.session = Tied(dropout=0.1), Session(offloader)
        self.path = directory / ("plain.pt" if offloader is None else "ours.pt")
        self.session.register(self.model)
        self.optimizer = self.session.optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.seen = []

    def backward(self, number):
        torch.manual_seed(number)
        ids = torch.randint(0, VOCABULARY, (2, 11))
        with self.session.saved():
            loss = self.model(ids).logsumexp(-1).mean()
        self.session.backward(loss)
        self.seen.append(loss.detach())

    def clip(self):
        self.seen.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05))

    def update(self):
        self.optimizer.step()

    def zero(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)

    def evaluate(self, number):
        torch.manual_seed(number)
        self.model.eval()
        with torch.no_grad():
            self.seen.append(self.model(torch.randint(0, VOCABULARY, (1, 5))).clone())
        self.model.train()

    def save(self):
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.path)

    def load(self):
        if self.path.exists():
            saved = torch.load(self.path)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def freeze(self, number, is_trained):
        self.model.body.blocks[number][1].weight.requires_grad_(is_trained)

    def fail(self):
        """A forward that does not get to its end."""
        handle = self.model.body.blocks[1][4].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.backward(0)
        handle.remove()
        if self.session.offloader is not None:
            self.session.offloader.abort()

    def result(self):
        return {
            "seen": self.seen,
            "weights": self.model.state_dict(),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "states": self.optimizer.state_dict()["state"],
        }


def calls(draw, step):
    """What is done in one step, and after it."""
    found = []
    for micro in range(draw.choice((1, 1, 2, 3))):
        found.append(lambda runner, number=10 * step + micro: runner.backward(number))
    if draw.random() < 0.5:
        found.append(Runner.clip)
    found.append(Runner.update)
    if draw.random() < 0.95:  # else this step's gradients are added to
        to_none = draw.random() < 0.5
        found.append(lambda runner: runner.zero(to_none))
    number, is_trained = draw.randrange(2), draw.random() < 0.7
    match draw.randrange(24):
        case 0 | 1 | 2:
            found.append(lambda runner: runner.evaluate(step))
        case 3 | 4:
            found.append(Runner.save)
        case 5:
            found.append(Runner.load)
        case 6:
            found.append(lambda runner: runner.freeze(number, is_trained))
        case 7:
            found.append(Runner.fail)
    return found


def level(offloader):
    """What must not grow: private memory, descriptors, mappings, bytes taken in files."""
    offloader.drain_metrics()  # events wait for whoever asks
    gc.collect()
    trim()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = offloader._parts.parameters.files
    return {
        "memory": int(status["RssAnon"].split()[0]) << 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "taken": sum(arena.used_bytes for arena in files._arenas),
        "files": offloader.stats.disk_bytes,
    }


def soak(steps, every, directory, seed, **policy):
    """Train so many steps, comparing now and then. Returns the levels at these times."""
    draw, levels = random.Random(seed), []
    plain = Runner(directory)
    with all_away(directory / "files", **policy) as offloader:
        ours = Runner(directory, offloader)
        for step in range(steps):
            for call in calls(draw, step):
                call(plain)
                call(ours)
            if (step + 1) % every == 0:
                assert_identical(ours.result(), plain.result(), f"after {step + 1} steps")
                plain.seen.clear()
                ours.seen.clear()
                levels.append(level(offloader))
        assert all(is_mapped(parameter.untyped_storage()) for parameter in large(ours.model))
        assert offloader.optimizer_stats[0].written_bytes > 0
        assert offloader.stats.failures == 0
    assert list((directory / "files").iterdir()) == []
    return levels


def test_fifty_steps(tmp_path):
    soak(50, 10, tmp_path, seed=7, activations="offload")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3700)
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_two_thousand_steps(activations, tmp_path):
    levels = soak(2000, 100, tmp_path, seed=8, activations=activations)
    first, last = levels[2:7], levels[-5:]
    for what in levels[0]:
        grown = max(one[what] for one in last) - max(one[what] for one in first)
        assert grown <= _MAY_GROW.get(what, 0), (what, [one[what] for one in levels])
