"""``lightning-ssd dashboard`` with a key: W&B's own client sends the workspace to a server, which is ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.reports.dashboard import DASHBOARD
from tests.support.patience import PATIENCE_S
from tests.support.wandb_server import WandbServer, wandb_server

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[WandbServer]:
    pytest.importorskip("wandb_workspaces", reason="needs the extra `report`")
    with wandb_server() as running:
        yield running


def dashboard(base_url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with a key that nobody else knows."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    settings = {
        "WANDB_BASE_URL": base_url,
        "WANDB_API_KEY": 40 * "a",
        "HOME": str(folder),
        "COLUMNS": "100",
        "NETRC": str(folder / "none"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    command = [sys.executable, "-m", "lightning_ssd", "dashboard", "--json", str(folder / "board.json"), *options]
    return subprocess.run(command, env={**unset, **settings}, capture_output=True, text=True, timeout=PATIENCE_S)


def sections_of(workspace: dict[str, Any]) -> list[str]:
    return [section["name"] for section in workspace["section"]["panelBankConfig"]["sections"]]


def test_the_workspace_is_sent_as_it_was_written(server: WandbServer, tmp_path: Path) -> None:
    done = dashboard(server.url, tmp_path, "--project", "gpt", "--name", "Mine")
    assert done.returncode == 0, done.stdout + done.stderr
    (sent,) = server.views.values()
    assert (sent["entityName"], sent["projectName"], sent["displayName"]) == ("us", "gpt", "Mine")
    workspace = json.loads(sent["spec"])
    assert sections_of(workspace) == [section.name for section in DASHBOARD]
    assert workspace == json.loads((tmp_path / "board.json").read_text())["spec"]
    assert f"{server.url}/us/gpt" in done.stdout


def test_offline_sends_nothing_even_with_a_key(server: WandbServer, tmp_path: Path) -> None:
    done = dashboard(server.url, tmp_path, "--project", "gpt", "--offline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert server.views == {}


def test_a_refusal_is_an_error_with_advice(server: WandbServer, tmp_path: Path) -> None:
    server.refusal = "permission denied"
    done = dashboard(server.url, tmp_path, "--project", "gpt", "--entity", "them")
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert "expected W&B to take the workspace for them/gpt" in told
    assert "--entity and an existing --project, or give --offline" in told
    assert "Traceback" not in done.stderr
    assert (tmp_path / "board.json").is_file(), "what was written stays"
