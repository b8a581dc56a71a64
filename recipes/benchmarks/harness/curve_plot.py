"""The picture of ``recipes.benchmarks.keep_recompute_offload``: measured points over predicted lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipes.benchmarks.harness.mode_names import BASELINE, ModeSpec, parse_mode

__all__ = ["draw", "label", "load_pyplot"]

_GIB = float(1 << 30)
_MIB = float(1 << 20)
# Colours that people with colour blindness can tell apart (Okabe and Ito), and a form each for print without colour.
_STYLES = {
    "keep": ("#000000", "s"),
    "ssd": ("#0072B2", "o"),
    "auto": ("#009E73", "D"),
    "budget": ("#56B4E9", "o"),
    "mixed": ("#CC79A7", "P"),
    "ours_recompute": ("#D55E00", "^"),
    "recompute_offload": ("#E69F00", "v"),
}
_OTHER = ("#777777", "x")
_NAMES = {
    "keep": "keep",
    "ssd": "offload all",
    "auto": "auto",
    "budget": "planned under a budget",
    "mixed": "planned under a budget, throttled drive",
    "ours_recompute": "recompute",
    "recompute_offload": "recompute, inputs offloaded",
}


def _kind(spec: ModeSpec) -> str:
    return "mixed" if spec.kind == "budget" and spec.throttle else spec.kind


def label(mode: str) -> str:
    """What is written next to a point: what its symbol does not say."""
    spec = parse_mode(mode)
    return " ".join(part for part in (spec.budget, f"@{spec.throttle}" if spec.throttle else None) if part)


def load_pyplot() -> Any:
    """Import pyplot, to draw into files without a display.

    Raises:
        SystemExit: matplotlib is not installed; it is in the extra "recipes".
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("drawing needs matplotlib; in the checkout: pip install '.[recipes]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(content: dict[str, Any], file: Path) -> None:
    """Draw what ``rok.json`` holds into a PNG.

    Raises:
        SystemExit: see :func:`load_pyplot`.
    """
    pyplot = load_pyplot()
    largest = max((point["peak_bytes"] for point in _all_points(content)), default=0)
    unit, name = (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")
    figure, axes = pyplot.subplots(figsize=(9.0, 7.5), layout="constrained")
    try:
        _draw_lines(axes, content["curves"], unit)
        _draw_points(axes, content["points"], unit)
        axes.set_xlabel(f"peak of saved activations in memory, {name}")
        axes.set_ylabel("throughput, tokens per second")
        axes.set_title("Recompute, offload, keep: measured points over predicted lines")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=1.15 * max((p["tokens_per_s"] for p in _all_points(content)), default=1.0))
        axes.grid(alpha=0.3)
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
        figure.savefig(file, dpi=150)
    finally:
        pyplot.close(figure)


def _all_points(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [*content["points"], *(point for curve in content["curves"] for point in curve["points"])]


def _draw_lines(axes: Any, curves: list[dict[str, Any]], unit: float) -> None:
    for curve in curves:
        # By peak, not by budget: a plan may stay far below its budget.
        places = sorted((point["peak_bytes"] / unit, point["tokens_per_s"]) for point in curve["points"])
        axes.plot(
            [x for x, _ in places],
            [y for _, y in places],
            color="#CC79A7" if curve["throttle"] else "#56B4E9",
            linestyle="-" if curve["recompute"] else "--",
            linewidth=1.5,
            label=f"predicted: {curve['label']}",
            zorder=1,
        )


def _draw_points(axes: Any, points: list[dict[str, Any]], unit: float) -> None:
    seen = set()
    keep = next((point for point in points if point["mode"] == BASELINE), None)
    for point in points:
        spec = parse_mode(point["mode"])
        kind = _kind(spec)
        color, marker = _STYLES.get(kind, _OTHER)
        x, y = point["peak_bytes"] / unit, point["tokens_per_s"]
        name = _NAMES.get(kind, point["mode"])
        axes.scatter([x], [y], color=color, marker=marker, s=60, zorder=3, label=None if kind in seen else name)
        seen.add(kind)
        _draw_spread(axes, point, keep, x, color)
        axes.annotate(label(point["mode"]), (x, y), xytext=(6, 6), textcoords="offset points", fontsize=8)


def _draw_spread(axes: Any, point: dict[str, Any], keep: dict[str, Any] | None, x: float, color: str) -> None:
    """Quartiles of the paired ratios, turned into throughput."""
    quartiles = point.get("step_ratio_quartiles")
    if quartiles and keep:
        slow, fast = (keep["tokens_per_s"] / ratio for ratio in reversed(quartiles))
        axes.plot([x, x], [slow, fast], color=color, linewidth=1, zorder=2)
