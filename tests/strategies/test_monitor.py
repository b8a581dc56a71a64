import csv
import io
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from rich.console import Console

from lightning_ssd import monitor as monitor_module
from lightning_ssd.monitor import OffloadMonitor
from lightning_ssd.reports.run_report import load_report
from lightning_ssd.telemetry.metrics import METRICS
from lightning_ssd.telemetry.stats import describe_held, saved_pct
from tests.parity.lightning_pairs import Drains
from tests.support.loggers import RecordingLogger
from tests.support.trainers import BAREBONES, LIGHTNING_NOISE, NUM_BATCHES, Net, fit, offload_strategy
from tests.support.wandb_runs import inspected

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]

PLAN_KEYS = {metric.key for metric in METRICS if metric.key.startswith("plan/")}
# What a run without a plan and without rated drives has to tell on a CPU.
ABSENT = {
    "memory/device_peak_gib",
    "memory/worst_rank",
    "memory/states_resident_gib",
    "memory/host_tier_gib",
    "memory/weights_offloaded_gib",
    "memory/weights_resident_peak_gib",
    "io/busiest_drive_ratio",
    *(metric.key for metric in METRICS if metric.key.startswith(("io/drive", "wear/drive"))),
}
KEYS_ON_CPU = {metric.key for metric in METRICS} - PLAN_KEYS - ABSENT


class FigureLogger(RecordingLogger):
    """It shows pictures as TensorBoard does."""

    def __init__(self):
        super().__init__()
        self.figures = []
        self.experiment = self

    def add_figure(self, tag, figure, step):
        self.figures.append((tag, step))


strategy_for = partial(offload_strategy, activations="offload", max_slowdown=50.0)
"""Without a plan by default: from the first step on everything moves, and all numbers are there. Where there is one,
moving is worth its time, whatever else the machine does meanwhile."""


def fit_monitored(directory, monitor=None, *, strategy=None, callbacks=(), **settings):
    monitor = monitor or OffloadMonitor(verdict=False)
    settings.setdefault("log_every_n_steps", 2)
    if strategy is None:
        # What is wanted back sooner than a busy drive has taken it is not written at all.
        strategy, callbacks = strategy_for(directory), [Drains(), *callbacks]
    trainer, _ = fit(Net, strategy, directory, callbacks=[monitor, *callbacks], **settings)
    return trainer, monitor


# -- loggers ----------------------------------------------------------------------------------------------------------


