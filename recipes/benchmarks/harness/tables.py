"""From the samples of ``recipes.benchmarks.step`` to its table. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.benchmarks.harness.mode_names import AGAIN, AS_IT_COMES, BASELINE, parse_mode

MIB = 1 << 20
BITS_TELL_NOTHING = "that other modes differ from keep says nothing against them"


@dataclass(frozen=True)
class Sample:
    """One step of one mode."""

    mode: str
    round: int
    step: int
    timed: bool
    values: dict[str, Any]
    warmup: bool = False
    """Before the modes had warmed up; a plan is not in force yet."""

    @property
    def peak_above_rest_bytes(self) -> int:
        """Of the device where there is one, else of the process."""
        rest = self.values["rest"]
        if self.values["device_peak_bytes"] is not None:
            return int(self.values["device_peak_bytes"] - rest["device_bytes"])
        return int(self.values["host_peak_bytes"] - rest["host_bytes"])


def summarise(
    samples: Sequence[Sample], modes: Sequence[str] = (), failed: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """One row per mode, in the order in which they ran, or in that of ``modes``.

    Args:
        samples: of all modes.
        modes: more than those that gave samples: names them in the order of the table.
        failed: modes that could not run to the end, and what to say of them; their samples do not count.
    """
    failed = failed or {}
    samples = [sample for sample in samples if sample.mode not in failed]
    held = next((s.values["account"]["held_bytes"] for s in samples if s.values.get("account")), None)
    found = dict.fromkeys([*modes, *failed, *(sample.mode for sample in samples)])
    return [
        {"mode": mode, "failed": failed[mode], "equal": None} if mode in failed else _row(mode, samples, held)
        for mode in found
    ]


def _row(mode: str, samples: Sequence[Sample], held_bytes: int | None) -> dict[str, Any]:
    mine = [sample for sample in samples if sample.mode == mode and sample.timed]

    def median(name: str) -> float | None:
        values = [sample.values[name] for sample in mine if name in sample.values]
        return statistics.median(values) if values else None

    resident = [sample.values["resident_peak_bytes"] for sample in mine if "resident_peak_bytes" in sample.values]
    # Plain PyTorch holds all that it saves; of the other rivals the hooks do not see what they hold.
    resident_bytes = (
        max(resident) if resident else held_bytes if parse_mode(mode).kind in (BASELINE, AGAIN, AS_IT_COMES) else None
    )
    return {
        "mode": mode,
        "num_steps": len(mine),
        **{name: median(name) for name in ("step_s", "forward_s", "backward_s", "optimizer_s")},
        "step_ratio": _paired(mode, samples, lambda sample: sample.values["step_s"]),
        "step_ratio_quartiles": _quartiles(_ratios(mode, samples, lambda sample: sample.values["step_s"])),
        "peak_above_rest_bytes": statistics.median(sample.peak_above_rest_bytes for sample in mine),
        "peak_ratio": _paired(mode, samples, lambda sample: sample.peak_above_rest_bytes),
        "rest_bytes": statistics.median(sample.values["rest"]["host_bytes"] for sample in mine),
        "resident_bytes": resident_bytes,
        "resident_ratio": resident_bytes / held_bytes if resident_bytes is not None and held_bytes else None,
        **{name: median(name) for name in ("bytes_written", "bytes_read", "bytes_forwarded", "stall_s", "failures")},
        "core_s": statistics.median(sample.values["user_s"] + sample.values["system_s"] for sample in mine),
        **{name: median(name) for name in ("system_s", "page_faults")},
        "equal": _is_equal(mode, samples),
        **_planning(mode, samples),
    }


def _planning(mode: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """How the budget was kept, and what the plan had said; nothing for a mode without either."""
    mine = [sample for sample in samples if sample.mode == mode]
    found: dict[str, Any] = {}
    budgeted = [sample for sample in mine if "budget_bytes" in sample.values]
    if budgeted:
        over = [s for s in budgeted if s.values["resident_peak_bytes"] > s.values["budget_bytes"]]
        found["budget_bytes"] = budgeted[0].values["budget_bytes"]
        found["num_checked_steps"] = sum(not sample.warmup for sample in budgeted)
        found["num_over_budget"] = sum(not sample.warmup for sample in over)
        found["num_over_budget_warmup"] = sum(sample.warmup for sample in over)
    planned = [sample for sample in mine if "plan" in sample.values and not sample.warmup]
    if planned:
        found["plan"] = planned[-1].values["plan"]
        found["num_planned_steps"] = len(planned)
        compared = _followed(planned) or [found["plan"]]
        for name in ("step_s", "peak_bytes"):
            pairs = [(plan[f"predicted_{name}"], plan[f"measured_{name}"]) for plan in compared]
            errors = [predicted / measured - 1 for predicted, measured in pairs if measured]
            found[f"{name.partition('_')[0]}_error"] = statistics.median(errors) if errors else None
            for kind, values in zip(("predicted", "measured"), zip(*pairs, strict=True), strict=True):
                found["plan"] = found["plan"] | {f"{kind}_{name}": statistics.median(values)}
    return found


def _followed(planned: Sequence[Sample]) -> list[dict[str, Any]]:
    """Of each timed step that moved, what the plan had said of it, and what came.

    The report's own peak is the largest of up to 64 passes, also of a trial's first one, which is not timed.
    """
    return [
        sample.values["plan"]
        | {
            "measured_step_s": sample.values["forward_s"] + sample.values["backward_s"],
            "measured_peak_bytes": sample.values["resident_peak_bytes"],
        }
        for sample in planned
        if sample.values.get("bytes_written")
    ]


def _ratios(mode: str, samples: Sequence[Sample], value: Callable[[Sample], float]) -> list[float]:
    baseline = {(s.round, s.step): value(s) for s in samples if s.mode == BASELINE and s.timed}
    mine = {(s.round, s.step): value(s) for s in samples if s.mode == mode and s.timed}
    return [mine[key] / baseline[key] for key in mine if baseline.get(key)]


def _paired(mode: str, samples: Sequence[Sample], value: Callable[[Sample], float]) -> float | None:
    ratios = _ratios(mode, samples, value)
    return statistics.median(ratios) if ratios else None


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one, as of all values that there are; a single value is both."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, high


def _quartiles(ratios: Sequence[float]) -> list[float] | None:
    return [*quartiles(ratios)] if len(ratios) > 1 else None


def _is_equal(mode: str, samples: Sequence[Sample]) -> bool | None:
    """Whether loss, gradients and weights of every step, warm-up included, have the bits of keep's."""
    expected = {(s.round, s.step): _hashes(s) for s in samples if s.mode == BASELINE}
    if not expected:  # or keep has failed in one of the rounds: then it has no sample at all
        return None
    return all(_hashes(s) == expected[s.round, s.step] for s in samples if s.mode == mode)


