"""Gradients of a device whose drives fail, fill or are interrupted, and what is left of them at the end."""

import gc
import logging
import warnings

import pytest
import torch
from torch import nn

from lightning_ssd.errors import OffloaderClosedError, StorageError
from tests.parameters.test_device_gradients import gone, have_left, pager_of, policy  # noqa: F401  # of ``opened``
from tests.parameters.test_device_weights import eventually
from tests.support import weight_loops
from tests.support.everything_away import EVERYTHING
from tests.support.faults import eio, enospc
from tests.support.interrupted_points import Checkpoint, PointsIn
from tests.support.late import late_copies
from tests.support.opened import offloader_in
from tests.support.pairs import each_once
from tests.support.races import assert_no_race
from tests.support.switched_faults import Switch
from tests.support.weight_loops import MIN_TENSOR, PROGRAMS, Loop, gradients_of, same

IS_LATE = True
pytestmark = pytest.mark.usefixtures("many_parts")


def test_what_wears_drives_is_told_before_the_first_step(opened, caplog):
    with caplog.at_level(logging.INFO, "lightning_ssd"):
        Loop(opened(host_memory=0))
        Loop(opened(host_memory="1GiB"))
    told = [record.getMessage() for record in caplog.records if "each backward writes" in record.getMessage()]
    assert "of gradients wait between backward and update" in told[0]
    assert "writes 0.00" not in told[0]
    assert "writes 0.00" in told[1] or "writes 0 " in told[1]


def have_no_places(offloader):
    """A place is free once its last read has ended, in a worker."""
    tier = offloader._parts.parameters.gradients._tiers.ssd
    return eventually(offloader, lambda: not sum(arena.used_bytes for arena in tier._arenas))


def test_places_come_back(opened):
    offloader = opened()
    loop = Loop(offloader).run(2)
    num_units = set()
    for _ in range(4):
        loop.run(1)
        offloader.send_out_weights()
        assert have_no_places(offloader)
        num_units.add(len(pager_of(offloader).units))
    assert len(num_units) == 1


def test_of_models_that_are_gone_nothing_is_left(opened):
    offloader = opened()
    offloader.expect_no_optimizer()
    for _ in range(3):
        loop = Loop()
        offloader.register_module(loop.model)
        loop.offloader = offloader
        loop.backward()
        del loop
        gc.collect()
        offloader.send_out_weights()
    assert have_no_places(offloader)
    assert not pager_of(offloader).weights


def test_after_closing_they_are_plain_tensors(opened):
    offloader, plain = opened(), Loop()
    loop = Loop(offloader)
    loop.backward()
    assert have_left(offloader, loop.model)
    offloader.close()
    loop.offloader = None
    plain.backward()
    for one in (loop, plain):
        one.backward(step=1)
    assert {type(p.grad) for p in loop.model.parameters()} == {torch.Tensor}
    assert same([p.grad for p in loop.model.parameters()], [p.grad for p in plain.model.parameters()])


def test_who_uses_a_lost_gradient_is_refused(opened, monkeypatch):
    offloader = opened()
    loop = Loop(offloader)
    loop.backward()
    assert have_left(offloader, loop.model)

    def full(storage, nbytes):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.warns(UserWarning, match="gradients do not fit on the device"):
            offloader.close()
    parameter = next(p for name, p in loop.model.named_parameters() if name in gone(loop.model))
    with pytest.raises(OffloaderClosedError):
        parameter.grad.sum()
    loop.offloader = None
    with pytest.raises(OffloaderClosedError):
        loop.backward(step=1)
    loop.model.zero_grad()
    loop.backward(step=1)
    assert type(parameter.grad) is torch.Tensor


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


class Failing(Switch):
    """In one part of a step."""

    def __init__(self, window, **fails):
        super().__init__(**fails)
        self._window = window

    def begin(self, window):
        """Another part begins."""
        self.is_on = window == self._window


@pytest.mark.parametrize("failure", [eio, enospc])
@pytest.mark.parametrize("window", ["moving out", "accumulation", "clipping", "update"])
def test_a_drive_that_takes_nothing_for_a_while_costs_no_bit(window, failure, opened):
    failing, found = Failing(window, fail_write=failure), []
    for offloader in (None, opened(_wrap_backend=failing.wrap)):
        loop, seen = Loop(offloader), []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(cannot|could not) be written")
            for step in range(3):
                failing.begin("moving out")
                loop.backward(step=2 * step)
                failing.begin("accumulation")
                loop.backward(step=2 * step + 1)
                failing.begin("clipping")
                seen += [clip(loop.model), *gradients_of(loop.model)]
                failing.begin("update")
                loop.optimizer.step()
                failing.begin("end")
                loop.optimizer.zero_grad()
        found.append([*seen, *loop.result()])
    assert same(*found)


