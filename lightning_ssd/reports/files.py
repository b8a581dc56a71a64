"""Writes a report as files: the page, the numbers and still pictures."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from lightning_ssd.reports.drawing import save_png
from lightning_ssd.reports.page import render_page, report_charts
from lightning_ssd.reports.run_report import JSON_NAME, RunReport

__all__ = ["PAGE_NAME", "write_report"]

PAGE_NAME = "report.html"
_log = logging.getLogger(__name__)


def write_report(report: RunReport, directory: str | os.PathLike[str]) -> list[Path]:
    """Write ``report.json``, ``report.html`` and a PNG per picture.

    The page and the pictures need Matplotlib (``pip install '.[report]'`` in the checkout). Without it they are left
    out, the log says so, and those of an earlier report go. The numbers are written in any case, first.

    Args:
        report: of the run.
        directory: made if it is missing; files of an earlier report are replaced.

    Returns:
        The files, the page first where there is one.

    Raises:
        OSError: the directory cannot be written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write(folder / JSON_NAME, report.to_json())]
    page, pictures = folder / PAGE_NAME, {folder / f"{chart.key}.png": chart for chart in report_charts(report)}
    try:
        text = render_page(report)
        for file, chart in pictures.items():
            save_png(chart, file)
    except ImportError as error:
        for file in (page, *pictures):
            file.unlink(missing_ok=True)
        _log.warning("no page and no pictures were written (%s)", error)
        return written
    return [_write(page, text), *written, *pictures]


def _write(file: Path, text: str) -> Path:
    """Whole or not at all: a browser may have the former one open, and the disk may be full."""
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
    return file
