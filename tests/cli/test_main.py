import importlib
import os
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lightning_ssd
from lightning_ssd.cli.main import COMMANDS, app
from tests.support.processes import run, run_python

ROOT = Path(lightning_ssd.__file__).parents[1]


def test_the_command_of_the_project_is_this_application():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    module, _, name = project["project"]["scripts"]["lightning-ssd"].partition(":")
    assert getattr(importlib.import_module(module), name) is app


def test_help_lists_the_commands():
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    assert set(COMMANDS) == {"bench", "dashboard", "doctor", "plan", "report", "sweep-table"}
    assert all(command in done.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_shows_an_example(command):
    done = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert f"Example: lightning-ssd {command}" in " ".join(done.output.split())
    assert max(map(len, done.output.splitlines())) <= 80


def test_an_unknown_command_is_refused():
    done = CliRunner().invoke(app, ["benhc"])
    assert done.exit_code == 2
    assert "benhc" in done.stderr
    assert "bench" in done.stderr.partition("benhc")[2], "and the nearest one is named"


CALL = """
import sys
from lightning_ssd_command import app

def call(*arguments):
    try:
        app(arguments, prog_name="lightning-ssd")
    except SystemExit as end:
        return end.code
"""


def in_a_new_process(source, **env):
    return run_python(CALL + source, cwd=ROOT, env=os.environ | env)


def test_help_and_typos_load_no_torch():
    told = in_a_new_process(
        'assert call("--help") == 0 and call("benhc") == 2\n'
        'assert not {"torch", "lightning", "lightning_ssd.config"} & set(sys.modules)'
    )
    assert "sweep-table" in told


def test_help_by_the_module_loads_no_torch_either():
    done = run(sys.executable, "-X", "importtime", "-m", "lightning_ssd", "--help", cwd=ROOT)
    assert "sweep-table" in done.stdout
    assert "lightning_ssd.cli.main" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.split()[-1] in ("torch", "lightning")]


def test_another_module_with_our_name_as_its_argument_gets_the_strategies(tmp_path):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import lightning_ssd\n")
    asked = "from lightning.pytorch.strategies import StrategyRegistry as r\nprint('ssd_offload' in r)\n"
    (package / "__main__.py").write_text(asked)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    assert run(sys.executable, "-m", "mine", "lightning_ssd", cwd=tmp_path, env=env).stdout == "True\n"


def test_doctor_loads_no_lightning(tmp_path):
    told = in_a_new_process(
        f'assert call("doctor", {str(tmp_path)!r}) == 0\n'
        'assert "torch" in sys.modules and "lightning" not in sys.modules',
        COLUMNS="80",
    )
    assert "Versions" in told
    assert "Backend" in told
    assert max(map(len, told.splitlines())) <= 80


def test_a_program_that_the_script_imports_gets_the_whole_package():
    """Such as a model for ``plan``, whose module uses the library."""
    source = """
import lightning_ssd
assert "lightning" not in sys.modules
from lightning_ssd import OffloadPolicy, SSDOffloadStrategy
from lightning.pytorch.strategies import StrategyRegistry
print("ssd_offload" in StrategyRegistry.available_strategies(), lightning_ssd.OffloadPolicy is OffloadPolicy)
try:
    lightning_ssd.Offlaoder
except AttributeError as error:
    print(error)
"""
    assert in_a_new_process(source).splitlines() == ["True True", "module 'lightning_ssd' has no attribute 'Offlaoder'"]
