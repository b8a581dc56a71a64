"""Charts as interactive figures of Plotly: for the report's page and for W&B."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_ssd.reports.charts import Bar, Chart, Role, Series
from lightning_ssd.reports.palette import BAR_NAMES, COLORS, PHASE_COLORS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["draw_with_plotly"]

_LANE_PX, _PLOT_PX, _MARGINS_PX, _LEGEND_PX = 22, 260, 150, 62


def draw_with_plotly(chart: Chart) -> Figure:
    """Return the figure, with backgrounds left transparent so that a page may be light or dark.

    Raises:
        ImportError: Plotly is not installed.
    """
    from plotly import graph_objects as go

    figure = go.Figure()
    for number, series in enumerate(chart.series):
        _add_series(figure, series, chart, number)
    for role in dict.fromkeys(bar.role for bar in chart.bars):
        _add_bars(figure, chart, role)
    for name, begin, end in chart.bands:
        if name in PHASE_COLORS:
            figure.add_vrect(
                x0=begin,
                x1=end,
                fillcolor=PHASE_COLORS[name],
                opacity=0.09,
                line_width=0,
                layer="below",
                annotation_text=name,
                annotation_position="top left",
                annotation_yanchor="bottom",
                annotation_font_size=11,
            )
    plot_px = _LANE_PX * len(chart.lanes) or _PLOT_PX
    figure.update_layout(
        title={"text": chart.title, "font": {"size": 15}},
        height=_MARGINS_PX + plot_px,
        margin={"l": 60, "r": 20, "t": 60, "b": 90},
        legend={
            "orientation": "h",
            "yanchor": "top",
            "y": -_LEGEND_PX / plot_px,
        },
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        barmode="overlay",
        hovermode="closest" if chart.bars or _has_points(chart) else "x unified",
    )
    figure.update_xaxes(title_text=chart.x_title, gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    figure.update_yaxes(title_text=chart.y_title, gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    if chart.lanes:
        figure.update_yaxes(
            categoryorder="array", categoryarray=list(reversed(chart.lanes)), automargin=True, tickfont_size=10
        )
    elif not _has_points(chart):
        figure.update_yaxes(rangemode="tozero")
    return figure


def _has_points(chart: Chart) -> bool:
    return any(series.kind == "points" for series in chart.series)


def _add_series(figure: Figure, series: Series, chart: Chart, number: int) -> None:
    unit = f" {chart.y_title}" if chart.y_title else ""
    line = {"color": COLORS[series.role], "width": 1.5, "dash": "dash" if series.kind == "dashed" else "solid"}
    common = {"x": series.x, "y": series.y, "name": series.name}
    if series.kind == "points":
        figure.add_scatter(
            **common,
            mode="markers+text",
            text=series.labels,
            textposition="top center",
            marker={"size": 11},
            hovertemplate=f"%{{x:.3g}}, %{{y:.4g}}<extra>{series.name}</extra>",
            showlegend=False,
        )
        return
    figure.add_scatter(
        **common,
        mode="lines",
        line={**line, "shape": "hv" if series.kind == "area" else "linear"},
        stackgroup="one" if series.kind == "area" else None,
        fillcolor=_faint(COLORS[series.role]) if series.kind == "area" else None,
        hovertemplate=f"%{{y:.3f}}{unit}",
        legendrank=number,
    )


def _add_bars(figure: Figure, chart: Chart, role: Role) -> None:
    bars: list[Bar] = [bar for bar in chart.bars if bar.role == role]
    figure.add_bar(
        orientation="h",
        y=[bar.lane for bar in bars],
        base=[bar.begin for bar in bars],
        x=[bar.end - bar.begin for bar in bars],
        customdata=[[bar.label, bar.begin, bar.end] for bar in bars],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]:.3f} to %{customdata[2]:.3f} s<extra>%{y}</extra>",
        marker={"color": COLORS[role], "line": {"width": 0}},
        name=BAR_NAMES[role],
    )


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.6)"
