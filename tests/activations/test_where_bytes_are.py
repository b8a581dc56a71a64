"""Where saved activations are when most are saved, what is recomputed in place of them, in which phase was waited."""

import signal
import time

import pytest
import torch
from torch import nn

from tests.support.faults import FaultyBackend
from tests.support.opened import offloader_in
from tests.support.weight_loops import in_a_fork

GIB = 1 << 30
PARTS = [f"memory/activations_{place}_at_peak_gib" for place in ("kept", "host", "ssd", "recomputed")]
SLOW_S = 0.05


def make_model():
    torch.manual_seed(0)
    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "norm_first": True}
    return nn.Sequential(*[nn.TransformerEncoderLayer(**layer) for _ in range(4)])


def step(offloader, model, batch=8, *, drain=False):
    x = torch.ones(batch, 12, 16)
    with offloader.saved_tensors():
        loss = model(x).square().mean()
    if drain:
        offloader.flush()
    loss.backward()
    offloader.end_backward()
    return offloader.drain_metrics()


def opened(directory, **settings):
    return offloader_in(directory, min_tensor_bytes=0, host_memory=0, **settings)


def parts_of(row):
    return [round(row[key] * GIB) for key in PARTS]


@pytest.mark.parametrize("mode", ["recompute", "recompute_offload"])
def test_what_is_recomputed_is_what_keeping_holds_besides(mode, tmp_path):
    model = make_model()
    with opened(tmp_path, activations="keep") as offloader:
        offloader.register_module(model)
        step(offloader, model)
        kept = offloader.stats.saved_peak_bytes
    with opened(tmp_path, activations=mode) as offloader:
        offloader.register_module(model)
        rows = [step(offloader, model) for _ in range(3)]
        stats = offloader.stats
    assert stats.recomputed_bytes > 2 * stats.saved_peak_bytes
    assert stats.saved_peak_bytes + stats.recomputed_bytes == kept
    for row in rows:
        assert sum(parts_of(row)) == kept
        assert parts_of(row)[3] == stats.recomputed_bytes


def test_a_retained_graph_counts_once(tmp_path):
    model = make_model()
    with opened(tmp_path, activations="recompute") as offloader:
        offloader.register_module(model)
        step(offloader, model)
        once = offloader.stats.recomputed_bytes
        with offloader.saved_tensors():
            loss = model(torch.ones(8, 12, 16)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        offloader.end_backward()
        assert offloader.stats.recomputed_bytes == once
        offloader.reset_peaks()
        assert offloader.stats.recomputed_bytes == 0


@pytest.mark.parametrize("mode", ["keep", "offload"])
def test_the_parts_add_up_to_what_is_saved(mode, tmp_path):
    model = make_model()
    with opened(tmp_path, activations=mode) as offloader:
        offloader.register_module(model)
        model[-1].register_forward_pre_hook(lambda module, args: offloader.flush())  # nothing is still on its way
        rows = [step(offloader, model) for _ in range(3)]
        saved = offloader.stats.saved_peak_bytes
        assert offloader.drain_metrics().keys().isdisjoint(PARTS), "nothing was saved since"
    for row in rows:
        kept, host, ssd, recomputed = parts_of(row)
        assert kept + host + ssd == saved
        assert host == recomputed == 0
        assert (ssd > 0) is (mode == "offload")


def test_waiting_in_backward_is_told_as_such(tmp_path):
    faulty = []

    def slow(_):
        time.sleep(SLOW_S)

    def wrap(backend):
        faulty.append(FaultyBackend(backend))
        return faulty[0]

    model = make_model()
    with opened(tmp_path, activations="offload", _wrap_backend=wrap) as offloader:
        offloader.register_module(model)
        faulty[0].fail_read = slow
        row = step(offloader, model, drain=True)
    assert row["io/stall_backward_s"] > SLOW_S / 2
    assert row["io/stall_backward_s"] == pytest.approx(row["io/stall_s"])
    assert row["io/stall_forward_s"] == pytest.approx(0.0, abs=1e-9)
    assert row["io/stall_update_s"] == 0


def test_waiting_of_an_update_is_told_as_such(tmp_path):
    model = make_model()
    with opened(tmp_path, activations="keep", optimizer_states="offload") as offloader:
        offloader.register_module(model)
        optimizer = offloader.offload_optimizer(torch.optim.AdamW(model.parameters()))
        for _ in range(3):
            step(offloader, model)
            optimizer.step()
            optimizer.zero_grad()
        row = offloader.drain_metrics()
        waited_s = sum(stats.stall_s for stats in offloader.optimizer_stats)
        assert sum((one.moved for one in offloader.optimizer_stats), offloader.stats).stall_update_s == waited_s
    assert row["io/stall_update_s"] == pytest.approx(row["io/stall_s"])


def test_a_fork_that_goes_on_with_a_graph_takes_no_lock(tmp_path):
    """Whoever held it when the child was forked is not there to let go of it."""
    model = make_model()
    settings = {"activations": "recompute", "min_tensor_bytes": "1GiB"}  # so that nothing else of ours is asked
    with offloader_in(tmp_path, **settings) as offloader:
        offloader.register_module(model)
        with offloader.saved_tensors():
            loss = model(torch.ones(8, 12, 16)).square().mean()
        with offloader._cache.accounting.lock:
            assert in_a_fork(lambda: (signal.alarm(60), loss.backward())) == 0
        loss.backward()
        offloader.end_backward()


@pytest.mark.parametrize("activations", ["offload", "auto"])
def test_a_fork_that_goes_on_with_a_forward_takes_no_lock(activations, tmp_path):
    """The second pass follows what the first one has taught, with hooks of its own."""
    settings = {"activations": activations, "min_tensor_bytes": 1, "max_slowdown": 1000.0}
    with offloader_in(tmp_path, **settings) as offloader:
        for _ in range(3):
            x = torch.rand(64, 64, requires_grad=True)
            with offloader.saved_tensors():
                y = x.sin().sin()
                with offloader._cache.accounting.lock:
                    again = lambda y=y: (signal.alarm(60), y.sin().t().cos() + y.exp())  # noqa: E731
                    assert in_a_fork(again) == 0
                y = y.sin()
            offloader.flush()
            y.sum().backward()
            offloader.end_backward()
            offloader.wait_for_plan()
