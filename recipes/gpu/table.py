"""From the outputs of the experiments of ``recipes.gpu`` to one table. Pure but for reading the files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Row", "as_json", "as_markdown", "read_result"]

MIB = 1 << 20
_MAX_NAMED = 6
_LIMITS = (
    "one round of few steps each, medians of one run: a first look, no benchmark",
    "sizes follow from what this machine has, so that only numbers of one size compare",
    "one process per experiment, ended when its time is up; numbers and logs of each are beside this table",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one experiment went."""

    name: str
    question: str
    status: str
    """"done", "failed", "timed out" or "not run"."""
    answer: str
    """Its numbers in one line, or why there are none."""
    command: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0


def read_result(kind: str, path: Path) -> str:
    """The numbers of a result file in one line."""
    if kind == "tests":
        return _of_tests(ElementTree.parse(path).getroot())
    readers: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
        "facts": _of_facts,
        "steps": _of_steps,
        "drive": _of_drive,
        "optimizer": _of_optimizer,
        "hooks": _of_hooks,
        "compiled": _of_compiled,
        "weights": _of_weights,
    }
    return readers[kind](json.loads(path.read_text()))


def _of_tests(root: ElementTree.Element) -> str:
    broken, skipped, num_passed, stopped = [], [], 0, ""
    for case in root.iter("testcase"):
        name = "::".join(part for part in (case.get("classname", "").rpartition(".")[2], case.get("name")) if part)
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            broken.append(name)
        elif not name:  # so pytest leaves the test in which it was interrupted
            stopped = "stopped in the next one (its name is in the log)"
        elif skip is not None:
            skipped.append((skip.get("message") or "").removeprefix("Skipped: "))
        else:
            num_passed += 1
    named = ", ".join(broken[:_MAX_NAMED]) + (" ..." if len(broken) > _MAX_NAMED else "")
    reasons = "; ".join(sorted(set(skipped))[:3])
    parts = [f"{num_passed} passed", f"{len(broken)} failed" + (f": {named}" if broken else "")]
    parts += [f"{len(skipped)} skipped: {reasons}"] if skipped else []
    return ", ".join([*parts, *([stopped] if stopped else [])])


def _of_facts(facts: Mapping[str, Any]) -> str:
    if "missing" in facts:
        return f"the package cannot be imported: {facts['missing']}"
    device = facts["device"] if facts["has_cuda"] else "no CUDA device"
    rates = f"write {facts['write_per_s'] / 1e9:.2f} and read {facts['read_per_s'] / 1e9:.2f} GB/s"
    return f"torch {facts['torch']}, {device}, {facts['cores']} cores, {facts['drive']}: {rates}"


def _of_steps(content: Mapping[str, Any]) -> str:
    return "; ".join(_of_mode(row) for row in content["summary"])


def _of_mode(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['mode']}: {row['failed']}"
    bits = {True: "bits equal", False: "bits DIFFERENT", None: "bits not compared"}[row["equal"]]
    stall = "" if row.get("stall_s") is None else f", stall {row['stall_s']:.2f} s"
    ratio = "" if row["step_ratio"] is None else f" ({row['step_ratio']:.2f} of keep)"
    planned = "" if "plan" not in row else f", {row['num_planned_steps']} steps planned"
    over = f", {row['num_over_budget']} of {row['num_checked_steps']} over budget" if "num_over_budget" in row else ""
    peak = f"peak {row['peak_above_rest_bytes'] / MIB:,.0f} MiB"
    return f"{row['mode']}: {row['step_s']:.3f} s{ratio}, {peak}{stall}, {bits}{planned}{over}"


def _of_drive(content: Mapping[str, Any]) -> str:
    found = []
    for direction in ("write", "read"):
        rows = [row for row in content["medians"] if row["direction"] == direction]
        best = max(rows, key=lambda row: row["gib_per_s"])
        default = next(row for row in rows if row["contender"] == "ours, 2 x 16 MiB")
        default_rate = f"2 x 16 MiB {default['gib_per_s']:.2f} GiB/s"
        found.append(f"{direction}: best {best['contender']} {best['gib_per_s']:.2f} GiB/s, {default_rate}")
    return "; ".join(found)


