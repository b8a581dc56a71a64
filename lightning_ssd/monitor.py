"""``OffloadMonitor``: numbers and pictures to loggers, a report, and a verdict at the end. Wiring only."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_ssd._both_packages import callback_of_both_packages
from lightning_ssd.memory.malloc import malloc_name
from lightning_ssd.memory.readings import capacity_bytes, read_memory
from lightning_ssd.offloader import Offloader
from lightning_ssd.reports.charts import step_charts
from lightning_ssd.reports.files import write_report
from lightning_ssd.reports.publish import publish_charts, publish_facts, takes_charts
from lightning_ssd.reports.run_log import RunLog
from lightning_ssd.reports.run_report import RunReport
from lightning_ssd.reports.verdict import judge
from lightning_ssd.telemetry.metrics import METRICS, MetricWindow, compute, merge_ranks
from lightning_ssd.telemetry.stats import OffloadStats, saved_pct

__all__ = ["OffloadMonitor"]

_log = logging.getLogger(__name__)
_TB = 10**12
_LIBRARIES = ("lightning_ssd", "torch", "lightning")
_WITHOUT_OFFLOADER = ("time/step_s", "memory/device_peak_gib", "memory/host_peak_gib")


@callback_of_both_packages
class OffloadMonitor(Callback):
    """Records memory peaks, what moved, and what it cost.

    Once per optimizer step it takes the numbers of :data:`lightning_ssd.telemetry.metrics.METRICS` from the strategy's
    offloader. Every ``log_every_n_steps`` the steps since the last row are merged (mean per step, largest peak) and
    given to all loggers of the Trainer, under the keys of that table. Rows of several processes are merged by that
    table's rules (the worst peak, all bytes together), with one collective per row, so that every process needs the
    callback; ``memory/worst_rank`` says whose peak it is. The verdict has rank zero's own numbers. Where the strategy
    does not offload, the monitor says so once and records time and memory peaks alone, so that runs with and without us
    can be compared with one callback.

    Optimizer steps 2, 4, 8, 16 ... and the last one are recorded where a report or a logger takes pictures:
    memory over the step, transfers
    beside what the model does, and the lives of the largest saved tensors. W&B and TensorBoard get them as pictures
    (``offload/...``), W&B the settings as well; ``report_dir`` gets a page. Of several processes, the first one is
    recorded.

    Args:
        prog_bar: show on the progress bar by how many per cent saved activations take less memory (``saved%``),
            without what recomputing saves.
        verdict: print a headline, at most three lines and the next step at the end of ``fit``; the text is in
            :attr:`summary` in any case.
        report_dir: a directory for ``report.html``, ``report.json``, and still pictures, written at the end of
            ``fit``, also of one that an error or Ctrl-C ends; made if it is missing. ``None``: none are. The page and
            the pictures need Matplotlib (``pip install '.[report]'`` in the checkout).
    """

    def __init__(
        self,
        *,
        prog_bar: bool = True,
        verdict: bool = True,
        report_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.prog_bar = prog_bar
        self.report_dir = report_dir
        self.verdict = verdict
        self.summary: str | None = None
        """The verdict on the last ``fit`` that ended well."""
        self._window = MetricWindow()
        self._run = MetricWindow()
        self._batch_started_s = self._step_s = self._run_s = self._last_step_s = 0.0
        self._num_batches = 0  # of the step under way
        self._written_before = self._written_now = 0
        self._warned = False
        self._log_of_run = RunLog()
        self._wants_records = self._is_recording = self._is_running = False
        self._told: set[str] = set()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"written_bytes": self._written_before + self._written_now}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._written_before, self._written_now = state_dict["written_bytes"], 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window, self._run = MetricWindow(), MetricWindow()
        self._step_s = self._run_s = 0.0
        self._num_batches = 0
        self._written_before, self._written_now = self._written_before + self._written_now, 0
        self.summary = None
        self._log_of_run, self._is_recording = RunLog(), False
        self._wants_records = False
        if trainer.barebones:
            return
        self._is_running = True
        if _offloader_of(trainer) is None and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"OffloadMonitor found {type(trainer.strategy).__name__}, which does not offload: it records memory "
                'peaks alone. To offload, pass strategy="ssd_offload" to the Trainer',
                category=UserWarning,
            )
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                _define_peaks(logger)
            self._publish(trainer, "log its settings", self._report(trainer), {})
            self._wants_records = self.records_steps(trainer)

    def records_steps(self, trainer: pl.Trainer) -> bool:
        """Return whether a report or a logger takes pictures of recorded steps."""
        return self.report_dir is not None or any(map(takes_charts, _experiments(trainer)))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin_record(trainer)
        self._batch_started_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._step_s += time.perf_counter() - self._batch_started_s
        if trainer.barebones:
            return
        self._num_batches += 1
        if trainer.fit_loop._should_accumulate():
            if self._is_recording and (offloader := _offloader_of(trainer)) is not None:
                offloader.mark_record("data")
            return
        sample, self._num_batches = self._sample(trainer), 0
        self._end_record(trainer)
        self._window.add(sample)
        self._run.add(sample)
        offloader = _offloader_of(trainer)
        if self.prog_bar and trainer.progress_bar_callback is not None and offloader is not None:
            self._show(pl_module, offloader.stats)
        self._last_step_s, self._run_s, self._step_s = self._step_s, self._run_s + self._step_s, 0.0
        if _is_due(trainer):
            self._log(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        offloader = _offloader_of(trainer)
        if self._is_recording and offloader is not None:  # in the middle of a step: it would be taken for a part of it
            self._is_recording = False
            offloader.end_record()

    def _sample(self, trainer: pl.Trainer) -> dict[str, float]:
        offloader = _offloader_of(trainer)
        if offloader is None:
            nothing = OffloadStats()
            readings = read_memory(trainer.strategy.root_device)
            sample = compute((), stats_before=nothing, stats_now=nothing, readings=readings, step_s=self._step_s)
            return {key: sample[key] for key in _WITHOUT_OFFLOADER if key in sample}
        sample = offloader.drain_metrics(step_s=self._step_s)
        self._written_now = round(sample["wear/written_tb"] * _TB)
        sample["wear/written_tb"] = (self._written_before + self._written_now) / _TB
        return sample

    def _begin_record(self, trainer: pl.Trainer) -> None:
        offloader, step = _offloader_of(trainer), self._run.num_steps + 1
        if not self._wants_records or self._num_batches or offloader is None:  # half a step is no record
            return
        if not (RunLog.wants_record(step) or _is_last_step(trainer)):
            return
        self._is_recording = offloader.begin_record(
            trainer.fit_loop.epoch_loop._batches_that_stepped + 1,
            expected_s=max(self._last_step_s, 1e-3),
            optimizers=trainer.optimizers,
        )

    def _end_record(self, trainer: pl.Trainer) -> None:
        offloader = _offloader_of(trainer)
        if not self._is_recording or offloader is None:
            return
        self._is_recording = False
        record = offloader.end_record()
        if record is None:
            return
        self._log_of_run.record = record
        takers = [experiment for experiment in _experiments(trainer) if takes_charts(experiment)]
        charts = step_charts(record) if takers else []
        for experiment in takers:
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            self._try("log pictures", partial(publish_charts, charts, experiment, step))

    def _show(self, pl_module: pl.LightningModule, stats: OffloadStats) -> None:
        """Show one number: a terminal of 80 columns has room for no more beside the loss."""
        percent = saved_pct(stats.settled_peak_bytes, stats.saved_peak_bytes)
        if percent is None or not stats.settled_peak_bytes:  # no backward has ended
            return
        pl_module.log("saved%", percent, prog_bar=True, logger=False, on_step=True, on_epoch=False, rank_zero_only=True)

    def _log(self, trainer: pl.Trainer) -> None:
        row, self._window = self._window.result(), MetricWindow()
        if trainer.world_size > 1 and (trainer.loggers or self.report_dir is not None):
            row = _over_ranks(row, trainer)
        if trainer.is_global_zero:
            self._log_of_run.add_row(trainer.fit_loop.epoch_loop._batches_that_stepped, row)
            for logger in trainer.loggers:
                named = {key.replace("/", str(logger.group_separator)): value for key, value in row.items()}
                # Not global_step, which is one ahead here and would shift the curves against those of self.log.
                logger.log_metrics(named, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._is_running = False
        if trainer.barebones:
            return
        # Now, because the strategy closes the offloader before on_fit_end.
        report = self._report(trainer)
        if report.stats:
            self._written_now = round(report.stat("bytes_written")) + sum(o["written_bytes"] for o in report.optimizers)
        verdict = judge(report)
        self.summary = verdict.text()
        _log.info("backend: %s", report.backend)
        if report.plan is not None:
            _log.info("plan: %s", ", ".join(f"{name} {value:.4g}" for name, value in report.plan.items()))
        if trainer.is_global_zero:
            summary: dict[str, Any] = {"offload/verdict": verdict.headline, "offload/summary": self.summary}
            if report.saved_pct is not None:
                summary["offload/saved_pct"] = report.saved_pct
            self._publish(trainer, "log its verdict", report, summary)
            self._write_report(replace(report, summary=self.summary))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the report: after an out-of-memory error it shows the user what filled the memory."""
        if not self._is_running:
            return
        self._is_running = False
        self._try("record the step that failed", partial(self._end_record, trainer))
        if trainer.is_global_zero:
            summary = f"The run ended early, after step {self._run.num_steps}: {exception!r}"
            self._write_report(replace(self._report(trainer), summary=summary))

    def _publish(self, trainer: pl.Trainer, what: str, report: RunReport, summary: dict[str, Any]) -> None:
        # At the end once more, because the drives' rates and the plan are known by then.
        known = {name: getattr(report, name) for name in ("policy", "hardware", "versions", "machine", "plan")}
        config = {name: value for name, value in known.items() if value is not None}
        for experiment in _experiments(trainer):
            self._try(what, partial(publish_facts, experiment, config=config, summary=summary))

    def _write_report(self, report: RunReport) -> None:
        if self.report_dir is None:
            return
        directory = self.report_dir

        def write() -> None:
            rank_zero_info(f"Report: {write_report(report, directory)[0]}")

        self._try(f"write its report to {os.fspath(directory)}", write)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Look at a run without ending it: of what others' libraries raise, and full disks, the user is warned once."""
        try:
            work()
        except Exception as error:
            if what not in self._told:
                self._told.add(what)
                rank_zero_warn(
                    f"OffloadMonitor could not {what} ({error!r}); training and all else are not affected",
                    category=UserWarning,
                )

    def _report(self, trainer: pl.Trainer) -> RunReport:
        offloader, num_steps = _offloader_of(trainer), self._run.num_steps
        ours: dict[str, Any] = {}
        if offloader is not None:
            plan, hardware = offloader.plan_report, asdict(offloader.hardware)
            ours = {
                "backend": offloader.description,
                "unusable": offloader.unusable,
                "policy": asdict(offloader.policy),
                "hardware": {**hardware, "paths": [str(path) for path in hardware["paths"]]},
                "stats": asdict(offloader.stats),
                "optimizers": tuple(asdict(one) for one in offloader.optimizer_stats),
                "plan": None if plan is None else asdict(plan),
            }
        return RunReport(
            title=type(trainer.lightning_module).__name__,
            created=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),  # for people: nothing is computed from it
            num_steps=num_steps,
            step_s=(self._run_s + self._step_s) / num_steps if num_steps else 0.0,
            num_processes=trainer.world_size,
            versions=_versions(),
            machine=_machine_of(offloader, trainer.strategy.root_device),
            metrics=self._run.result(),
            rows=tuple(self._log_of_run.rows),
            record=self._log_of_run.record,
            **ours,
        )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here, because the progress bar is gone by now.
        if self.verdict and self.summary is not None:
            rank_zero_info(self.summary)


