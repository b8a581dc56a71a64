"""A recorded step tells what happened in it, to the byte, and changes no bit of what is trained."""

import json
import threading
import time
import weakref

import pytest
import torch

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from lightning_ssd.activations.parameter_filter import ParameterStorages
from lightning_ssd.errors import ConfigError
from lightning_ssd.telemetry.step_record import Bytes, StepRecord, StepRecorder
from tests.support.patience import PATIENCE_S
from tests.support.plan_trainings import gradients, loss_of, make_model


def offloader_in(directory, activations="offload"):
    policy = OffloadPolicy(activations=activations, min_tensor_bytes=1024)
    return Offloader(policy=policy, hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True))


def step(offloader, model, number):
    model.zero_grad()
    with offloader.saved_tensors():
        loss = loss_of(model, number)
    offloader.flush()
    loss.backward()
    offloader.end_backward()
    return gradients(model)


def assert_no_reader():
    """The thread that reads the memory ends by itself soon after its record."""
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.name == "lightning_ssd-record" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread goes on reading"
        time.sleep(0.005)


@pytest.mark.parametrize("activations", ["offload", "keep"])
def test_gradients_grow_in_backward(activations, tmp_path):
    model = make_model()
    total = sum(p.nbytes for p in model.parameters())
    with offloader_in(tmp_path, activations) as offloader:
        offloader.register_module(model)
        step(offloader, model, 0)
        offloader.begin_record(1, expected_s=1e-3)  # looks often
        expected = step(offloader, model, 1)
        record = offloader.end_record()
        assert all(torch.equal(one, other) for one, other in zip(step(offloader, model, 1), expected, strict=True))
    assert record is not None
    (forward,) = [phase for phase in record.phases if phase.name == "forward"]
    nbytes = [level.nbytes for level in record.gradients]
    assert nbytes[0] == nbytes[-1] == total, "those of the step before, and of this one"
    assert [level.nbytes for level in record.gradients if level.at_s <= forward.end_s][-1] == 0, "they were zeroed"
    grown = nbytes[1:]
    assert grown == sorted(grown)
    assert StepRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