@pytest.mark.parametrize("window", ["accumulation", "clipping", "update"])
def test_a_drive_that_gives_nothing_back_says_what_to_do(window, opened):
    failing = Failing(window, fail_read=eio)
    offloader = opened(_wrap_backend=failing.wrap)
    loop, plain = Loop(offloader), Loop()
    loop.backward()
    assert have_left(offloader, loop.model)
    does = {
        "accumulation": lambda: loop.backward(step=1),
        "clipping": lambda: clip(loop.model),
        "update": lambda: loop.optimizer.step(),
    }
    failing.begin(window)
    with pytest.raises(StorageError) as refused:
        does[window]()
    failing.begin("end")
    assert "from a checkpoint" in " ".join([str(refused.value), *getattr(refused.value, "__notes__", ())])
    if window == "update":
        with pytest.raises(RuntimeError, match="an earlier step of this optimizer is incomplete"):
            loop.optimizer.step()
        return
    loop.optimizer.zero_grad()  # what was lost is made anew
    offloader.send_out_weights()
    assert same(loop.run(2).result(), plain.run(2).result())


OF_GRADIENTS, OF_WEIGHTS = ("device_gradients", "device_pager"), ("device_memory", "device_pager", "pager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "parameters", "one_in"),
    [
        (OF_GRADIENTS, "offload", 4),
        pytest.param(OF_GRADIENTS, "keep", 1, marks=pytest.mark.exhaustive),
        pytest.param(OF_GRADIENTS, "offload", 1, marks=pytest.mark.exhaustive),
        pytest.param(OF_WEIGHTS, "offload", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupt_leaves_gradients_as_they_were_or_became(names, parameters, one_in, spill_dir, monkeypatch):
    """In accumulation, clipping and update. Then the last checkpoint is loaded, and the step repeated."""
    monkeypatch.setattr(weight_loops, "NUM_BLOCKS", 2)

    def step(loop, see=lambda model: None):
        for number in range(2):
            loop.backward(step=number)
            see(loop.model)
        clip(loop.model)
        see(loop.model)
        loop.optimizer.step()

    points, num = PointsIn(*(f"parameters/{name}.py" for name in names), one_in=one_in), 0
    settings = {**EVERYTHING, "parameters": parameters, "activations": "keep", "min_tensor_bytes": MIN_TENSOR}
    with late_copies(max_delay_s=0) as copies, offloader_in(spill_dir, **settings, _copies=copies) as offloader:
        loop = Loop(offloader).run(1)
        checkpoint = Checkpoint(loop)
        plain, seen = checkpoint.load(Loop()), []
        step(plain, lambda model: seen.append(gradients_of(model)))
        expected = plain.result()
        checkpoint.load(loop)
        while (where := points.interrupt(lambda: step(loop))) is not None:
            num += 1
            for number, parameter in enumerate(loop.model.parameters()):
                if parameter.grad is not None:
                    found = parameter.grad.clone()
                    assert any(torch.equal(found, gradients[number]) for gradients in seen), where
            step(checkpoint.load(loop))
            assert same(loop.result(), expected), where
            checkpoint.load(loop)
        assert num > (50 if one_in == 1 else 8)
        checkpoint.load(loop)  # the last step was not interrupted, and has left gradients
        gc.collect()
        assert eventually(offloader, lambda: not pager_of(offloader).weights)
        assert parameters != "keep" or have_no_places(offloader)


@each_once(
    "program, host_memory, seed",
    ["adamw", "accumulated zeros", "clip norm", "edited gradients", "checkpointed"],
    [0, "1MiB", "1GiB"],
    range(2),
)
def test_no_race(program, host_memory, seed, spill_dir):
    settings = {**EVERYTHING, "activations": "keep", "min_tensor_bytes": MIN_TENSOR, "host_memory": host_memory}
    assert_no_race(lambda each, _: Loop(each, **PROGRAMS[program]).run(3).result(), spill_dir, seed=seed, **settings)
