"""A drive that fails, lies or dawdles: training goes on exactly or stops with the reason, never with other bytes."""

import errno
import gc
import threading
import warnings
from contextlib import suppress

import pytest
import torch

from lightning_ssd.common.tensors import StorageKey
from lightning_ssd.errors import CorruptionError, OffloaderClosedError, StorageError
from tests.parity.models import Perceptrons, floats, mean_square, sines
from tests.support.faults import always, eio, enospc, on_calls, short
from tests.support.helpers import DRAINED, Session, Setup, Training, assert_identical, assert_released, outcome
from tests.support.plan_trainings import faulty

TRAINING = Training(
    lambda: Perceptrons(num_blocks=2), lambda step: {"x": floats(step, 9, 17, 40)}, mean_square, steps=4
)
FULL = Setup(verify="full")


def chain(offloader):
    """A loss whose saved tensors are all on disk."""
    x = floats(0, 64, 64).requires_grad_()
    with offloader.saved_tensors():
        loss = sines(x * 1, 6).sum()
    offloader.flush()
    return loss


FAILING_WRITES = {
    "EIO always": always(eio),
    "EIO once": on_calls([3], eio),
    "EIO every other": lambda index: eio() if index % 2 else None,
    "ENOSPC always": always(enospc),
    "ENOSPC from the tenth": on_calls(range(10, 10**9), enospc),
    "short once": on_calls([5], short),
    "an error that is no storage error": on_calls([2], lambda: ValueError("injected")),
}


@pytest.mark.parametrize(
    ("name", "drained"),
    [*((name, True) for name in FAILING_WRITES), ("EIO every other", False), ("ENOSPC always", False)],
)
def test_failed_writes_cost_memory_only(name, drained, tmp_path):
    expected = outcome(TRAINING, Session())
    with (
        warnings.catch_warnings(record=True) as caught,
        faulty(tmp_path, DRAINED, fail_write=FAILING_WRITES[name]) as (offloader, made),
    ):
        warnings.simplefilter("always")
        assert_identical(outcome(TRAINING, Session(offloader, drained=drained)), expected)
        assert_released(offloader)
        stats = offloader.stats
        if drained:
            assert stats.failures > 0
            assert stats.fallbacks == stats.failures
            assert made.num_writes > 0
    ours = [warning for warning in caught if "injected" in str(warning.message)]
    assert len(ours) == min(stats.failures, 1), "one warning, and only one, says that writing failed"


def test_writes_fail_for_a_while(tmp_path):
    """When the drive works again, so does offloading."""
    with warnings.catch_warnings(), faulty(tmp_path, DRAINED, fail_write=on_calls(range(8), eio)) as (offloader, _):
        warnings.simplefilter("ignore", UserWarning)
        session = Session(offloader, drained=True)
        assert_identical(outcome(TRAINING, session), outcome(TRAINING, Session()))
        assert offloader.stats.failures == 8
        assert offloader.stats.bytes_read > 0


@pytest.mark.usefixtures("no_collector")
def test_a_failed_write_keeps_nothing_alive(tmp_path):
    """Neither the warning that is to come nor the error holds the tensor, and no collector is waited for."""
    with warnings.catch_warnings(), faulty(tmp_path, DRAINED, fail_write=always(eio)) as (offloader, _):
        warnings.simplefilter("ignore", UserWarning)
        x = floats(0, 64, 64).requires_grad_()
        with offloader.saved_tensors():
            y = x * 1
            saved = StorageKey(y.untyped_storage())
            loss = y.sin().sum()
        offloader.flush()
        assert offloader.stats.failures > 0
        del y
        assert saved.alive()
        loss.backward()
        del loss
        assert not saved.alive()


def test_a_failed_read_is_tried_again(tmp_path):
    expected = outcome(TRAINING, Session())
    with faulty(tmp_path, DRAINED, fail_read=on_calls([0, 4, 9], eio)) as (offloader, _):
        assert_identical(outcome(TRAINING, Session(offloader, drained=True)), expected)
        stats = offloader.stats
        assert stats.failures == stats.fallbacks == 3
        assert_released(offloader)


def test_a_read_that_fails_twice_raises_where_somebody_waits(tmp_path):
    def catches_in_the_loop():
        with faulty(tmp_path, DRAINED, fail_read=always(eio)) as (offloader, made):
            with pytest.raises(StorageError, match="injected") as raised:
                chain(offloader).backward()
            assert raised.value.errno == errno.EIO
            assert made.num_reads >= 2
            assert offloader.stats.failures >= 1

    with pytest.raises(StorageError, match="injected") as again:  # who went on learns of it at the latest when closing
        catches_in_the_loop()
    assert again.value.errno == errno.EIO