def _of_optimizer(content: Mapping[str, Any]) -> str:
    found = [_of_states(row) for row in content["parts"]["main"]]
    return "; ".join([*found, *(f"{mode}: failed" for mode in content["refused"].get("main", ()))])


def _of_states(row: Mapping[str, Any]) -> str:
    bits = {True: "equal", False: "DIFFERENT", None: "not compared"}[row["equal"]]
    ratio = "" if row["step_ratio"] is None else f" ({row['step_ratio']:.2f} of torch)"
    stall = "" if row["stall_s"] is None else f", stall {row['stall_s']:.2f} s"
    peak = f"peak {row['peak_above_base_bytes'] / MIB:,.0f} MiB above weights and gradients"
    return f"{row['mode']}: {row['step_s']:.3f} s{ratio}, {peak}{stall}, bits {bits}"


def _of_hooks(content: Mapping[str, Any]) -> str:
    kept, moved = (content["per_tensor"][name] for name in ("large, stays", "moved"))
    told = "moved: not measured"
    if moved is not None:
        told = f"moved {moved['thread_us']:.0f} us of the training thread, {moved['process_us']:.0f} us of the process"
    return f"kept {kept['thread_us']:.1f} us; {told}; default step {content['tiny_gpt']['default']:.2f} of plain"


def _of_compiled(found: Mapping[str, Any]) -> str:
    bits = "equal" if found["equal"] else "DIFFERENT" if found["repeats"] else "differ as plain training's own do"
    peak = ""
    if found["peak_bytes"] is not None:
        peak = f", peak {found['peak_bytes'] / MIB:,.0f} of {found['plain_peak_bytes'] / MIB:,.0f} MiB"
    step = f"step {found['step_s']:.3f} s, plain {found['plain_step_s']:.3f} s"
    moved = f"wrote {found['bytes_written'] / MIB:,.1f} of {found['bytes_saved'] / MIB:,.1f} MiB"
    return f"bits {bits}, {step}{peak}, {moved}, {len(found['warnings'])} warnings"


def _of_weights(found: Mapping[str, Any]) -> str:
    parts = [_of_training(mode, row) for mode, row in found["modes"].items()]
    capped = found.get("capped")
    if capped is not None:
        plain = "plain training RAN" if capped["plain_has_run"] else "plain training runs out of memory"
        allowed = f"in {capped['allowed_bytes'] / MIB:,.0f} MiB"
        parts.append(f"{allowed} {plain}; {_of_training('ours', capped['ours'])}")
    return "; ".join([f"{found['num_parameters'] / 1e6:,.0f} M parameters", *parts])


def _of_training(mode: str, row: Mapping[str, Any]) -> str:
    bits = {True: ", bits equal", False: ", bits DIFFERENT", None: ""}[row.get("equal")]
    ratio = f" ({row['of_keep']:.2f} of keep)" if "of_keep" in row else ""
    peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / MIB:,.0f} MiB"
    return f"{mode}: {row['median_step_s']:.3f} s{ratio}{peak}{bits}"


def as_json(head: Mapping[str, Any], facts: Mapping[str, Any], rows: Sequence[Row], results: Mapping[str, Any]) -> str:
    """All that is known."""
    content = {"run": dict(head), "machine": dict(facts), "experiments": [asdict(row) for row in rows]}
    return json.dumps(content | {"results": dict(results)}, indent=1)


def as_markdown(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """What a reader needs to judge the numbers, then the table."""
    lines = [f"- {key}: {value}" for key, value in head.items()]
    lines += [f"- limit: {limit}" for limit in _LIMITS]
    lines += ["", *(f"{number}. `{row.command}`" for number, row in enumerate(rows, 1) if row.command)]
    lines += ["", "| # | question | how it went | seconds | answer |", "|---|---|---|---|---|"]
    for number, row in enumerate(rows, 1):
        cells = [str(number), row.question, row.status, f"{row.seconds:.0f}", row.answer]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