def _over_ranks(row: dict[str, float], trainer: pl.Trainer) -> dict[str, float]:
    """Merge the rows of all processes; each calls this, and one collective brings them together."""
    device = trainer.strategy.root_device
    mine = torch.tensor([row.get(metric.key, math.nan) for metric in METRICS], dtype=torch.float64, device=device)
    table = trainer.strategy.all_gather(mine).tolist()
    rows = [
        {metric.key: value for metric, value in zip(METRICS, values, strict=True) if not math.isnan(value)}
        for values in table
    ]
    return merge_ranks(rows)


def _offloader_of(trainer: pl.Trainer) -> Offloader | None:
    owners = (trainer.strategy, *trainer.callbacks)  # type: ignore[attr-defined]  # a strategy of ours, or a callback
    found = (getattr(owner, "offloader", None) for owner in owners)
    return next((one for one in found if isinstance(one, Offloader) and one.is_open), None)


def _experiments(trainer: pl.Trainer) -> list[Any]:
    """Return the experiments of rank zero's loggers. Dummies, which Lightning puts there for a trial, take anything."""
    # By name: each of Lightning's packages has its own.
    loggers = [logger for logger in trainer.loggers if type(logger).__name__ != "DummyLogger"]
    return [logger.experiment for logger in loggers if hasattr(logger, "experiment")]


