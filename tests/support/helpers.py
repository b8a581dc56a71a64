"""What the exactness tests share: one program runs plainly and with offloading, and must give the same bits.

A *program* takes a :class:`Session` and returns any tree of tensors and numbers. :func:`assert_same` runs it once
without us and once per :class:`Setup`, and compares what it returned, or the type and meaning of what it raised.
"""

from __future__ import annotations

import gc
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.patience import PATIENCE_S

# The tests collect garbage often; what the imports have made need not be looked at each time.
gc.freeze()


@dataclass(frozen=True)
class Setup:
    """One way to run a program with offloading."""

    min_tensor_bytes: int = 0
    drained: bool = True  # wait for every write between forward and backward, so that the bytes take the disk path
    activations: str = "offload"
    verify: str = "off"
    activation_budget: int | None = None
    max_slowdown: float = 1.05
    recompute_modules: str = ""  # what plans may recompute: "blocks", the name of a class
    settled: bool = False  # wait for the plan after each backward, so that the next step follows it


DRAINED = Setup()
EAGER = Setup(drained=False)
MIDDLE = Setup(min_tensor_bytes=4096)
SETUPS = (DRAINED, EAGER, MIDDLE)
KEEP = Setup(activations="keep")
SMALL = Setup(min_tensor_bytes=1 << 40)
# With a slowdown of 50 everything that can leave does: the plans of tests are not to depend on how busy the machine is.
AUTO = Setup(activations="auto", drained=False, settled=True)
PLANNED = Setup(activations="auto", max_slowdown=50.0, settled=True)
PLANNING = Setup(activations="auto", max_slowdown=50.0, drained=False)
AUTO_SETUPS = (PLANNED, PLANNING, AUTO)


class Session:
    """What a program sees of the offloader; without one, every method does nothing."""

    def __init__(self, offloader=None, *, drained=False, settled=False):
        self.offloader = offloader
        self.drained = drained
        self.settled = settled

    @classmethod
    def of(cls, offloader, setup):
        """As the setup says."""
        return cls(offloader, drained=setup.drained, settled=setup.settled)

    def saved(self):
        """Around forward."""
        return nullcontext() if self.offloader is None else self.offloader.saved_tensors()

    def drain(self):
        """Between forward and backward: from here on only the disk has what was queued."""
        if self.offloader is not None and self.drained:
            self.offloader.flush()

    def backward(self, loss, *, retain_graph=False):
        """Backward of a loss, and the end of the step."""
        self.drain()
        loss.backward(retain_graph=retain_graph)
        self.end()

    def end(self):
        """After backward."""
        if self.offloader is not None:
            self.offloader.end_backward()
            if self.settled:
                self.offloader.wait_for_plan()

    def register(self, module):
        """Parameters that must not be offloaded."""
        if self.offloader is not None:
            self.offloader.register_module(module)

    def optimizer(self, made):
        """The one to use in the place of ``made``."""
        return made if self.offloader is None else self.offloader.offload_optimizer(made)


@dataclass(frozen=True)
class Raised:
    """What a program raised. The exception itself is not kept: its traceback holds the graph."""

    type: str
    text: str = field(compare=False)
    trace: str = field(default="", compare=False, repr=False)
    meaning: str = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "meaning", meaning_of(self.text))


_EDITED = re.compile(
    r"modified by an inplace operation: \[\S+ (?P<size>\[.*?\]).*?\]"
    r"(, which is output \d+ of [\w:]+,|, which (?P<needed_by>\S+) needs,)? "
    r"is at version (?P<version>\d+); expected version (?P<expected>\d+) instead"
)
"""In PyTorch's error and in ours about an edit of a saved tensor."""


def meaning_of(text):
    """Return the text of an error, or what PyTorch's words and ours about an edit of a saved tensor have in common."""
    found = _EDITED.search(text)
    return (
        text if found is None else "edited in place: {size} is at {version}, not {expected}".format(**found.groupdict())
    )


IS_ONE_OF_SEVERAL = "is a view and its base or another view of its base has been modified inplace"
"""In PyTorch's error about a saved tensor that is one of several views which one operation gave."""


def needed_by(text):
    """Return the operation that our error names; ``None``: it names none, or is PyTorch's."""
    found = _EDITED.search(text)
    return None if found is None else found["needed_by"]


@contextmanager
def open_offloader(directory, setup=DRAINED, **extra):
    """An offloader as a test wants it; it also works where the temporary directory is in memory."""
    policy = OffloadPolicy(
        activations=setup.activations,
        min_tensor_bytes=setup.min_tensor_bytes,
        verify=setup.verify,
        activation_budget=setup.activation_budget,
        max_slowdown=setup.max_slowdown,
        recompute_modules=setup.recompute_modules or (),
    )
    # Drives alone, where no plan chooses: host memory would take everything of a device.
    host_memory = "auto" if setup.activations == "auto" else 0
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory=host_memory)
    with Offloader(policy=policy, hardware=hardware, **extra) as offloader:
        yield offloader


def outcome(program, session):
    """What the program returned, or :class:`Raised`."""
    torch.manual_seed(11)
    try:
        return program(session)
    except AssertionError:
        raise
    except Exception as error:
        return Raised(type(error).__name__, str(error), traceback.format_exc())