def test_close_does_not_hide_the_error_under_way(tmp_path):
    class Boom(Exception):
        pass

    with (
        pytest.raises(StorageError, match="injected") as caught,
        faulty(tmp_path, DRAINED, fail_read=always(eio)) as (offloader, _),
    ):
        chain(offloader).backward()
    assert caught.value.__context__ is None or isinstance(caught.value.__context__, StorageError)

    def breaks():
        with faulty(tmp_path, DRAINED, fail_write=always(enospc), delay_s=0.002) as (offloader, _):
            chain(offloader)
            raise Boom

    with warnings.catch_warnings(action="ignore", category=UserWarning), pytest.raises(Boom):
        breaks()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning_ssd")]


def test_what_close_raises_of_a_failed_read_keeps_nothing_alive(tmp_path):
    """The frames that it passes hold a loss, whose graph holds what knows the offloader."""
    met = []

    def train(offloader):
        loss = chain(offloader)
        met.append(StorageKey(loss.untyped_storage()))
        with pytest.raises(StorageError):
            loss.backward()
        offloader.close()

    with faulty(tmp_path, DRAINED, fail_read=always(eio)) as (offloader, _):
        with pytest.raises(StorageError):
            train(offloader)
        gc.collect()
        assert not met[0].alive()


def test_training_goes_on_after_a_failed_read(tmp_path):
    """It spoils nothing: the next attempt of a backward whose graph is retained succeeds, and so do later steps."""
    x = floats(0, 64, 64).requires_grad_()
    (expected,) = torch.autograd.grad((x * 2).sin().exp().sum(), x)
    failing = [True]
    with faulty(tmp_path, DRAINED, fail_read=lambda _: eio() if failing[0] else None) as (offloader, _):
        for step in range(3):
            with offloader.saved_tensors():
                loss = (x * 2).sin().exp().sum()
            offloader.flush()
            if step == 0:
                with pytest.raises(StorageError):
                    loss.backward(retain_graph=True)
                failing[0] = False
            loss.backward()
            if step:
                offloader.end_backward()
            assert_identical(x.grad, expected)
            x.grad = None
        del loss
        offloader.abort()
        assert_released(offloader)


def test_a_bit_flips_once(tmp_path):
    """Between drive and memory: the second read is right."""
    expected = outcome(TRAINING, Session())
    with faulty(tmp_path, FULL, corrupt_read=lambda index: index % 5 == 0) as (offloader, _):
        assert_identical(outcome(TRAINING, Session(offloader, drained=True)), expected)
        assert offloader.stats.failures > 0
        assert offloader.stats.fallbacks == offloader.stats.failures
        assert_released(offloader)


def test_a_bit_has_flipped_on_the_drive(tmp_path):
    with faulty(tmp_path, FULL, corrupt_read=lambda _: True) as (offloader, _):
        loss = chain(offloader)
        with pytest.raises(CorruptionError, match=r"offset \d+") as raised:
            loss.backward()
        assert str(tmp_path) in str(raised.value)
        assert "saved storage" in str(raised.value)
        del loss
        offloader.abort()


def _random_delays(seed):
    generator = torch.Generator().manual_seed(seed)
    lock = threading.Lock()

    def wait(_):
        with lock:
            delay_s = float(torch.rand((), generator=generator)) * 0.004
        threading.Event().wait(delay_s)

    return wait


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_overtake_each_other(seed, tmp_path):
    """Random delays per request, so that forwarding, cancelling and urgent reads meet in many ways."""
    expected = outcome(TRAINING, Session())
    delays = _random_delays(seed)
    with faulty(tmp_path, DRAINED, fail_write=delays, fail_read=delays) as (offloader, _):
        for _ in range(2):
            assert_identical(outcome(TRAINING, Session(offloader, drained=bool(seed % 2))), expected)
        assert_released(offloader)
        stats = offloader.stats
        assert stats.failures == 0
        assert stats.bytes_read + stats.bytes_forwarded > 0


def test_closing_while_everything_is_under_way(tmp_path):
    """Queued writes are dropped, running ones end, threads and files go; the graph may die before or after."""
    loss = None
    with faulty(tmp_path, DRAINED, delay_s=0.01) as (offloader, _):
        x = floats(0, 64, 64).requires_grad_()
        with offloader.saved_tensors():
            loss = sines(x * 1, 30).sum()
    assert offloader.stats.bytes_written < 30 * 64 * 64 * 4
    with suppress(OffloaderClosedError):  # what had been written is gone with the file; the rest is still in memory
        loss.backward()
        (got, x.grad) = (x.grad, None)
        sines(x * 1, 30).sum().backward()
        assert_identical(got, x.grad)
    del loss
    gc.collect()
