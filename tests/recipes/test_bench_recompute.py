"""The recipe that measures what proving a repetition costs runs, at a toy size."""

from __future__ import annotations

import pytest

from recipes.benchmarks import recompute


@pytest.mark.exhaustive
def test_a_toy_run(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the block is transformers'")
    recompute.main(["--batch", "1", "--length", "8", "--width", "64", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "forward, repetition and backward of one block: " in printed
    assert printed.count("%") == 3


def test_what_differs_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the block is transformers'")
    monkeypatch.setattr("lightning_ssd.recompute.fingerprint.Fingerprint.difference", lambda *_: "something")
    with pytest.raises(RuntimeError, match="the same tensors were found to differ"):
        recompute.shares(batch=1, length=8, width=64, rounds=1)
