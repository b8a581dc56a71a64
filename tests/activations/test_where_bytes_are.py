"""Where saved activations are when most are saved, what is recomputed in place of them, in which phase was waited."""

import os
import signal
import time
from functools import partial

import pytest
import torch
from torch import nn

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.faults import FaultyBackend
from tests.support.plan_trainings import ROWS, SMALLEST, WIDTH

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
    memory = settings.pop("host_memory", 0)
    hardware = HardwareProfile(paths=directory, allow_unsuitable_paths=True, host_memory=memory)
    return Offloader(policy=OffloadPolicy(min_tensor_bytes=0, **settings), hardware=hardware)


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


def test_host_memory_is_told_apart_from_drives(tmp_path):
    """Under a budget and with a slow drive, plans move to host memory."""
    policy = OffloadPolicy(activations="auto", min_tensor_bytes=0, activation_budget=SMALLEST)
    hardware = HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True, host_memory="8MiB")
    x, rows = torch.ones(ROWS, WIDTH, requires_grad=True), []
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=partial(FaultyBackend, delay_s=0.3)) as offloader:
        for _ in range(10):
            with offloader.saved_tensors():
                y = x * 1
                for _ in range(30):
                    y = y.sin()
                loss = y.square().sum()
            del y
            loss.backward()
            offloader.end_backward()
            offloader.wait_for_plan()
            rows.append(parts_of(offloader.drain_metrics()))
        saved, moved = offloader.stats.saved_peak_bytes, offloader.stats.bytes_host
    assert moved > 0
    assert all(kept + host + ssd == saved and min(kept, host, ssd) >= 0 for kept, host, ssd, _ in rows)
    assert rows[-1][1] > 0


def test_waiting_in_backward_is_told_as_such(tmp_path):
    faulty = []

    def slow(_):
        time.sleep(SLOW_S)

    def wrap(backend):
        faulty.append(FaultyBackend(backend))
        return faulty[0]

    model = make_model()
    hardware = HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True)
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=hardware, _wrap_backend=wrap) as offloader:
        offloader.register_module(model)
        faulty[0].fail_read = slow
        row = step(offloader, model, drain=True)
    assert row["io/stall_backward_s"] > SLOW_S / 2
    assert row["io/stall_backward_s"] == pytest.approx(row["io/stall_s"])
    assert row["io/stall_forward_s"] == pytest.approx(0.0, abs=1e-9)
    assert row["io/stall_update_s"] == 0


def test_waiting_of_an_update_is_told_as_such(tmp_path):
    model = make_model()
    hardware = HardwareProfile(paths=tmp_path, allow_unsuitable_paths=True)
    policy = OffloadPolicy(activations="keep", optimizer_states="offload", min_tensor_bytes=0)
    with Offloader(policy=policy, hardware=hardware) as offloader:
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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_that_goes_on_with_a_graph_takes_no_lock(tmp_path):
    """Whoever held it when the child was forked is not there to let go of it."""
    model = make_model()
    policy = OffloadPolicy(activations="recompute", min_tensor_bytes="1GiB")  # so that nothing else of ours is asked
    with Offloader(policy=policy, hardware=HardwareProfile(paths=tmp_path)) as offloader:
        offloader.register_module(model)
        with offloader.saved_tensors():
            loss = model(torch.ones(8, 12, 16)).square().mean()
        with offloader._cache.accounting.lock:
            child = os.fork()
            if not child:
                signal.alarm(60)
                loss.backward()
                os._exit(0)
            _, status = os.waitpid(child, 0)
        loss.backward()
        offloader.end_backward()
    assert os.waitstatus_to_exitcode(status) == 0
