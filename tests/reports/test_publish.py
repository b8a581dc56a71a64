"""Pictures reach W&B (offline) and TensorBoard, and no other logger is disturbed."""

import json
import sys

import pytest

from lightning_ssd.reports.charts import step_charts
from lightning_ssd.reports.publish import publish_charts, publish_facts, takes_charts
from tests.support.step_records import made_record
from tests.support.wandb_runs import inspected

CHARTS = step_charts(made_record())


@pytest.fixture
def wandb_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = wandb.Settings(x_disable_stats=True, console="off", silent=True)
    run = wandb.init(dir=str(tmp_path), settings=settings)
    yield run
    wandb.finish()


def test_wandb_gets_pictures_settings_and_a_verdict(wandb_run, tmp_path):
    import wandb

    assert takes_charts(wandb_run)
    publish_charts(CHARTS, wandb_run, 3)
    publish_facts(wandb_run, config={"policy": {"activations": "auto"}}, summary={"offload/verdict": "it fits"})
    wandb.finish()
    text = json.dumps(inspected(tmp_path))
    for chart in CHARTS:
        assert f"offload/{chart.key}" in text
    assert "it fits" in text
    assert "activations" in text
    media = next((tmp_path / "wandb").glob("offline-run-*")) / "files" / "media"
    assert len(list(media.rglob("*.png"))) == len(CHARTS)


@pytest.mark.parametrize("experiment", [None, object(), {"log": 1}])
def test_others_get_nothing(experiment):
    assert not takes_charts(experiment)
    publish_charts(CHARTS, experiment, 3)
    publish_facts(experiment, config={"a": 1}, summary={"b": 2})


def test_without_matplotlib_it_is_said_what_to_install(wandb_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=r"'\.\[report\]'"):
        publish_charts(CHARTS, wandb_run, 1)
