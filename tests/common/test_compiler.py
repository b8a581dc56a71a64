"""What the compiler sees of the package, and that trials of user code leave no mark in it."""

import gc
import signal
import threading
import weakref

import pytest
import torch
from torch import nn

from lightning_ssd.common.compiler import compiler_is_at_work, uncompiled
from tests.support.opened import offloader_in
from tests.support.patience import PATIENCE_S
from tests.support.watched_blocks import Half
from tests.support.weight_loops import in_a_fork, passed

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


def fit(model, directory, between=lambda: None):
    with offloader_in(directory, activations="recompute") as offloader:
        offloader.register_module(model)
        between()
        passed(offloader, lambda: model(torch.ones(4, 8)).sum())


def test_a_model_that_is_registered_again_and_again_stays_compiled(tmp_path):
    """Dynamo compiles a frame eight times, and then runs it as it is without a word."""
    how = Counted()
    model = nn.Sequential(Half(8), Half(8))

    def compile_blocks():
        for block in model:
            block.compile(backend=how)

    compile_blocks()
    for number in range(12):
        for block in model:
            block._compiled_call_impl = None  # registered as a block that is not compiled
        with_hooks = how.num_runs
        fit(model, tmp_path, compile_blocks)
        assert how.num_runs == with_hooks + 2, f"run uncompiled in fit {number}"
        assert "forward" not in vars(model[0])
    assert how.num_graphs <= 4


def test_a_stand_in_does_not_outlive_its_module(tmp_path):
    model = nn.Sequential(Half(8), Half(8))
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
    status = in_a_fork(lambda: (signal.alarm(5), enter()))  # the signal ends a child that waits for ever
    may_end.set()
    thread.join()
    assert status == 0