def _hashes(sample: Sample) -> tuple[str, ...]:
    return tuple(sample.values[name] for name in ("loss", "gradients", "weights"))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The tables, in Markdown: what it costs and frees, then where the time goes."""
    print("| mode | step s | / keep | quartiles | peak above rest MiB | / keep | saved resident MiB | / held | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        if "failed" in row:
            print(f"| {row['mode']} | {row['failed']} |" + " |" * 7)
            continue
        quartiles = row["step_ratio_quartiles"]
        bits = {True: "equal", False: "DIFFERENT", None: "not compared"}[row["equal"]]
        between = "" if quartiles is None else f"{quartiles[0]:.3f}-{quartiles[1]:.3f}"
        print(
            f"| {row['mode']} | {row['step_s']:.2f} | {number(row['step_ratio'], 3)} | {between} "
            f"| {mib(row['peak_above_rest_bytes'])} | {number(row['peak_ratio'], 2)} "
            f"| {mib(row['resident_bytes'])} | {number(row['resident_ratio'], 2)} | {bits} |"
        )
    rows = [row for row in rows if "failed" not in row]
    if not rows:
        return
    print(
        "\n| mode | forward s | backward s | optimizer s | core-s | system s | page faults | rest MiB | written MiB ",
        end="",
    )
    print("| read MiB | forwarded MiB | stall s |\n" + "|---" * 12 + "|")
    for row in rows:
        numbers = [number(row[name], 2) for name in ("forward_s", "backward_s", "optimizer_s", "core_s", "system_s")]
        moved = [mib(row[name]) for name in ("rest_bytes", "bytes_written", "bytes_read", "bytes_forwarded")]
        cells = [row["mode"], *numbers, number(row["page_faults"], 0), *moved, number(row["stall_s"], 2)]
        print("| " + " | ".join(cells) + " |")
    print(f"\nMedians of {rows[0]['num_steps']} steps per mode; ratios are medians of paired ratios.")
    if any(row["mode"] == AGAIN and row["equal"] is False for row in rows):
        print(f"{AGAIN} DIFFERS: plain PyTorch does not repeat its own bits here, so {BITS_TELL_NOTHING}.")
    show_plans(rows)


def show_plans(rows: Sequence[dict[str, Any]]) -> None:
    """The modes with a budget or a plan: how it was kept, and how right it was. Nothing where there are none."""
    chosen = [row for row in rows if "plan" in row or "budget_bytes" in row]
    if not chosen:
        return
    print(
        "\n| mode | budget MiB | steps over it | fwd+bwd s predicted | measured | off | peak MiB predicted | measured "
        "| off | written MiB predicted | measured | plans |\n" + "|---" * 12 + "|"
    )
    for row in chosen:
        over = f"{row['num_over_budget']} of {row['num_checked_steps']}" if "budget_bytes" in row else ""
        plan = row.get("plan", {})
        seconds = [number(plan.get(f"{kind}_step_s"), 3) for kind in ("predicted", "measured")]
        peaks = [mib(plan.get(f"{kind}_peak_bytes")) for kind in ("predicted", "measured")]
        written = [mib(plan.get(f"{kind}_written_bytes")) for kind in ("predicted", "measured")]
        off = [_percent(row.get(f"{name}_error")) for name in ("step", "peak")]
        cells = [row["mode"], mib(row.get("budget_bytes")), over, *seconds, off[0], *peaks, off[1], *written]
        print("| " + " | ".join([*cells, number(plan.get("num_plans"), 0)]) + " |")
    print('\n"off": predicted / measured - 1. Steps of the warm-up, where the plan is made, are not in it.')


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def number(value: float | None, digits: int) -> str:
    """A cell; empty where there is nothing."""
    return "" if value is None else f"{value:,.{digits}f}"


def mib(value: float | None) -> str:
    """The same of bytes."""
    return "" if value is None else f"{value / MIB:,.0f}"