def read_csv(logger):
    logger.save()
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_logger_gets_rows_and_pictures_as_it_takes_them(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    logger, recording, another = CSVLogger(tmp_path / "csv"), FigureLogger(), RecordingLogger()
    monitor = OffloadMonitor(prog_bar=False, verdict=False)
    trainer, _ = fit_monitored(tmp_path, monitor, logger=[logger, recording, another], enable_progress_bar=True)
    assert trainer.progress_bar_metrics == {}, "it can do without us"
    assert [step for step, _ in recording.rows_of_ours()] == [1, 3, 5]
    assert recording.rows_of_ours() == another.rows_of_ours()
    assert set(recording.rows_of_ours()[0][1]) == {key.replace("/", ".") for key in KEYS_ON_CPU}
    pictures = {"offload/memory_over_step", "offload/transfers", "offload/lifetimes"}
    assert set(recording.figures) == {(tag, step) for tag in pictures for step in (1, 3, NUM_BATCHES - 1)}
    rows = read_csv(logger)
    assert set(rows[0]) >= KEYS_ON_CPU
    ours = [row for row in rows if row["wear/written_tb"]]
    theirs = [row for row in rows if row["train/loss"]]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == ["1", "3", "5"]
    stats = trainer.strategy.stats
    written = 2 * sum(float(row["io/write_gib"]) for row in ours) * 2**30  # mean per step, two steps in a row
    # A write may end between the last row and close.
    assert 0 < written <= stats.bytes_written
    assert float(ours[-1]["wear/written_tb"]) * 1e12 == pytest.approx(written)
    assert all(0 <= float(row["io/overlap_ratio"]) <= 1 for row in ours)
    assert float(ours[-1]["memory/activations_saved_peak_gib"]) * 2**30 == stats.saved_peak_bytes


def test_wandb_offline_has_rows_and_peaks_in_its_summary(tmp_path):
    wandb = pytest.importorskip("wandb")
    quiet = wandb.Settings(x_disable_stats=True, console="off", silent=True)
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test", settings=quiet)
    try:
        trainer, _ = fit_monitored(tmp_path, logger=logger)
    finally:
        wandb.finish()
    records = inspected(tmp_path)
    defined = {r["metric"]["name"]: r["metric"] for r in records if r["type"] == "metric" and "name" in r["metric"]}
    for metric in METRICS:
        if metric.merge == "max":
            assert defined[metric.key]["summary"] == {"max": True}
            assert defined[metric.key]["step_metric"] == "trainer/global_step"
    (others,) = [r["metric"] for r in records if r["type"] == "metric" and "glob_name" in r["metric"]]
    assert (others["glob_name"], others["step_metric"]) == ("*", "trainer/global_step"), "W&B's own page, too"
    updates = [record.get("config", {}).get("update", {}) for record in records]
    told = [update["lightning_ssd"] for update in updates if "lightning_ssd" in update][-1]
    assert told["policy"]["activations"] == "offload"
    assert told["hardware"]["paths"] == [str(tmp_path)]
    assert {"memory_bytes", "num_cpus", "malloc", "backend"} <= set(told["machine"])
    said = {key: value for r in records for key, value in r.get("summary", {}).get("update", {}).items()}
    assert said["offload/dashboard"] == "lightning-ssd dashboard --project test"
    assert "activations" in said["offload/verdict"]
    assert 0 <= said["offload/saved_pct"] <= 100
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    ours = [row for row in history if "wear/written_tb" in row]
    assert [row["trainer/global_step"] for row in ours] == [1, 3, 5]
    assert set(ours[0]) >= KEYS_ON_CPU
    assert trainer.strategy.stats.bytes_saved > 0


# -- plans and drives -------------------------------------------------------------------------------------------------


class WaitForPlans(Callback):
    """Plans are made in the background; here the next step follows the one that this step has asked for."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.strategy.offloader.wait_for_plan()


def test_plan_keys_are_shown_from_the_first_step_on_that_followed_one(tmp_path):
    logger = RecordingLogger()
    fit_monitored(
        tmp_path,
        strategy=strategy_for(tmp_path, activations="auto"),
        callbacks=[WaitForPlans()],
        logger=logger,
        log_every_n_steps=1,
    )
    rows = [row for _, row in logger.rows_of_ours()]
    keys = {key.replace("/", ".") for key in PLAN_KEYS}
    assert len(rows) == NUM_BATCHES
    assert not keys & set(rows[0]), "the first pass is profiled"
    assert all(keys <= set(row) for row in rows[1:])
    for row in rows[1:]:
        assert row["plan.num_plans"] >= 1
        assert row["plan.predicted_step_s"] > 0
        assert row["plan.measured_step_s"] > 0
        assert row["plan.measured_peak_gib"] > 0


# -- progress bar -----------------------------------------------------------------------------------------------------


def test_the_progress_bar_shows_what_is_saved(tmp_path):
    trainer, _ = fit_monitored(tmp_path, enable_progress_bar=True)
    stats = trainer.strategy.stats
    shown = {"saved%": saved_pct(stats.settled_peak_bytes, stats.saved_peak_bytes)}
    assert trainer.progress_bar_metrics == shown, "as in the verdict"


class LossOnBar(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss


class Drawing(Callback):
    """Draws the bar as a terminal of 80 columns shows it."""

    def on_train_batch_start(self, trainer, *args):
        console = Console(width=80, file=io.StringIO())
        console.print(trainer.progress_bar_callback.progress)
        self.drawn = console.file.getvalue().rstrip()


def test_the_bar_of_rich_fits_80_columns(tmp_path):
    drawing = Drawing()
    callbacks = [OffloadMonitor(verdict=False), RichProgressBar(), drawing]
    fit(LossOnBar, strategy_for(tmp_path), tmp_path, callbacks=callbacks, enable_progress_bar=True)
    assert "saved%: " in drawing.drawn
    assert "train/loss: " in drawing.drawn
    assert len(drawing.drawn.splitlines()) <= 2, drawing.drawn


# -- verdict ----------------------------------------------------------------------------------------------------------


def test_the_verdict_is_printed_once_at_the_end(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit_monitored(tmp_path, OffloadMonitor(verdict=False))
        assert "lightning_ssd: " not in caplog.text
        trainer, monitor = fit_monitored(tmp_path, OffloadMonitor())
    assert [r.getMessage() for r in caplog.records if "lightning_ssd: " in r.getMessage()] == [monitor.summary]
    stats = trainer.strategy.stats
    assert 0 < stats.settled_peak_bytes <= stats.resident_peak_bytes
    headline = f"saved activations {describe_held(stats.settled_peak_bytes, stats.saved_peak_bytes)}"
    if stats.settled_peak_bytes == stats.saved_peak_bytes:  # on a busy machine no write may have ended at the peak
        headline = "nothing saved: at the peak all "
    assert monitor.summary.startswith(f"lightning_ssd: {headline}")
    assert [line.split()[0] for line in monitor.summary.splitlines()[1:]] == ["drives", "memory", "next"]


def test_a_wear_budget_that_lets_nothing_be_written_is_said(tmp_path):
    strategy = strategy_for(tmp_path, activations="auto", wear_budget="1KB")
    _, monitor = fit_monitored(tmp_path, strategy=strategy, callbacks=[WaitForPlans()])
    headline = monitor.summary.splitlines()[0]
    assert "nothing saved: at the peak all " in headline
    assert "because wear_budget allows this process <0.1 MB per day and the plan needs " in headline


# -- another strategy -------------------------------------------------------------------------------------------------


def test_another_strategy_gets_one_warning_and_memory_peaks(tmp_path):
    logger, monitor = RecordingLogger(), OffloadMonitor(verdict=False, report_dir=tmp_path / "report")
    with pytest.warns(UserWarning, match="OffloadMonitor found SingleDeviceStrategy, which does not offload") as seen:
        trainer, _ = fit_monitored(tmp_path, monitor, strategy="auto", logger=logger, enable_progress_bar=True)
    assert len([w for w in seen if "OffloadMonitor" in str(w.message)]) == 1
    rows = [row for _, row in logger.rows if "memory.host_peak_gib" in row]
    assert len(rows) == 3
    assert all(set(row) == {"memory.host_peak_gib", "time.step_s"} for row in rows)
    assert monitor.summary.startswith("lightning_ssd: nothing was offloaded: the Trainer's strategy does not offload")
    report = load_report(tmp_path / "report")
    assert report.policy is None
    assert report.record is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit_loop.max_epochs += 1
        for noise in LIGHTNING_NOISE:
            warnings.filterwarnings("ignore", noise.split(":")[1])
        trainer.fit(trainer.lightning_module)


# -- state ------------------------------------------------------------------------------------------------------------


def test_bytes_written_go_on_over_fits_and_checkpoints(tmp_path):
    saving = {"enable_checkpointing": True, "logger": False, "log_every_n_steps": 1}
    monitor, checkpoint = OffloadMonitor(verdict=False), ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    trainer, module = fit(Net, strategy_for(tmp_path), tmp_path, callbacks=[monitor, checkpoint], **saving)
    first = monitor.state_dict()["written_bytes"]
    assert 0 < first <= trainer.strategy.stats.bytes_written
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module)
    second = monitor.state_dict()["written_bytes"]
    assert second > first

    logger, resumed = RecordingLogger(), OffloadMonitor(verdict=False)
    settings = {"max_epochs": 3, "logger": logger, "callbacks": [resumed], "log_every_n_steps": 1}
    fit(Net, strategy_for(tmp_path), tmp_path, ckpt_path=checkpoint.last_model_path, **settings)
    written = [row["wear.written_tb"] * 1e12 for _, row in logger.rows_of_ours()]
    assert len(written) == NUM_BATCHES
    assert written[0] > second * 0.9
    assert written == sorted(written)


# -- pictures and the report ------------------------------------------------------------------------------------------


def test_a_report_is_written_and_told_of(tmp_path, caplog):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    _, monitor = fit_monitored(tmp_path, OffloadMonitor(report_dir=tmp_path / "report"), log_every_n_steps=1)
    report = load_report(tmp_path / "report")
    assert report.summary == monitor.summary
    assert report.num_steps == NUM_BATCHES
    assert [row["step"] for row in report.rows] == list(range(NUM_BATCHES))
    for row in report.rows:
        phases = [row[f"io/stall_{phase}_s"] for phase in ("forward", "backward", "update")]
        assert sum(phases) == pytest.approx(row["io/stall_s"])
    assert report.machine["device"] == "cpu"
    assert report.machine["memory_bytes"] > report.peak_bytes
    record = report.record
    assert record is not None
    assert record.step == NUM_BATCHES
    assert {phase.name for phase in record.phases} >= {"forward", "backward", "update"}
    assert record.moves
    assert record.weight_bytes > 0
    assert (tmp_path / "report" / "report.html").read_text().count("<svg") >= 4


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("on_train_batch_start", MemoryError("none left")),
        ("on_after_backward", KeyboardInterrupt()),
        ("on_train_epoch_end", MemoryError("none left")),
    ],
)
def test_a_run_that_fails_leaves_a_report(where, error, tmp_path):
    def fail(self, *args):
        if where == "on_train_epoch_end" or self.trainer.global_step == 2:
            raise error

    fails = type("Fails", (Net,), {where: fail})
    monitor = OffloadMonitor(report_dir=tmp_path / "report")
    with pytest.raises((MemoryError, SystemExit, KeyboardInterrupt)):
        fit(fails, strategy_for(tmp_path), tmp_path, callbacks=[monitor])
    report = load_report(tmp_path / "report")
    num_steps = NUM_BATCHES if where == "on_train_epoch_end" else 2
    assert report.summary == f"The run ended early, after step {num_steps}: {error!r}"
    assert report.num_steps == num_steps
    assert report.record is not None
    assert monitor.summary is None, "no verdict"


def test_a_run_that_fails_before_it_trains_leaves_the_report_of_an_earlier_one(tmp_path):
    monitor = OffloadMonitor(report_dir=tmp_path / "report", verdict=False)
    fit_monitored(tmp_path, monitor)
    before = (tmp_path / "report" / "report.json").read_text()

    class Fails(Net):
        def configure_optimizers(self):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Fails, strategy_for(tmp_path), tmp_path, callbacks=[monitor])
    assert (tmp_path / "report" / "report.json").read_text() == before


def test_a_report_that_cannot_be_written_costs_no_run(tmp_path):
    (tmp_path / "file").touch()
    monitor = OffloadMonitor(report_dir=tmp_path / "file" / "below", verdict=False)
    with pytest.warns(UserWarning, match="could not write its report to .*below"):
        fit_monitored(tmp_path, monitor)
    assert monitor.summary


@pytest.mark.parametrize(
    "settings", [{"logger": False}, {"fast_dev_run": 2}, BAREBONES | {"log_every_n_steps": None}], ids=str
)
def test_with_fewer_things_in_the_trainer(settings, tmp_path):
    _, monitor = fit_monitored(tmp_path, OffloadMonitor(report_dir=tmp_path / "report", verdict=False), **settings)
    assert "barebones" not in settings or (monitor.summary, monitor._num_batches) == (None, 0)


def test_micro_batches_of_a_step_are_one_row_and_one_record(tmp_path):
    logger, monitor = RecordingLogger(), OffloadMonitor(report_dir=tmp_path / "report", verdict=False)
    trainer, _ = fit_monitored(tmp_path, monitor, logger=logger, accumulate_grad_batches=3, log_every_n_steps=1)
    rows = logger.rows_of_ours()
    assert [step for step, _ in rows] == [0, 1]
    written = sum(row["io.write_gib"] for _, row in rows) * 2**30
    assert 0 < written <= trainer.strategy.stats.bytes_written
    record = load_report(tmp_path / "report").record
    assert [phase.name for phase in record.phases].count("forward") == 3


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("no such backend")

    monkeypatch.setattr(monitor_module, "publish_charts", broken)
    with pytest.warns(UserWarning, match="could not log pictures") as told:
        trainer, monitor = fit_monitored(tmp_path, logger=FigureLogger())
    assert len([w for w in told if "could not log pictures" in str(w.message)]) == 1
    assert trainer.global_step == NUM_BATCHES
    assert monitor.summary


def test_a_validation_in_the_middle_of_a_step_is_no_part_of_it(tmp_path):
    monitor = OffloadMonitor(report_dir=tmp_path / "report", verdict=False)
    fit_monitored(tmp_path, monitor, accumulate_grad_batches=2, val_check_interval=1)
    assert load_report(tmp_path / "report").record is None


def test_several_processes_log_when_all_of_them_do():
    """One alone may have been told to stop, and logs with each step then."""
    stopped = SimpleNamespace(should_update_logs=True)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    trainer = SimpleNamespace(_logger_connector=stopped, fit_loop=loop, log_every_n_steps=2, world_size=2)
    due = []
    for loop.epoch_loop._batches_that_stepped in range(4):
        due.append(monitor_module._is_due(trainer))
    assert due == [False, True, False, True]
    trainer.log_every_n_steps = 0
    assert not monitor_module._is_due(trainer)
    trainer.world_size = 1
    assert monitor_module._is_due(trainer)
