"""The headline demo: a control group in which the kernel kills plain training, and offloaded training finishes."""

from dataclasses import replace

import pytest

from lightning_ssd import OffloadPolicy
from recipes.benchmarks import memory_limit
from recipes.benchmarks.harness.cgroups import GroupUnavailableError
from recipes.benchmarks.memory_limit import NO_GROUP, Trial, main, shown

MIB = 1 << 20
FREE = Trial(
    mode="plain",
    limit_bytes=None,
    losses=(3.0, 2.0),
    step_s=(0.5, 0.4),
    exit_code=0,
    rest_bytes=100 * MIB,
    peak_bytes=300 * MIB,
    weights_digest="ab",
)
KILLED = replace(FREE, limit_bytes=200 * MIB, losses=(3.0,), step_s=(0.5,), exit_code=-9, weights_digest="")
OURS = replace(FREE, mode="ssd", limit_bytes=200 * MIB, moved_bytes=7 * MIB)


def test_without_a_control_group_it_says_what_to_do(monkeypatch, tmp_path, capsys):
    def refuse(*_, **__):
        raise GroupUnavailableError("control groups need root here")

    monkeypatch.setattr(memory_limit, "control_group", refuse)
    assert main(["--tiny", "--dir", str(tmp_path)]) == NO_GROUP
    said = capsys.readouterr().err
    assert "control groups need root here" in said
    assert "Run as root" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "plain", "ours", "is_shown", "text"),
    [
        (FREE, KILLED, OURS, True, "in step 2; with SSDOffloadStrategy the same training finished"),
        (FREE, KILLED, replace(OURS, losses=(3.0, 2.5)), False, "LOSSES OR WEIGHTS DIFFER"),
        (FREE, KILLED, replace(OURS, weights_digest="ba"), False, "LOSSES OR WEIGHTS DIFFER"),
        (FREE, KILLED, replace(KILLED, mode="ssd"), False, "too small for SSDOffloadStrategy"),
        (FREE, replace(FREE, limit_bytes=1), OURS, False, "not too small for plain training"),
        (replace(FREE, exit_code=1, weights_digest=""), KILLED, OURS, False, "did not finish"),
    ],
    ids=["shown", "losses", "weights", "both killed", "none killed", "reference"],
)
def test_verdicts(free, plain, ours, is_shown, text):
    assert shown(free, plain, ours)[0] is is_shown
    assert text in shown(free, plain, ours)[1]


def test_what_is_printed_is_what_trains():
    """The policy in words, read as Python, is that of the worker."""
    plain = memory_limit.SIZES["tiny"]
    for budget in (None, 7 * MIB):
        job = replace(plain, mode="ssd", directory="", activation_budget=budget)
        names = {"SSDOffloadStrategy": lambda policy: policy, "OffloadPolicy": OffloadPolicy}
        told = eval(job.strategy, names)
        assert told == OffloadPolicy(**job.options)
        assert told.optimizer_states == "offload"
        assert told.activation_budget == budget
