"""Public projects, trained with the line of ``docs/projects.md``: the comparison, and two of them from an index."""

import os
from pathlib import Path

import pytest
import torch

from recipes.compat import projects
from recipes.compat.projects import PROJECTS, NotInstalled, difference, environment, train_and_compare

PAGE = projects.ROOT / "docs" / "projects.md"


def record(loss=1.0, **checkpoint):
    return {"losses": {"/0": torch.tensor(loss)}, "checkpoint": checkpoint, "moved": {}}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ([record(a=torch.zeros(2))], ""),
        ([record(a=torch.tensor([0.0, -0.0]))], "checkpointa differs"),
        ([record(a=torch.zeros(2, dtype=torch.float64))], "checkpointa differs"),
        ([record(a=torch.zeros(1, 2))], "checkpointa differs"),
        ([record(a="0")], "checkpointa differs"),
        ([record(1.0000001, a=torch.zeros(2))], "losses/0 differs"),
        ([record(b=torch.zeros(2))], "only in one: ['checkpointa', 'checkpointb']"),
        ([], "1 trainings, and 0"),
    ],
)
def test_one_bit_is_a_difference(other, said):
    found = difference([record(a=torch.zeros(2))], other)
    assert found.endswith(said)
    assert bool(found) is bool(said)


def test_the_page_has_what_was_tried():
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| [")]
    assert len(rows) == len(PROJECTS)
    for (name, project), row in zip(PROJECTS.items(), rows, strict=True):
        for text in (f"[{name}]", project.version, f"`{project.package}`", f"`{project.line}`"):
            assert text in row
    named = {Path(word).name for project in PROJECTS.values() for word in project.command if "{programs}" in word}
    assert named == {path.name for path in projects.PROGRAMS.glob("train_*.py")}


@pytest.mark.compat
@pytest.mark.slow
@pytest.mark.timeout(30 * projects.MINUTES)
@pytest.mark.parametrize("name", ["chemprop", "lightly"])
def test_a_public_project_trains_bit_for_bit(name, tmp_path):
    try:
        inside = environment(name, tmp_path / "environment", os.environ.get("PIP_ARGS", "").split())
    except NotInstalled as error:
        pytest.skip(f"pip cannot install {name}: {error}")
    outcomes = list(train_and_compare(name, inside, tmp_path / "runs"))
    assert [f"{one.way}: {one.result}" for one in outcomes if not one.is_equal] == []
    assert len(outcomes) == 2 + sum(map(len, PROJECTS[name].ways.values()))
