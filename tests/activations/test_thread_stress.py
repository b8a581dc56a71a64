"""Many threads at once, with random delays below them and the interpreter switching as often as it can.

A deadlock ends as a red test with the stacks of all threads: pytest's timeout and faulthandler see to that.
"""

import gc
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lightning_ssd
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
from tests.support.helpers import assert_released, raw_bytes
from tests.support.opened import offloader_in
from tests.support.patience import PATIENCE_S
from tests.support.threads import at_once

NUM_THREADS = 4
NUM_PASSES = 25
NUM_SAVED = 12
SIZES = (512, 1030, 4096, 20_001)
"""Elements of float32: some below a block, some of whole blocks, some with edges."""


@pytest.fixture(autouse=True)
def switching_often():
    """The interpreter may go on with another thread after nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class ErraticBackend(WrappedBackend):
    """One move in four takes up to two milliseconds longer, one in twenty up to eight."""

    def __init__(self, inner, seed=0):
        super().__init__(inner)
        self._chance = random.Random(seed)

    def write(self, arena, region, offset):
        self._dawdle()
        self.inner.write(arena, region, offset)
        self._dawdle()

    def read(self, arena, region, offset):
        self._dawdle()
        self.inner.read(arena, region, offset)
        self._dawdle()

    def _dawdle(self):
        draw = self._chance.random()
        if draw < 0.25:
            time.sleep(self._chance.random() * (0.008 if draw < 0.05 else 0.002))


def forward(leaf):
    value = leaf
    for number in range(NUM_SAVED):
        value = (value * 0.5 + number).sin()
    return value.square().sum()


def gradient(leaf):
    leaf = leaf.detach().clone().requires_grad_()
    forward(leaf).backward()
    assert leaf.grad is not None
    return raw_bytes(leaf.grad)


def train(offloader, seed, expected, leaves):
    """Passes whose graphs live for different times, are walked twice, or die without a backward."""
    chance = random.Random(seed)
    for _ in range(NUM_PASSES):
        which = chance.randrange(len(leaves))
        leaf = leaves[which].detach().clone().requires_grad_()
        with offloader.saved_tensors():
            loss = forward(leaf)
        what = chance.random()
        if what < 0.1:
            del loss
            continue
        if what < 0.4:
            time.sleep(chance.random() * 0.004)
        if 0.4 < what < 0.5:
            loss.backward(retain_graph=True)
            leaf.grad = None
        loss.backward()
        assert leaf.grad is not None
        assert torch.equal(raw_bytes(leaf.grad), expected[which]), "a wrong gradient"
        if chance.random() < 0.5:
            offloader.end_backward()


@pytest.mark.parametrize("activations", ["offload", "auto"])
def test_packs_and_unpacks_of_many_threads(activations, spill_dir):
    """Each of four threads packs several hundred tensors, while others collect, count and flush."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.rand(size, generator=generator) for size in SIZES]
    expected = [gradient(leaf) for leaf in leaves]
    settings = {"activations": activations, "min_tensor_bytes": 0, "verify": "sampled", "max_slowdown": 50.0}
    with offloader_in(spill_dir, **settings, _wrap_backend=ErraticBackend) as offloader:
        over = threading.Event()

        def watch():
            chance = random.Random(99)
            while not over.is_set():
                chance.choice((gc.collect, offloader.flush, offloader.drain_metrics, lambda: offloader.stats))()
                time.sleep(0.002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            at_once(*[lambda n=n: train(offloader, n, expected, leaves) for n in range(NUM_THREADS)])
        finally:
            over.set()
            watcher.join()
        assert_released(offloader)
        stats = offloader.stats
        assert stats.failures == 0
        assert stats.bytes_written > 0
        assert stats.bytes_read + stats.bytes_forwarded > 0


# -- the end of the interpreter ------------------------------------------------------------------------------------

# The first thing that is registered runs last: by then no thread of ours may be left, since torch goes next.
UNFINISHED = """
import atexit, sys, threading, time

@atexit.register
def judge():
    left = [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")]
    if left:
        print("still running:", left, file=sys.stderr)

import torch, lightning_ssd
from lightning_ssd.scheduling import plan_maker
from recipes.benchmarks.harness.wrapped_backend import WrappedBackend
sys.setswitchinterval(1e-6)
moving = {{"write": threading.Event(), "read": threading.Event()}}

class Slow(WrappedBackend):
    def write(self, arena, region, offset):
        moving["write"].set()
        time.sleep(0.05)
        self.inner.write(arena, region, offset)

    def read(self, arena, region, offset):
        moving["read"].set()
        time.sleep(0.05)
        self.inner.read(arena, region, offset)

hardware = lightning_ssd.HardwareProfile(paths={directory!r})

make_plan = plan_maker.make_plan
def slow(*args):
    time.sleep(1)
    return make_plan(*args)
plan_maker.make_plan = plan_maker.make_plan_apart = slow

def begin(**policy):
    policy = lightning_ssd.OffloadPolicy(min_tensor_bytes=0, **policy)
    return lightning_ssd.Offloader(policy=policy, hardware=hardware, _wrap_backend=Slow).open()

def forward(offloader):
    leaf = torch.rand(100_000, requires_grad=True)
    with offloader.saved_tensors():
        value = leaf
        for _ in range(20):
            value = value.sin()
    return value.sum()

reading, writing, planning = begin(activations="offload"), begin(activations="offload"), begin(activations="auto")
states = begin(activations="keep", optimizer_states="offload")
parameters = [torch.nn.Parameter(torch.rand(400_000)) for _ in range(6)]
optimizer = states.offload_optimizer(torch.optim.AdamW(parameters))
for parameter in parameters:
    parameter.grad = torch.rand_like(parameter)
forward(planning).backward()
planning.end_backward()
optimizer.step()
loss = forward(reading)
reading.flush()
moving["read"].clear()
moving["write"].clear()

def backward():
    try:
        loss.backward()
    except (lightning_ssd.errors.OffloaderClosedError, lightning_ssd.errors.StorageError):
        pass  # this program's own thread is told that what it waits for will not come

threading.Thread(target=backward, daemon=True).start()
moving["read"].wait()
other = forward(writing)
moving["write"].wait()
"""


def test_exit_in_the_middle_of_transfers(spill_dir):
    """Nothing was closed: writes, reads, a plan and a step's flush are under way, and a backward waits for them."""
    program = UNFINISHED.format(directory=str(spill_dir))
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")
    assert not [path for path in spill_dir.rglob("*") if path.is_file()]


# -- the rule in the source ----------------------------------------------------------------------------------------

LOCK = re.compile(r"= threading\.(Lock|RLock|Condition)\(")
RULE = re.compile(r"\b(leaf lock|a leaf|[Oo]rder|under it|under any lock|under the lock)", re.IGNORECASE)
PACKAGE = Path(lightning_ssd.__file__).parent


def unruled(source):
    """Locks whose comment does not say what may be locked under what. A condition on a lock shares the lock's."""
    lines, found = source.splitlines(), []
    for number, line in enumerate(lines):
        if not LOCK.search(line) or re.search(r"Condition\(self\.", line):
            continue
        above = number
        while lines[above - 1].strip().startswith("#"):
            above -= 1
        if not RULE.search(" ".join(lines[above:number])):
            found.append(line.strip())
    return found


def test_every_lock_says_its_order():
    found = {str(path): lines for path in PACKAGE.rglob("*.py") if (lines := unruled(path.read_text(encoding="utf-8")))}
    assert found == {}