class Forgets(torch.nn.Module):
    """Computes by functions alone, and lets go of what it has made."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(32))

    def forward(self, x):
        noise = torch.ones(1000)
        had = weakref.ref(noise)
        x = torch.exp(x * self.scale)
        del noise
        assert had() is None, "what a look at this frame's variables has found is held"
        return x.square()


def test_each_life_names_the_innermost_module_and_holds_nothing(tmp_path):
    inner = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU())
    model = torch.nn.Sequential(torch.nn.ModuleDict({"blocks": inner})["blocks"], Forgets())
    outside = torch.nn.Linear(32, 32)
    with offloader_in(tmp_path) as offloader:
        offloader.register_module(model)
        offloader.begin_record(1)
        with offloader.saved_tensors():
            loss = outside(model(torch.randn(64, 32)).tanh()).sum()
        loss.backward()
        offloader.end_backward()
        record = offloader.end_record()
    assert record is not None
    assert [life.module for life in record.lives] == ["0.0 Linear", "0.1 GELU", "1 Forgets", "1 Forgets", ""]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_no_other_thread_looks_at_gradients_that_one_is_setting(tmp_path, monkeypatch):
    """Autograd sets them without the GIL: the process ended."""
    is_in_backward, may_end = threading.Event(), threading.Event()

    def wait(gradient):
        is_in_backward.set()
        assert may_end.wait(PATIENCE_S)

    def train_slowly():
        with offloader.saved_tensors():
            loss = loss_of(model, 0)
        handle = next(model.parameters()).register_hook(wait)
        loss.backward()
        handle.remove()
        offloader.end_backward()

    looks = []
    real = ParameterStorages._bytes_of
    look = staticmethod(lambda tensors: (looks.append(1), real(tensors))[1])
    monkeypatch.setattr(ParameterStorages, "_bytes_of", look)
    model, other = make_model(), make_model()
    with offloader_in(tmp_path) as offloader:
        offloader.register_module(model)
        offloader.register_module(other)
        thread = threading.Thread(target=train_slowly)
        thread.start()
        assert is_in_backward.wait(PATIENCE_S)
        try:
            for number in range(2):  # the first one ends the other thread's pass, too
                assert offloader.begin_record(number, expected_s=1e-3)
                step(offloader, other, number)
                record = offloader.end_record()
                assert record is not None
                assert (record.gradients, record.gradient_bytes) == ((), 0)
            assert not looks
        finally:
            may_end.set()
            thread.join()
        assert offloader.begin_record(2, expected_s=1e-3)
        step(offloader, other, 2)
        assert looks
        offloader.end_record()


@pytest.mark.parametrize("activations", ["offload", "keep", "auto"])
def test_a_record_has_what_was_saved_and_moved(activations, tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with offloader_in(tmp_path, activations) as offloader:
        offloader.register_module(model)
        step(offloader, model, 0)
        optimizer.step()
        before = offloader.stats
        offloader.begin_record(1, expected_s=0.1, optimizers=[optimizer])
        step(offloader, model, 1)
        offloader.drain_metrics()  # what it takes away is in the record all the same
        optimizer.step()
        record = offloader.end_record()
        after = offloader.stats
    assert record is not None
    assert record.step == 1
    assert [phase.name for phase in record.phases] == ["data", "forward", "backward", "update"]
    assert record.phases[-1].end_s == record.length_s
    assert record.weight_bytes == record.gradient_bytes == sum(p.nbytes for p in model.parameters())
    assert record.state_bytes == sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    saved = after.bytes_saved - before.bytes_saved
    assert sum(life.nbytes for life in record.lives) == saved
    assert max(point.saved_bytes for point in record.activations) == after.saved_peak_bytes
    assert record.activations[-1].resident_bytes == record.activations[-1].saved_bytes == 0
    assert record.levels
    written = sum(move.nbytes for move in record.moves if move.direction == "write")
    assert written == after.bytes_written - before.bytes_written
    away = [life for life in record.lives if life.away]
    assert all(life.fate == "ssd" for life in away)
    assert bool(away) is bool(written)
    assert activations == "auto" or bool(away) is (activations == "offload")
    for life in record.lives:
        moments = [life.saved_s, *(moment for span in life.away for moment in span), life.freed_s]
        assert moments == sorted(moments)


def test_recording_changes_no_bit_and_nothing_is_left(tmp_path):
    model = make_model()
    with offloader_in(tmp_path) as offloader:
        offloader.register_module(model)
        expected = step(offloader, model, 3)
        offloader.begin_record(7)
        recorded = step(offloader, model, 3)
        assert offloader.end_record() is not None
        assert offloader.end_record() is None
        assert_no_reader()
    assert all(torch.equal(a, b) for a, b in zip(expected, recorded, strict=True) if a is not None and b is not None)


def test_a_record_that_nobody_ends_goes_with_the_offloader(tmp_path):
    with offloader_in(tmp_path) as offloader:
        assert offloader.begin_record(1)
        assert not offloader.begin_record(2), "somebody else's is under way"
        assert sum(thread.name == "lightning_ssd-record" for thread in threading.enumerate()) == 1
    assert_no_reader()


def test_passes_without_hooks_have_hooks_while_somebody_looks(tmp_path):
    model = make_model()
    with offloader_in(tmp_path, "keep") as offloader:
        offloader.register_module(model)

        def named(number):
            with offloader.saved_tensors(signature="same"):
                loss = loss_of(model, number)
            loss.backward()
            offloader.end_backward()

        for number in range(4):
            named(number)
        assert offloader.stats.num_plain_passes > 0
        offloader.begin_record(5)
        named(5)
        record = offloader.end_record()
    assert record is not None
    assert record.lives
    assert {life.fate for life in record.lives} == {"kept"}


def test_of_many_changes_the_peaks_stay():
    recorder = StepRecorder(1, lambda: 5, expected_s=0.01)
    for key in range(9000):
        recorder.saved(key, 10)
        recorder.entered(key, 10)
    for key in range(9000):
        recorder.left(key, 10)
        recorder.freed(key, 10, "ssd")
    record = recorder.finish()
    assert len(record.activations) <= 4096
    assert max(point.resident_bytes for point in record.activations) == 90_000
    assert isinstance(record.activations[0], Bytes)


def test_readings_that_fail_are_left_out():
    def full():
        raise OSError(24, "Too many open files")

    recorder = StepRecorder(1, full, expected_s=0.001)
    time.sleep(0.02)
    assert recorder.finish().levels == ()
    assert_no_reader()


def test_a_length_that_is_none_is_refused(tmp_path):
    for expected_s in (0.0, -1.0, float("nan"), float("inf")):
        with offloader_in(tmp_path) as offloader, pytest.raises(ConfigError, match="expected_s"):
            offloader.begin_record(1, expected_s=expected_s)


@pytest.mark.parametrize("activations", ["offload", "keep"])
def test_each_forward_of_a_step_is_recorded(activations, tmp_path):
    model = make_model()
    with offloader_in(tmp_path, activations) as offloader:
        offloader.register_module(model)
        offloader.begin_record(1)
        for number in range(4):
            with offloader.saved_tensors(signature="same"):
                loss = loss_of(model, number)
            loss.backward()
            offloader.end_backward()
            offloader.mark_record("data")
        record = offloader.end_record()
    assert record is not None
    assert [phase.name for phase in record.phases] == ["data", *["forward", "backward", "update", "data"] * 4]
    assert len(record.lives) % 4 == 0
    assert len(record.lives) > 4
