"""``report``, ``sweep-table`` and ``dashboard``: what a finished run leaves becomes something to look at."""

import csv
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_ssd.reports.adviser import advise
from lightning_ssd.reports.dashboard import DASHBOARD
from lightning_ssd.telemetry.metrics import METRICS
from tests.support import processes
from tests.support.commands import command, on_one_line
from tests.support.step_records import made_report

# wandb-workspaces declares its models in the way of Pydantic 1.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")


# -- report -----------------------------------------------------------------------------------------------------------


def test_report_makes_the_page_and_says_what_to_change(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    (tmp_path / "report.json").write_text(made_report(unusable="it is full", stats={}).to_json())
    done = command("report", tmp_path, "--out", tmp_path / "page")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "page" / "report.html").is_file()
    assert str(tmp_path / "page" / "report.html") in done.output.replace("\n", "")
    assert "HardwareProfile.paths" in done.output
    assert "200 MiB resident of 300 MiB & more" in on_one_line(done.output)


def test_report_says_once_what_the_verdict_says_already(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    found = made_report(unusable="it is full", stats={})
    first = advise(found)[0]
    told = replace(found, summary=f"lightning_ssd: a headline\n  next     {first}")
    (tmp_path / "report.json").write_text(told.to_json())
    done = command("report", tmp_path)
    assert done.exit_code == 0, done.output
    assert on_one_line(done.output).count(first) == 1


@pytest.mark.parametrize("content", [None, "{}"])
def test_report_without_one_fails_with_advice(content, tmp_path):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    done = command("report", tmp_path)
    assert done.exit_code == 1
    assert 'OffloadMonitor(report_dir="...")' in on_one_line(done.output)


def test_report_says_where_it_cannot_write(tmp_path):
    (tmp_path / "report.json").write_text(made_report().to_json())
    (tmp_path / "file").touch()
    done = command("report", tmp_path, "--out", tmp_path / "file")
    assert done.exit_code == 1
    assert "--out" in done.output
    pytest.importorskip("wandb_workspaces", reason="needs the extra `report`")
    done = command("dashboard", "--json", tmp_path / "none" / "dashboard.json", "--offline")
    assert done.exit_code == 1
    assert "--json" in done.output


# -- sweep-table ------------------------------------------------------------------------------------------------------


def make_sweep(folder):
    """Ten jobs as Hydra lays them out, all with ``seed=1``: nine of the recipes, and one with a report."""
    for number in range(9):
        job = folder / str(number)
        (job / ".hydra").mkdir(parents=True)
        (job / ".hydra" / "overrides.yaml").write_text(f"- seed=1\n- offload=ssd\n- 'data.batch_size={number}'\n")
        summary = {"step_s": 1.0 + number, "peak_above_rest_bytes": number << 20, "counted": number > 0}
        counts = ("settled_peak_bytes", "saved_peak_bytes", "written_bytes_per_step", "stall_s_per_step")
        (job / "summary.json").write_text(json.dumps({**summary, **dict.fromkeys(counts, number)}))
    (folder / "10" / ".hydra").mkdir(parents=True)
    (folder / "10" / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
    (folder / "10" / "page").mkdir()
    (folder / "10" / "page" / "report.json").write_text(made_report().to_json())


def test_a_sweep_is_a_table_a_csv_file_and_a_picture(tmp_path):
    make_sweep(tmp_path)
    done = command("sweep-table", tmp_path)
    assert done.exit_code == 0, done.output
    assert "data.batch_size=3" in done.output
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [*map(str, range(9)), "10"]
    assert rows[0]["settled_peak_bytes"] == "", "keep of the recipes counts nothing"
    assert rows[4]["overrides"] == "offload=ssd data.batch_size=4"
    assert float(rows[4]["step_s"]) == 5.0
    assert int(rows[9]["settled_peak_bytes"]) == 200 << 20
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "{}", "["])
def test_no_sweep_is_an_error(content, tmp_path):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    done = command("sweep-table", tmp_path)
    assert done.exit_code == 1
    assert str(tmp_path) in done.output.replace("\n", "")
    assert not (tmp_path / "sweep.csv").exists()


# -- dashboard --------------------------------------------------------------------------------------------------------


def test_the_dashboard_is_written(tmp_path):
    pytest.importorskip("wandb_workspaces", reason="needs the extra `report`")
    done = command("dashboard", "--project", "gpt", "--json", tmp_path / "dashboard.json", "--offline")
    assert done.exit_code == 0, done.output
    assert "Not sent to W&B: --offline" in on_one_line(done.output)
    content = json.loads((tmp_path / "dashboard.json").read_text())
    assert content["project"] == "gpt"
    sections = content["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == [section.name for section in DASHBOARD]
    drawn = [
        key
        for section in sections
        for panel in section["panels"]
        for key in panel["config"].get("metrics", []) + panel["config"].get("mediaKeys", [])
    ]
    assert drawn == [key for section in DASHBOARD for panel in section.panels for key in panel.keys]
    grouping = content["spec"]["section"]["runSets"][0]["grouping"]
    modes = [("run", "jobType"), ("config", "lightning_ssd.value.policy.activations")]
    assert [(key["section"], key["name"]) for key in grouping] == modes


def test_every_panel_shows_what_there_is():
    pictures = {"offload/memory_over_step", "offload/transfers", "offload/lifetimes"}
    keys = {metric.key for metric in METRICS} | pictures | {"offload/saved_pct"}
    for section in DASHBOARD:
        for panel in section.panels:
            assert set(panel.keys) <= keys
            assert (panel.kind == "media") is bool(set(panel.keys) & pictures)


def test_with_a_key_it_is_sent_and_a_refusal_is_an_error(tmp_path, monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces", reason="needs the extra `report`")
    sent = []
    refusals = [""]

    def save(workspace):
        if refusals[0]:
            raise ValueError(refusals[0])
        sent.append(workspace)
        return SimpleNamespace(url=f"https://wandb/{workspace.entity}/{workspace.project}")

    monkeypatch.setattr(workspaces.Workspace, "save_as_new_view", save)
    monkeypatch.setattr("lightning_ssd.cli.dashboard.has_key", lambda: True)
    arguments = ("dashboard", "--project", "gpt", "--entity", "us", "--json", tmp_path / "board.json")
    assert "Not sent to W&B: --offline" in command(*arguments, "--offline").output
    assert not sent
    done = command(*arguments)
    assert (done.exit_code, len(sent)) == (0, 1), done.output
    assert "https://wandb/us/gpt" in done.output
    assert [section.name for section in sent[0].sections] == [section.name for section in DASHBOARD]
    refusals[0] = "permission denied"
    done = command(*arguments)
    assert done.exit_code == 1
    told = on_one_line(done.stderr)
    assert "expected W&B to take the workspace for us/gpt, and got: permission denied" in told
    assert "--entity and an existing --project, or give --offline" in told


@pytest.mark.exhaustive  # W&B and its workspaces take 14 s to load
def test_without_a_key_nothing_is_sent(tmp_path):
    """In a process of its own: whoever asks W&B for a key settles for this process whether it is online."""
    pytest.importorskip("wandb_workspaces", reason="needs the extra `report`")
    unset = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    dashboard = [sys.executable, "-m", "lightning_ssd", "dashboard", "--json", str(tmp_path / "dashboard.json")]
    env = {**unset, "NETRC": str(tmp_path / "none"), "HOME": str(tmp_path), "COLUMNS": "100"}
    done = processes.run(*dashboard, env=env)
    assert "no key was found" in on_one_line(done.stdout)
