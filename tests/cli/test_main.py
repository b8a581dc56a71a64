from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lightning_ssd
from lightning_ssd.cli.main import app

COMMANDS = [command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback]


def test_the_command_of_the_project_is_this_application() -> None:
    project = tomllib.loads((Path(lightning_ssd.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["project"]["scripts"]["lightning-ssd"].partition(":")
    assert getattr(importlib.import_module(module), name) is app


def test_help_lists_the_commands() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert set(COMMANDS) == {"bench", "dashboard", "doctor", "plan", "report", "sweep-table"}
    assert all(command in done.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert f"Example: lightning-ssd {command}" in " ".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80


def test_an_unknown_command_is_refused() -> None:
    done = CliRunner().invoke(app, ["benhc"])
    assert done.exit_code == 2
    assert "benhc" in done.stderr
