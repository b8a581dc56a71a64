"""What the compiler sees of the package, and that trials of user code leave no mark in it."""

import gc
import os
import signal
import threading
import weakref

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.common.compiler import compiler_is_at_work, uncompiled
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo's own


class Counted:
    def __init__(self):
        self.num_graphs = self.num_runs = 0

    def __call__(self, module, inputs):
        self.num_graphs += 1

        def run(*args):
            self.num_runs += 1
            return module.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


def fit(model, directory):
    hardware = HardwareProfile(paths=(str(directory),))
    with Offloader(policy=OffloadPolicy(activations="recompute"), hardware=hardware) as offloader:
        offloader.register_module(model)
        with offloader.saved_tensors():
            loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        offloader.end_backward()


def test_a_model_that_is_registered_again_and_again_stays_compiled(tmp_path):
    """Dynamo compiles a frame eight times, and then runs it as it is without a word."""
    how = Counted()
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.compile(backend=how)
    for number in range(12):
        for block in model:
            block._compiled_call_impl = None  # registered as a block that is not compiled
        with_hooks = how.num_runs
        hardware = HardwareProfile(paths=(str(tmp_path),))
        with Offloader(policy=OffloadPolicy(activations="recompute"), hardware=hardware) as offloader:
            offloader.register_module(model)
            for block in model:
                block.compile(backend=how)
            with offloader.saved_tensors():
                loss = model(torch.ones(4, 8)).sum()
            loss.backward()
            offloader.end_backward()
        assert how.num_runs == with_hooks + 2, f"run uncompiled in fit {number}"
        assert "forward" not in vars(model[0])
    assert how.num_graphs <= 4


def test_a_stand_in_does_not_outlive_its_module(tmp_path):
    model = nn.Sequential(Block(), Block())
    fit(model, tmp_path)
    gone = weakref.ref(model[0])
    del model
    gc.collect()
    assert gone() is None


def enter():
    with uncompiled():
        pass


def test_trials_run_one_after_the_other():
    """Afterwards what is compiled runs compiled again."""
    how = Counted()
    double = torch.compile(lambda x: x * 2, backend=how)
    x = torch.ones(3)
    other = threading.Thread(target=enter)
    with uncompiled(), uncompiled():
        double(x)
        other.start()
        other.join(0.1)
        assert other.is_alive(), "it waits"
    other.join()
    assert how.num_runs == 0
    with pytest.raises(ZeroDivisionError), uncompiled():
        raise ZeroDivisionError
    double(x)
    assert how.num_runs == 1


def test_where_the_compiler_is_at_work():
    seen = []

    @torch.compiler.disable
    def note():
        seen.append(compiler_is_at_work())

    def function(x):
        note()
        return x + 1

    assert not compiler_is_at_work()
    torch.compile(function, backend="eager")(torch.ones(3))
    assert seen == [False], "what is disabled is not compiled code"


def test_a_fork_in_the_midst_of_a_trial_can_try_as_well():
    has_begun, may_end = threading.Event(), threading.Event()

    def trial():
        with uncompiled():
            has_begun.set()
            may_end.wait(PATIENCE_S)

    thread = threading.Thread(target=trial)
    thread.start()
    assert has_begun.wait(PATIENCE_S)
    child = os.fork()
    if not child:
        signal.alarm(5)  # ends a child that waits for ever
        with uncompiled():
            os._exit(0)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
