"""Draw charts with Matplotlib: SVG in the page, PNG files beside it, figures for W&B and TensorBoard."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ssd.reports.charts import Chart, Role, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "draw", "draw_svg", "save_png"]

COLORS: dict[Role, str] = {
    "weights": "#888888",
    "gradients": "#f0e442",
    "states": "#cc79a7",
    "activations": "#0072b2",
    "other": "#e69f00",
    "keep": "#d55e00",
    "write": "#e69f00",
    "read": "#009e73",
    "wait": "#d55e00",
    "away": "#b8d4e8",
    "measure": "#0072b2",
}
"""One colour for each kind, the same in every picture, told apart without red and green as well.
Source: M. Okabe and K. Ito, Color Universal Design (2008)."""
_MODES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442")
_MARKERS = "osD^vPX*"
_PHASES = {"forward": "#0072b2", "backward": "#e69f00", "update": "#009e73"}
"""Colours of the bands behind; a phase without one is blank."""
BAR_NAMES: dict[Role, str] = {
    "activations": "in memory",
    "away": "away",
    "write": "write",
    "read": "read",
    "wait": "training waits",
}
"""Names of intervals, in legends."""
_WIDTH, _HEIGHT, _LANE, _DPI = 8.0, 3.6, 0.16, 110


def save_png(chart: Chart, file: Path) -> None:
    """Draw into a file.

    Raises:
        ImportError: Matplotlib is not installed.
        OSError: the file cannot be written.
    """
    draw(chart).savefig(file, dpi=_DPI)


def draw_svg(chart: Chart) -> str:
    """Return an element for a page, in the page's text colour.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    figure, text = draw(chart), io.StringIO()
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.key, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(' (width|height)="[0-9.]+pt"', "", svg[svg.index("<svg") :], count=2)  # as wide as the page
    svg = svg.replace("#000000", "currentColor")
    return re.sub('<g id=".*?">', "<g>", svg)  # ids come again in the next picture


def draw(chart: Chart) -> Figure:
    """Return a figure that belongs to no window, and to no pyplot state of the user's.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{error}; pip install '.[report]' in the checkout") from None

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
        if series.kind in ("line", "dashed"):
            (line,) = axes.plot(series.x, series.y, color=COLORS[series.role], linewidth=1.2, label=series.name)
            line.set(linestyle="--" if series.kind == "dashed" else "-", drawstyle="steps-post" if areas else "default")
    _add_points(axes, [series for series in chart.series if series.kind == "points"])
    if chart.series:
        axes.set_ylim(bottom=0)  # last: it settles the top as well
    _add_bars(axes, chart)
    top = axes.get_ylim()[1]
    for name, begin, end in chart.bands:
        if name in _PHASES:
            axes.axvspan(begin, end, color=_PHASES[name], alpha=0.08, linewidth=0, zorder=0)
            axes.annotate(name, (begin, top), fontsize=7, va="bottom", annotation_clip=False)
    axes.set_title(chart.title, fontsize=10, pad=14)
    axes.set_xlabel(chart.x_title, fontsize=8)
    axes.set_ylabel(chart.y_title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return figure


def _add_points(axes: Axes, groups: Sequence[Series]) -> None:
    """Draw a marker for each group, joined by a line, and a colour for each label."""
    colors = dict(zip(dict.fromkeys(label for group in groups for label in group.labels), _MODES * 99, strict=False))
    for group, marker in zip(groups, _MARKERS * 99, strict=False):
        axes.plot(group.x, group.y, color="#888888", linewidth=0.8, marker=marker, label=group.name or None, zorder=1)
        for x, y, label in zip(group.x, group.y, group.labels, strict=True):
            axes.plot(x, y, marker, color=colors[label], markersize=7)
    for label, color in colors.items():
        axes.plot([], [], "o", color=color, label=label)
    if groups:  # from 0, and with room for the outermost markers
        axes.set_xlim(0, 1.05 * max(x for group in groups for x in group.x) or 1)
        axes.set_ylim(0, 1.05 * max(y for group in groups for y in group.y) or 1)


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
