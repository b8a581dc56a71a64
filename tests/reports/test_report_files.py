"""The report as files: whole, readable again, and without any network."""

import html
import os
import re
import sys
from html.parser import HTMLParser

import pytest

from lightning_ssd.errors import ConfigError
from lightning_ssd.reports.files import write_report
from lightning_ssd.reports.run_log import RunLog
from lightning_ssd.reports.run_report import load_report
from lightning_ssd.telemetry.stats import describe_held
from tests.support.step_records import made_report


def test_json_gives_the_same_report(tmp_path):
    (tmp_path / "report.json").write_text(made_report().to_json())
    for name in (tmp_path, tmp_path / "report.json"):
        loaded = load_report(name)
        assert loaded.record == made_report().record
        assert loaded.to_json() == made_report().to_json()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2}', '{"format": 1}', "{", made_report().to_json().replace('"title"', '"titel"')]
)
def test_what_is_no_report_is_refused(content, tmp_path):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ConfigError, match="expected a report of lightning_ssd"):
        load_report(tmp_path)


def test_where_there_is_none_it_says_who_writes_one(tmp_path):
    with pytest.raises(ConfigError, match="report_dir"):
        load_report(tmp_path)


class _Outside(HTMLParser):
    """Collects what a browser would fetch, and the texts of headings."""

    def __init__(self):
        super().__init__()
        self.fetched = []
        self.headings = []
        self._in_heading = False

    def handle_starttag(self, tag, attrs):
        self._in_heading = tag == "h2"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


def test_the_page_answers_and_fetches_nothing(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    written = write_report(made_report(machine={"memory_bytes": 6 << 30}), tmp_path / "new" / "folder")
    assert [file.name for file in written] == [
        "report.html",
        "report.json",
        "memory_over_step.png",
        "transfers.png",
        "lifetimes.png",
        "over_run.png",
    ]
    page = written[0].read_text()
    parser = _Outside()
    parser.feed(page)
    assert parser.fetched == []
    assert parser.headings == [
        "Did it fit?",
        "What did it cost?",
        "Where is the memory?",
        "Did the drives' work hide behind the model's?",
        "What became of the largest saved tensors?",
        "Was the plan right?",
        "What do the drives suffer?",
        "What to change",
        "Settings",
    ]
    assert html.escape("Net <of tests>") in page
    assert "<of tests>" not in page
    assert not list((tmp_path / "new" / "folder").glob(".*"))


def page_of(folder, **changes):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    return write_report(made_report(**changes), folder)[0].read_text()


def test_the_page_says_whether_it_fitted_and_how_nearly(tmp_path):
    page = page_of(tmp_path, machine={"memory_bytes": 6 << 30})
    assert "<b>Yes.</b> At its peak the process held 1.50 GiB of the 6.00 GiB that there are (25 %)." in page
    assert "<b>Yes.</b>" not in page_of(tmp_path)


def test_peaks_are_those_of_the_whole_run():
    """A loop that lets the peaks begin anew leaves the counters with less than the rows have."""
    metrics = {**made_report().metrics, "memory/activations_resident_peak_gib": 0.25}
    report = made_report(metrics=metrics)
    assert describe_held(report.settled_bytes, report.held("saved")) == "2.93 -> 0.25 GiB (91 % saved)"


def test_the_page_shows_the_settings_that_differ(tmp_path):
    shown = page_of(tmp_path).split("<h2>Settings</h2>")[1]
    assert re.findall("<tr><td>(.*?)</td>", shown) == ["optimizer_states", "paths"]


def test_each_drive_has_its_rates(tmp_path):
    rates = {"io/write_gib_per_s": 3.0, "io/drive0_write_gib": 1.0, "io/drive1_write_gib": 1.0}
    page = page_of(tmp_path, metrics={"wear/written_tb": 1.0, **rates, "io/drive1_read_gib_per_s": 1.0})
    assert "<td>drive 0</td><td>-</td><td>-</td>" in page
    assert "<td>drive 1</td><td>-</td><td>1.07 GB/s</td>" in page
    assert "<td>all drives</td><td>3.22 GB/s</td><td>-</td>" in page
    assert "drive 2" not in page


def test_a_run_without_anything_has_a_page(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    empty = made_report(
        policy=None,
        hardware=None,
        stats={},
        plan=None,
        machine={},
        metrics={},
        rows=(),
        record=None,
        num_steps=0,
        step_s=0.0,
    )
    written = write_report(empty, tmp_path)
    assert "does not offload" in written[0].read_text()


def test_without_the_libraries_the_numbers_are_written(tmp_path, monkeypatch, caplog):
    written = write_report(made_report(), tmp_path)
    assert len(written) > 2
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    written = write_report(made_report(), tmp_path)
    assert [file.name for file in written] == ["report.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"], "none of another run"
    assert "'.[report]'" in caplog.text


def test_a_report_that_cannot_be_written_leaves_the_former_one(tmp_path, monkeypatch):
    write_report(made_report(), tmp_path)
    before = (tmp_path / "report.json").read_text()

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write_report(made_report(title="another"), tmp_path)
    assert (tmp_path / "report.json").read_text() == before
    assert not list(tmp_path.glob(".*"))


def test_rows_of_a_long_run_are_thinned_and_few_steps_are_recorded():
    log, recorded = RunLog(), []
    for step in range(1, 10_001):
        log.add_row(step, {"io/write_gib": float(step)})
        if log.wants_record(step):
            recorded.append(step)
    assert 1000 < len(log.rows) <= 2000
    gaps = {int(b["step"] - a["step"]) for a, b in zip(log.rows, log.rows[1:], strict=False)}
    assert gaps == {8}
    assert recorded == [2**power for power in range(1, 14)]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path):
    report = made_report(metrics={"wear/drive_life_days": float("inf"), "io/stall_s": float("nan")})
    (tmp_path / "report.json").write_text(report.to_json())
    assert load_report(tmp_path).metrics == {}