def assert_identical(got, expected, where="result"):
    """Equal bit for bit: NaN equals NaN, 0.0 does not equal -0.0."""
    if isinstance(got, Raised) and got != expected:
        wanted = expected if isinstance(expected, Raised) else "no error"
        raise AssertionError(f"{where}:\n  got      {got}\n  expected {wanted}\n{got.trace}")
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{where}: got {type(got).__name__}, expected a tensor"
        assert got.dtype == expected.dtype, f"{where}: {got.dtype} != {expected.dtype}"
        assert got.shape == expected.shape, f"{where}: {got.shape} != {expected.shape}"
        assert torch.equal(raw_bytes(got), raw_bytes(expected)), f"{where}: the bits differ"
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{where}: keys differ"
        for key in expected:
            assert_identical(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{where}: {len(got)} items, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_identical(one, other, f"{where}[{index}]")
    else:
        assert got == expected, f"{where}: {got!r} != {expected!r}"


def raw_bytes(tensor):
    """The elements' bytes, in logical order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_released(offloader):
    """Nothing that belonged to a graph is left, in memory or on disk."""
    # After an error autograd's queue holds the nodes that it did not get to, until this thread's next backward.
    torch.zeros(1, requires_grad=True).sum().backward()
    gc.collect()
    offloader.flush()  # a write that had begun gives its memory and its place on disk back when it ends
    stats = offloader.stats
    assert stats.resident_bytes == 0, f"{stats.resident_bytes} bytes of saved activations still in memory"
    deadline_s = time.monotonic() + PATIENCE_S
    while disk_used_bytes(offloader) and time.monotonic() < deadline_s:
        time.sleep(0.001)  # a read for a graph that has died meanwhile frees its place when it ends
    assert disk_used_bytes(offloader) == 0, f"{disk_used_bytes(offloader)} bytes still taken on disk"


def disk_used_bytes(offloader):
    """Bytes of the spill files that belong to some saved storage."""
    tier = offloader._parts.tiers.ssd  # no public counter tells it
    return 0 if tier is None else sum(arena.used_bytes for arena in tier._arenas)


def moved(stats):
    """Bytes that took any of our ways: if this is 0, nothing was tested."""
    return stats.bytes_read + stats.bytes_forwarded


def assert_same(program, directory, *, setups=SETUPS, raises=False, moves=True, **extra):
    """Run ``program`` plainly and under each setup; results, or errors, must be the same.

    Args:
        program: what to run.
        directory: for the spill files.
        setups: ways of offloading.
        raises: whether the plain run raises.
        moves: whether bytes must have moved in the first setup, so that a program which offloads nothing fails.
        extra: further arguments of the offloader.

    Returns:
        What the plain run gave.
    """
    expected = outcome(program, Session())
    assert isinstance(expected, Raised) == raises, f"plain PyTorch gave {expected!r}"
    for number, (_, stats) in enumerate(_compared(program, expected, directory, setups, extra)):
        if moves and number == 0:
            assert stats.bytes_saved > 0, "nothing was handed to the offloader"
            assert moved(stats) > 0, "nothing was offloaded"
    return expected


def _compared(program, expected, directory, setups, extra):
    """Yield each setup, and the numbers of an offloader with which the program has given what is expected."""
    for setup in setups:
        with open_offloader(directory, setup, **extra) as offloader:
            assert_identical(outcome(program, Session.of(offloader, setup)), expected, f"{setup}")
            assert_released(offloader)
            assert offloader.stats.failures == 0
            yield setup, offloader.stats


Batch = dict[str, Any]
adamw = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Training:
    """A training to be compared. Everything it needs is made anew for each run."""

    make_model: Callable[[], torch.nn.Module]
    make_batch: Callable[[int], Batch]
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor]
    steps: int = 3
    num_micro_batches: int = 1
    autocast: torch.dtype | None = None
    prepare: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = adamw
    max_norm: float | None = None  # of the gradients
    after_step: Callable[[torch.nn.Module, int], object] = lambda model, step: None

    def __call__(self, session):
        """Train; returns losses, gradients and their norm in every step, and the final weights, buffers and states."""
        torch.manual_seed(3)
        model = self.prepare(self.make_model())
        model.train()
        session.register(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = session.optimizer(self.make_optimizer(trained))
        seen = {"losses": [], "gradients": [], "norms": []}
        for step in range(self.steps):
            for micro in range(self.num_micro_batches):
                batch = self.make_batch(step * self.num_micro_batches + micro)
                with session.saved(), self._autocast():
                    loss = self.loss(model, batch)
                session.drain()
                loss.backward()
                session.end()
                seen["losses"].append(loss.detach().clone())
                del loss
            seen["gradients"].append([None if p.grad is None else p.grad.clone() for p in trained])
            if self.max_norm is not None:
                seen["norms"].append(torch.nn.utils.clip_grad_norm_(trained, self.max_norm).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
            self.after_step(model, step)
        seen["state"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
        seen["optimizer"] = dict(sorted(optimizer.state_dict()["state"].items()))
        return seen

    def _autocast(self):
        if self.autocast is None:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.autocast)


def assert_parity(training, directory, *, setups=SETUPS, **extra):
    """Losses, every gradient and every weight equal those of a twin without offloading, and bytes really moved."""
    expected = outcome(training, Session())
    assert not isinstance(expected, Raised), f"the plain run raised {expected}"
    assert any(gradient is not None for gradient in expected["gradients"][0]), "the plain run has no gradients"
    for setup, stats in _compared(training, expected, directory, setups, extra):
        if setup.activations == "auto" and setup.max_slowdown < 2:
            continue  # how much moves then depends on how fast the machine is
        assert moved(stats) > 0, f"{setup}: nothing was offloaded"
        if setup.drained:
            assert stats.bytes_written > 0, f"{setup}: nothing was written"
            assert stats.bytes_read > 0, f"{setup}: nothing was read"


def within(seconds, work):
    """Run in a thread of its own; one that never ends fails the test instead of stopping all tests."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for ever"
    if raised:
        raise raised[0]
