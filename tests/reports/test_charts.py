"""Pictures show what was recorded: the sums, the lanes, the phases. Matplotlib draws all of them."""

from xml.etree import ElementTree

import pytest

from lightning_ssd.reports.charts import (
    memory_over_step,
    over_run,
    step_charts,
    trade_off,
    transfers,
)
from lightning_ssd.telemetry.step_record import Level, StepRecord, Wait
from tests.support.step_records import MIB, made_record

SVG = "{http://www.w3.org/2000/svg}"


def values_at(chart, time_s):
    found = {}
    for series in chart.series:
        index = max(i for i, x in enumerate(series.x) if x <= time_s)
        found[series.name] = series.y[index]
    return found


def test_memory_adds_up_to_what_was_in_use():
    chart = memory_over_step(made_record())
    assert chart.y_title == "MiB"
    at = values_at(chart, 0.9)
    assert at["saved activations"] == 100
    assert at["weights"] == 80
    assert at["optimizer states"] == 160
    # 700 MiB are in use, of which 160 were never any of these.
    assert chart.title == "Memory over one step, above 0.16 GiB that the process holds anyway"
    stacked = sum(value for name, value in at.items() if name != "with all activations kept")
    assert stacked == pytest.approx(540)
    assert at["with all activations kept"] == pytest.approx(540 + 200)
    few = made_record(levels=tuple(Level(0.1 * i, 10 * MIB) for i in range(25)))  # less than is known to be held
    assert all(value >= 0 for series in memory_over_step(few).series for value in series.y)
    assert step_charts(StepRecord(step=1, length_s=0.1)) == []


def test_gradients_are_told_apart_where_somebody_could_look():
    grown = (Level(0.0, 0), Level(1.5, 40 * MIB), Level(2.0, 80 * MIB))
    chart = memory_over_step(made_record(gradients=grown))
    assert [series.name for series in chart.series] == [
        *("weights", "optimizer states", "gradients", "saved activations"),
        *("temporaries, free heap", "with all activations kept"),
    ]
    assert [values_at(chart, at_s)["gradients"] for at_s in (0.5, 1.6, 2.4)] == [0, 40, 80]
    at = values_at(chart, 1.6)
    base = 500 - (80 + 160 + 100)  # at 0.2 s, when most of what is in use is known: 100 MiB are saved
    assert sum(value for name, value in at.items() if name != "with all activations kept") == pytest.approx(700 - base)


CHARTS = [
    *step_charts(made_record()),
    transfers(made_record(moves=(), waits=(Wait(0.1, 0.2),))),
    over_run(
        [
            {"step": 1.0, "memory/device_peak_gib": 1.0},
            {"step": 2.0, "memory/device_peak_gib": 2.0, "memory/activations_saved_peak_gib": 1.0},
        ]
    ),
    trade_off(
        [("gpt", "keep", 4.0, 1.0), ("bert", "keep", 8.0, 3.0), ("gpt", "ssd", 1.0, 1.1), ("bert", "ssd", 2.0, 3.3)]
    ),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.key)
def test_matplotlib_draws_it(chart, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    from matplotlib.collections import PolyCollection

    from lightning_ssd.reports.drawing import draw, draw_svg, save_png

    figure = draw(chart)
    (axes,) = figure.axes
    by_kind = {kind: [one for one in chart.series if one.kind == kind] for kind in ("area", "line", "dashed")}
    shapes = [one for one in axes.collections if isinstance(one, PolyCollection)]
    assert len(shapes) == len(chart.bars) + len(by_kind["area"])
    curves = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    for series in by_kind["line"] + by_kind["dashed"]:
        assert curves[series.name] == (list(series.x), list(series.y))
    told = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {series.name for series in chart.series if series.name} <= told
    save_png(chart, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    svg = ElementTree.fromstring(draw_svg(chart))
    assert f"{SVG}svg" == svg.tag
    assert "#000000" not in draw_svg(chart), "dark pages have light text"


def test_a_sweep_is_coloured_by_mode_marked_by_model_and_begins_at_nothing():
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    from lightning_ssd.reports.drawing import draw

    (axes,) = draw(CHARTS[-1]).axes
    dots = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [
        (1.0, 1.1),
        (4.0, 1.0),
        (2.0, 3.3),
        (8.0, 3.0),
    ]
    offload, keep, other_offload, other_keep = dots
    assert offload.get_color() == other_offload.get_color() != keep.get_color() == other_keep.get_color()
    assert offload.get_marker() == keep.get_marker() != other_offload.get_marker() == other_keep.get_marker()
    joined = [line.get_xdata().tolist() for line in axes.lines if len(line.get_xdata()) > 1]
    assert joined == [[1.0, 4.0], [2.0, 8.0]], "the same model by one line"
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
