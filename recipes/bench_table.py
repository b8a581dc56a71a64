"""From the samples of ``recipes.bench_step`` to its table. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20
BASELINE = "keep"


@dataclass(frozen=True)
class Sample:
    """One step of one mode."""

    mode: str
    round: int
    step: int
    timed: bool
    values: dict[str, Any]

    @property
    def peak_above_rest_bytes(self) -> int:
        """Of the device where there is one, else of the process."""
        rest = self.values["rest"]
        if self.values["device_peak_bytes"] is not None:
            return int(self.values["device_peak_bytes"] - rest["device_bytes"])
        return int(self.values["host_peak_bytes"] - rest["host_bytes"])


def summarise(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row per mode, in the order in which they ran."""
    held = next((s.values["account"]["held_bytes"] for s in samples if s.values.get("account")), None)
    return [_row(mode, samples, held) for mode in dict.fromkeys(sample.mode for sample in samples)]


def _row(mode: str, samples: Sequence[Sample], held_bytes: int | None) -> dict[str, Any]:
    mine = [sample for sample in samples if sample.mode == mode and sample.timed]

    def median(name: str) -> float | None:
        values = [sample.values[name] for sample in mine if name in sample.values]
        return statistics.median(values) if values else None

    resident = [sample.values["resident_peak_bytes"] for sample in mine if "resident_peak_bytes" in sample.values]
    # Plain PyTorch holds all that it saves; of the other rivals the hooks do not see what they hold.
    resident_bytes = max(resident) if resident else held_bytes if mode.partition("+")[0] == BASELINE else None
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
    }


def _ratios(mode: str, samples: Sequence[Sample], value: Callable[[Sample], float]) -> list[float]:
    baseline = {(s.round, s.step): value(s) for s in samples if s.mode == BASELINE and s.timed}
    mine = {(s.round, s.step): value(s) for s in samples if s.mode == mode and s.timed}
    return [mine[key] / baseline[key] for key in mine if baseline.get(key)]


def _paired(mode: str, samples: Sequence[Sample], value: Callable[[Sample], float]) -> float | None:
    ratios = _ratios(mode, samples, value)
    return statistics.median(ratios) if ratios else None


def _quartiles(ratios: Sequence[float]) -> list[float] | None:
    if len(ratios) < 2:
        return None
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [low, high]


def _is_equal(mode: str, samples: Sequence[Sample]) -> bool | None:
    """Whether loss, gradients and weights of every step, warm-up included, have the bits of keep's."""
    expected = {(s.round, s.step): _hashes(s) for s in samples if s.mode == BASELINE}
    if not expected:
        return None
    return all(_hashes(s) == expected[s.round, s.step] for s in samples if s.mode == mode)


def _hashes(sample: Sample) -> tuple[str, ...]:
    return tuple(sample.values[name] for name in ("loss", "gradients", "weights"))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The tables, in Markdown: what it costs and frees, then where the time goes."""
    print("| mode | step s | / keep | quartiles | peak above rest MiB | / keep | saved resident MiB | / held | bits |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        quartiles = row["step_ratio_quartiles"]
        bits = {True: "equal", False: "DIFFERENT", None: "not compared"}[row["equal"]]
        between = "" if quartiles is None else f"{quartiles[0]:.3f}-{quartiles[1]:.3f}"
        print(
            f"| {row['mode']} | {row['step_s']:.2f} | {_number(row['step_ratio'], 3)} | {between} "
            f"| {_mib(row['peak_above_rest_bytes'])} | {_number(row['peak_ratio'], 2)} "
            f"| {_mib(row['resident_bytes'])} | {_number(row['resident_ratio'], 2)} | {bits} |"
        )
    print(
        "\n| mode | forward s | backward s | optimizer s | core-s | system s | page faults | rest MiB | written MiB ",
        end="",
    )
    print("| read MiB | forwarded MiB | stall s |\n" + "|---" * 12 + "|")
    for row in rows:
        numbers = [_number(row[name], 2) for name in ("forward_s", "backward_s", "optimizer_s", "core_s", "system_s")]
        moved = [_mib(row[name]) for name in ("rest_bytes", "bytes_written", "bytes_read", "bytes_forwarded")]
        cells = [row["mode"], *numbers, _number(row["page_faults"], 0), *moved, _number(row["stall_s"], 2)]
        print("| " + " | ".join(cells) + " |")
    print(f"\nMedians of {rows[0]['num_steps']} steps per mode; ratios are medians of paired ratios.")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value / MIB:,.0f}"
