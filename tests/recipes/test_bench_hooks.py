"""The evidence on hooks: its arithmetic, and its real entry point at a toy size."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from recipes.benchmarks import hook_evidence, hooks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "CHAIN", 60)
    monkeypatch.setattr(hook_evidence, "ONCE_STORAGES", 20)
    monkeypatch.setattr(hook_evidence, "ONCE_PARAMETERS", 8)


@pytest.mark.exhaustive
def test_the_table_is_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No bound on times: they are differences of milliseconds, and other processes turn their sign."""
    threads, lock = torch.get_num_threads(), threading.Lock
    saved = tmp_path / "hooks.json"
    assert hooks.main(["--rounds", "2", "--dir", str(tmp_path / "drive"), "--json", str(saved)]) == 0
    torch.set_num_threads(threads)
    assert threading.Lock is lock, "what is counted is put back"
    content, out = json.loads(saved.read_text()), capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 14
    assert {line.count("|") for line in rows} == {4}
    moved, kept = content["counts"]["moved"], content["counts"]["large, stays"]
    assert moved is not None, "nothing was moved"
    assert moved["calls"] > kept["calls"] > 0
    assert moved["locks"] >= kept["locks"]
    assert f"| {moved['calls']:.1f} / {moved['locks']:.2f} |" in out
    assert f"| {content['tiny_gpt']['everything moved']:.2f} |" in out
    assert content["tiny_gpt"]["everything moved"] > 0
    assert set(content["once_per_step_ms"]) == {"enter", "leave", "end of backward", "metrics"}
    assert content["environment"]["command"].startswith("python -m recipes.benchmarks.hooks")
