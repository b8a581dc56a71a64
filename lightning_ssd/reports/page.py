"""The report as one HTML file that needs no network: questions from the top down, each with its answer and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape

from lightning_ssd.common.formatting import format_sizes, pluralize
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.reports.adviser import advise
from lightning_ssd.reports.charts import Chart, over_run, step_charts
from lightning_ssd.reports.drawing import draw_svg
from lightning_ssd.reports.run_report import RunReport
from lightning_ssd.telemetry.metrics import NUM_DRIVES

__all__ = ["render_page", "report_charts"]

_GIB = 1 << 30
_STYLE = """
:root { --page: #ffffff; --text: #1c1f23; --faint: #667; --line: #dfe3e8 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --text: #e6e8ea; --faint: #a3abb5; --line: #333a43 }
}
* { box-sizing: border-box }
body { background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
       max-width: 1080px; padding: 16px }
h1 { font-size: 1.5rem; margin: 0 0 4px } h2 { font-size: 1.15rem; margin: 36px 0 8px }
h3 { font-size: .95rem; font-weight: 600; margin: 18px 0 0 }
p, li { margin: 6px 0; overflow-wrap: anywhere } .faint { color: var(--faint); font-size: .9rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 6px 0 }
td, th { border-bottom: 1px solid var(--line); padding: 4px 14px 4px 0; text-align: left }
td + td, th + th { text-align: right }
.wide svg { display: block; fill: currentColor; min-width: 620px; width: 100% }
"""


def report_charts(report: RunReport) -> list[Chart]:
    """All pictures of a run: its last recorded step, then memory over the run."""
    charts = step_charts(report.record) if report.record is not None else []
    if len(report.rows) > 1 and (peaks := over_run(report.rows)).series:
        charts.append(peaks)
    return charts


def render_page(report: RunReport) -> str:
    """Return the HTML.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    pictures = {}
    for chart in report_charts(report):
        picture = draw_svg(replace(chart, title=""))  # in the page it may take two lines
        head = f"<h3>{escape(chart.title)}</h3>"
        pictures[chart.key] = f'{head}<div class="wide" id="chart-{chart.key}">{picture}</div>'
    body = "\n".join(
        [
            f"<h1>{escape(report.title)}</h1>",
            f'<p class="faint">{escape(_facts(report))}</p>',
            *(f"<p>{escape(line)}</p>" for line in report.summary.splitlines()),
            _section("Did it fit?", _fit(report)),
            _section("What did it cost?", _cost(report)),
            _section("Where is the memory?", "", pictures.get("memory_over_step"), pictures.get("over_run")),
            _section("Did the drives' work hide behind the model's?", _overlap(report), pictures.get("transfers")),
            _section("What became of the largest saved tensors?", "", pictures.get("lifetimes")),
            _section("Was the plan right?", _plan(report)),
            _section("What do the drives suffer?", _wear(report)),
            _section("What to change", "<ul>" + "".join(f"<li>{escape(one)}</li>" for one in advise(report)) + "</ul>"),
            _section("Settings", _settings(report)),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, *parts: str | None) -> str:
    content = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>" if content else ""


def _facts(report: RunReport) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    processes = pluralize(report.num_processes, "process", "processes")
    steps = f"{pluralize(report.num_steps, 'step', 'steps')} of {report.step_s:.3g} s, {processes}"
    return "; ".join(part for part in (report.created, steps, versions, report.backend) if part)


def _fit(report: RunReport) -> str:
    """Say how near the run came to the limit: it went on to its end."""
    peak, room = report.peak_bytes, report.machine.get("memory_bytes")
    if peak is None or not room:
        return ""
    on_device = "memory/device_peak_gib" in report.metrics
    held, limit = format_sizes(peak, room)
    where = "tensors on the device took" if on_device else "the process held"
    share = f"{escape(held)} of the {limit} that there are ({100 * peak / room:.0f} %)"
    return f"<p><b>Yes.</b> At its peak {where} {share}.</p>"


def _cost(report: RunReport) -> str:
    record = report.record
    if record is None:
        return ""
    rows = [
        (phase, f"{record.phase_s(phase):.3f} s", f"{record.waited_s(phase):.3f} s")
        for phase in ("data", "forward", "backward", "update")
        if record.phase_s(phase) > 0
    ]
    told = f"<p>Step {record.step}, which was recorded; what waits for transfers is exposed, all else is hidden.</p>"
    return told + _table(("phase", "time", "of it, waiting"), rows)


def _overlap(report: RunReport) -> str:
    ratio = report.metrics.get("io/overlap_ratio")
    if ratio is None:
        return "<p>Nothing was moved.</p>"
    return f"<p>{100 * ratio:.0f} % of the time in which something moved, training did not wait.</p>"


def _plan(report: RunReport) -> str:
    plan = report.plan
    if plan is None:
        return "<p>No step has followed a plan.</p>" if report.policy is not None else ""
    predicted, measured = format_sizes(plan["predicted_peak_bytes"], plan["measured_peak_bytes"])
    written = format_sizes(plan["predicted_written_bytes"], plan["measured_written_bytes"])
    rows = [
        ("forward and backward", f"{plan['predicted_step_s']:.3f} s", f"{plan['measured_step_s']:.3f} s"),
        ("of it, waiting", f"{plan['predicted_stall_s']:.3f} s", f"{plan['measured_stall_s']:.3f} s"),
        ("saved activations, at most", predicted, measured),
        ("written per pass", *written),
    ]
    return _table(("of one pass", "predicted", "measured"), rows)


def _wear(report: RunReport) -> str:
    written = report.metrics.get("wear/written_tb")
    if not written:
        return "<p>Nothing was written to a drive.</p>"
    days = report.metrics.get("wear/drive_life_days")
    told = 'What the drives may still be written is not known (HardwareProfile(drive_endurance="600TB") says it)'
    if days is not None:
        told = f"At this rate drive_endurance lasts {days:,.0f} days"
    sizes = (written * 1e12, report.metrics.get("io/write_gib", 0.0) * _GIB)
    so_far, per_step = (escape(format_sizes(nbytes, decimal=True)[0]) for nbytes in sizes)
    return f"<p>{so_far} written so far, {per_step} per step. {escape(told)}.</p>{_drives(report)}"


def _drives(report: RunReport) -> str:
    """Tabulate what each drive moved while it was busy; of several together where they have no numbers of their own."""
    names = [(f"drive {n}", f"io/drive{n}_") for n in range(NUM_DRIVES) if f"io/drive{n}_write_gib" in report.metrics]
    rows = [
        (name, *(_rate(report.metrics.get(f"{prefix}{way}_gib_per_s")) for way in ("write", "read")))
        for name, prefix in [*names, ("all drives" if names else "the drives", "io/")]
    ]
    return _table(("while busy", "write", "read"), rows)


def _rate(gib_per_s: float | None) -> str:
    return "-" if gib_per_s is None else f"{gib_per_s * _GIB / 1e9:.2f} GB/s"


def _settings(report: RunReport) -> str:
    """Return what differs from the defaults."""
    given = {**(report.policy or {}), **(report.hardware or {})}
    if not given:
        return ""
    usual = {**asdict(OffloadPolicy()), **asdict(HardwareProfile())}
    changed = [(name, str(value)) for name, value in given.items() if str(value) not in (str(usual.get(name)), "[]")]
    return f'<div class="wide">{_table(("setting", "value"), changed)}</div>' if changed else "<p>The defaults.</p>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"
