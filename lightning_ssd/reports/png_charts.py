"""Charts as still pictures, by Matplotlib: PNG files beside the page, TensorBoard, and W&B's terminal view."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_ssd.reports.charts import Chart, Series
from lightning_ssd.reports.palette import BAR_NAMES, COLORS, PHASE_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_with_matplotlib", "save_png"]

_WIDTH, _HEIGHT, _LANE, _DPI = 8.0, 3.6, 0.16, 110


def save_png(chart: Chart, file: Path) -> None:
    """Draw into a file.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: the file cannot be written.
    """
    draw_with_matplotlib(chart).savefig(file, dpi=_DPI)


def draw_with_matplotlib(chart: Chart) -> Figure:
    """Return a figure that belongs to no window, and to no pyplot state of the user's.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = max(1.4 + _LANE * len(chart.lanes), 2.2) if chart.lanes else _HEIGHT
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    areas = [series for series in chart.series if series.kind == "area"]
    if areas:
        colors = [COLORS[series.role] for series in areas]
        names = [series.name for series in areas]
        axes.stackplot(areas[0].x, [series.y for series in areas], labels=names, colors=colors, alpha=0.7, step="post")
    for series in chart.series:
        _add_line(axes, series)
    if any(series.kind != "points" for series in chart.series):
        axes.set_ylim(bottom=0)  # last: it settles the top as well
    _add_bars(axes, chart)
    top = axes.get_ylim()[1]
    for name, begin, end in chart.bands:
        if name in PHASE_COLORS:
            axes.axvspan(begin, end, color=PHASE_COLORS[name], alpha=0.08, linewidth=0, zorder=0)
            axes.annotate(name, (begin, top), fontsize=7, va="bottom", annotation_clip=False)
    axes.set_title(chart.title, fontsize=10, pad=14)
    axes.set_xlabel(chart.x_title, fontsize=8)
    axes.set_ylabel(chart.y_title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return figure


def _add_line(axes: Axes, series: Series) -> None:
    style: dict[str, Any] = {"color": COLORS[series.role], "linewidth": 1.2, "label": series.name}
    if series.kind == "points":
        axes.scatter(series.x, series.y)
        for x, y, label in zip(series.x, series.y, series.labels, strict=True):
            axes.annotate(label, (x, y), fontsize=7, xytext=(4, 4), textcoords="offset points")
    elif series.kind != "area":
        axes.plot(series.x, series.y, linestyle="--" if series.kind == "dashed" else "-", **style)


def _add_bars(axes: Axes, chart: Chart) -> None:
    if not chart.lanes:
        return
    height = {lane: len(chart.lanes) - 1 - number for number, lane in enumerate(chart.lanes)}
    unnamed = {bar.role for bar in chart.bars}
    for bar in chart.bars:
        # The first bar of each role is in the legend: an empty one, drawn for that alone, loses its colour there.
        label = BAR_NAMES[bar.role] if bar.role in unnamed else None
        unnamed.discard(bar.role)
        place = (height[bar.lane] - 0.4, 0.8)
        axes.broken_barh([(bar.begin, bar.end - bar.begin)], place, color=COLORS[bar.role], label=label)
    axes.set_yticks([height[lane] for lane in chart.lanes], chart.lanes)
    axes.set_ylim(-0.6, len(chart.lanes) - 0.4)
