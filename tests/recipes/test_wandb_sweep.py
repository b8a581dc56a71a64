"""A sweep in W&B, offline: what its runs are called, and what the dashboard finds in them."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_ssd.reports.dashboard import DASHBOARD
from recipes.schema import SCHEMA
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = SCHEMA.config_dir.parent
TINY = [
    *("experiment=smoke", "data.num_batches=8", "trainer.max_steps=8", "trainer.log_every_n_steps=1"),
    *("data.batch_size=2", "data.sequence_length=32"),
]
# Whatever the machine does meanwhile, something is moved; and what the dashboard shows has a number.
OFFLOADED = [
    *("offload=auto", "offload.max_slowdown=9", "offload.min_tensor_bytes=4KiB", "offload.optimizer_states=offload"),
    *("hardware.allow_unsuitable_paths=true", "hardware.drive_endurance=1TB", "hardware.host_memory=8MiB"),
]
NOT_HERE = re.compile(r"memory/device_peak_gib|memory/weights_.*|io/drive[2-7]_.*")
"""Of a CUDA device, of weights that wait, and of drives that the run has not got."""


def call(*command: str | Path, begin: Sequence[str] = (sys.executable,)) -> str:
    """Without a key, in a process of its own: W&B settles for a process whether it is online."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = {**unset, "NETRC": "/nowhere", "HOME": "/nowhere", "WANDB_SILENT": "true", "COLUMNS": "100"}
    words = [*begin, "-m", *map(str, command)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def records(folder: Path) -> list[dict[str, Any]]:
    """All that the one offline run of a folder holds, as W&B's own reader writes it."""
    (run,) = (folder / "wandb").glob("offline-run-*")
    return [json.loads(line) for line in call("wandb", "leet", "inspect", "--json", run).splitlines()]


def begin_of(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    run = next(record["run"] for record in found if "display_name" in record.get("run", {}))
    return run["display_name"], run["run_group"], run["job_type"]


def rows_of(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (record["history"]["item"] for record in found if "history" in record)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, forks: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "mine"
    paths = f"hardware.paths=[{folder}/a,{folder}/b]"
    logged = ["logger=csv_wandb", "logger.wandb.offline=true"]
    job = [*TINY, *OFFLOADED, paths, *logged, "seed=0,1", f"hydra.sweep.dir={folder}"]
    call("recipes.train", "-m", *job, begin=forks)
    return folder


def test_jobs_are_told_apart_and_belong_together(sweep: Path) -> None:
    begins = [begin_of(records(sweep / job)) for job in ("0", "1")]
    assert begins == [("gpt-auto-seed0-job0", "mine", "auto"), ("gpt-auto-seed1-job1", "mine", "auto")]


def test_every_panel_is_found_in_a_run_of_a_recipe(sweep: Path) -> None:
    run = records(sweep / "0")
    found = {key for row in rows_of(run) for key in row}
    found |= {key for record in run for key in record.get("summary", {}).get("update", {})}
    drawn = {key for section in DASHBOARD for panel in section.panels for key in panel.keys}
    missing = {key for key in drawn if not any(name == key or name.startswith(f"{key}.") for name in found)}
    assert {key for key in missing if not NOT_HERE.fullmatch(key)} == set()
    assert "io/drive1_write_gib" in found


def test_the_other_logger_has_the_same_numbers(sweep: Path) -> None:
    with (sweep / "0" / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["wear/written_tb"]]
    ours = [row for row in rows_of(records(sweep / "0")) if "wear/written_tb" in row]
    assert [float(row["wear/written_tb"]) for row in rows] == [row["wear/written_tb"] for row in ours]
    assert len(ours) == 8