def _is_due(trainer: pl.Trainer) -> bool:
    """Whether a row is to be logged. Several processes must agree on it: one alone may have been told to stop."""
    if trainer.world_size == 1:
        return trainer._logger_connector.should_update_logs
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
    return bool(every) and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0


def _is_last_step(trainer: pl.Trainer) -> bool:
    """Whether the run ends with the step that begins now, as far as can be foreseen."""
    if trainer.max_steps != -1 and trainer.global_step + max(len(trainer.optimizers), 1) >= trainer.max_steps:
        return True
    last = trainer.max_epochs
    return last is not None and last != -1 and trainer.current_epoch + 1 >= last and trainer.is_last_batch


def _define_peaks(logger: Logger) -> None:
    """Let W&B's summary tell the peak instead of the last value. Any logger whose experiment has the method gets it.

    Exact names, because W&B takes the first definition that matches. Lightning's logger has one for "*" already, which
    gives all metrics the x axis; an own definition would lose it.
    """
    define = getattr(getattr(logger, "experiment", None), "define_metric", None)
    if not callable(define):
        return
    prefix = getattr(logger, "_prefix", "")
    for metric in METRICS:
        if metric.merge == "max":
            key = metric.key.replace("/", str(logger.group_separator))
            name = f"{prefix}{getattr(logger, 'LOGGER_JOIN_CHAR', '-')}{key}" if prefix else key
            define(name, step_metric="trainer/global_step", step_sync=True, summary="max")


def _machine_of(offloader: Offloader | None, device: torch.device) -> dict[str, Any]:
    """Return the facts about the machine that the run knows. Nothing is measured, and unknown facts are absent: drive
    rates are those of the probe, where there was one, and of the run so far.
    """
    found: dict[str, Any] = {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "num_cpus": os.cpu_count(),
        "malloc": malloc_name(),
        "memory_bytes": capacity_bytes(device),
    }
    if offloader is not None:
        found["backend"] = offloader.description
        if (rates := offloader.drive_rates) is not None:
            found |= {"write_bytes_per_s": rates.write_bytes_per_s, "read_bytes_per_s": rates.read_bytes_per_s}
    return {name: value for name, value in found.items() if value}


def _versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries below it that are installed."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:  # run from a checkout that was never installed
            continue
    return found
