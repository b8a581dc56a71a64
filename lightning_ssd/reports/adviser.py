"""Advise what to change, in plain words. Each rule looks at one report and has one sentence to say, or none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict

from lightning_ssd.common.formatting import as_setting, format_sizes, pluralize
from lightning_ssd.common.validation import parse_size
from lightning_ssd.config import OffloadPolicy
from lightning_ssd.reports.run_report import RunReport
from lightning_ssd.telemetry.metrics import intersection, union_s
from lightning_ssd.telemetry.step_record import PhaseName, StepRecord

__all__ = ["advise"]

_WORTH_TELLING = 0.02
"""Share of the step."""
_BUSY = 0.7
"""Share of a wait in which the drives read, for them to be what was waited for."""
_MUCH = 0.05
_HALF = 0.5
_MIB = 1 << 20


def advise(report: RunReport) -> list[str]:
    """Return one sentence or two for each thing worth changing, the most urgent first; never nothing."""
    found = [sentence for rule in _RULES if (sentence := rule(report)) is not None]
    rung = _next_rung(report)
    return found + rung if found else [" ".join(["Nothing needs to change: keep these settings.", *rung])]


def _failures(report: RunReport) -> str | None:
    num = int(report.stat("failures"))
    if not num:
        return None
    return (
        f"{pluralize(num, 'transfer', 'transfers')} failed, and training went on with the tensors in memory or a "
        "second try. Look at the drive (dmesg, smartctl), or name another directory in HardwareProfile.paths."
    )


def _unusable(report: RunReport) -> str | None:
    if report.unusable is None or report.stat("bytes_written"):
        return None
    larger = "Raise it in that proportion, or leave it out"
    other = "Name a directory on a local drive in HardwareProfile.paths"
    mend = larger if report.unusable.startswith("wear_budget") else other
    return f"No saved activation was moved to a drive, because {report.unusable}. {mend}."


def _held_elsewhere(report: RunReport) -> str | None:
    held, saved, kept = map(report.stat, ("bytes_held_elsewhere", "bytes_saved", "bytes_kept"))
    if held <= _MUCH * (saved - kept):  # a loop's variables hold a little when backward begins
        return None
    held_text, sent_text = format_sizes(held, saved - kept)
    return (
        f"Of {sent_text} sent away, {held_text} never left memory, because the program holds those tensors until "
        "backward: the batch, a module that keeps its output (self.last = h), or a hook or list that collects outputs. "
        "Keep what is needed of outputs (h.detach().mean(), a smaller copy), or let go before backward "
        "(self.last = None)."
    )


def _reads_limit(report: RunReport) -> str | None:
    """The drives could not bring back in time what backward asked for."""
    record = report.record
    if record is None or not _is_long(record, "backward"):
        return None
    waited_s = record.waited_s("backward")
    reads = [move for move in record.moves if move.direction == "read" and not move.lane.startswith("host")]
    read_s = sum(move.end_s - move.start_s for move in reads)
    phases = [(phase.start_s, phase.end_s) for phase in record.phases if phase.name == "backward"]
    waits = intersection(phases, [(wait.start_s, wait.end_s) for wait in record.waits])
    inside_s = union_s(intersection(waits, [(move.start_s, move.end_s) for move in reads]))
    if inside_s < _BUSY * waited_s or read_s <= 0:
        return None
    rate = report.machine.get("read_bytes_per_s") or sum(move.nbytes for move in reads) / read_s
    return (
        f"Backward waited {waited_s:.2g} s of a step of {record.length_s:.2g} s for reads: the drives give "
        f"{rate / 1e9:.2g} GB/s and are the limit. {_keep_more(report, waited_s * rate)}"
    )


def _writes_limit(report: RunReport) -> str | None:
    """Forward waited until the drives had taken something, so that there was room."""
    record = report.record
    if record is None or not _is_long(record, "forward"):
        return None
    waited_s, rate = record.waited_s("forward"), report.machine.get("write_bytes_per_s")
    told = f", which take {rate / 1e9:.2g} GB/s" if rate else ""
    more = f" {_keep_more(report, waited_s * rate)}" if rate else ""
    return (
        f"Forward waited {waited_s:.2g} s of a step of {record.length_s:.2g} s for room, that is, for the drives{told}."
        f"{more}"
    )


def _update_waits(report: RunReport) -> str | None:
    record = report.record
    if record is None or not _is_long(record, "update"):
        return None
    return (
        f"The optimizer's step waited {record.waited_s('update'):.2g} s of a step of {record.length_s:.2g} s for its "
        "states. A second drive in HardwareProfile.paths, more host_memory, or fewer steps per batch "
        "(accumulate_grad_batches) make that less."
    )


def _stays(report: RunReport) -> str | None:
    policy, settled = report.policy, report.settled_bytes
    if policy is None or policy["activations"] != "auto" or not settled > _HALF * report.held("saved") >= _MIB:
        return None
    return (
        f'To hold less than {format_sizes(settled)[0]} of saved activations whatever it costs: activations="offload".'
    )


def _next_rung(report: RunReport) -> list[str]:
    """Name the next part that could leave memory, where it is the largest there is, with the line to write."""
    policy, record = report.policy, report.record
    if policy is None or record is None or report.num_processes > 1:
        return []
    part, nbytes, names = "optimizer states", record.state_bytes, ["optimizer_states"]
    if policy["optimizer_states"] == "offload":
        part, names = "weights and gradients", ["parameters", "gradients"]
        nbytes = record.weight_bytes + record.gradient_bytes
    if any(policy[name] != "keep" for name in names) or nbytes <= max(report.settled_bytes, _MIB):
        return []
    usual, wanted = asdict(OffloadPolicy()), {**policy, **dict.fromkeys(names, "offload")}
    # An empty tuple is a list once a report was read from its file.
    changed = {name: value for name, value in wanted.items() if (value or None) != (usual[name] or None)}
    line = ", ".join(f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in changed.items())
    sizes = format_sizes(nbytes, report.settled_bytes)
    return [f"For less memory offload {part} ({sizes[0]}; saved activations {sizes[1]}): OffloadPolicy({line})."]


def _nothing_offloads(report: RunReport) -> str | None:
    policy = report.policy
    if policy is None:
        return 'This run kept everything, because its strategy does not offload: Trainer(strategy="ssd_offload") does.'
    saved = report.held("saved")
    if policy.get("activations") != "keep" or not saved:
        return None
    return f'Saved activations take {format_sizes(saved)[0]} at their peak; activations="auto" moves what pays.'


def _too_small(report: RunReport) -> str | None:
    policy, num = report.policy, int(report.stat("num_kept_small"))
    if policy is None or policy["activations"] in ("keep", "recompute") or report.stat("bytes_saved") or not num:
        return None
    smaller = max(parse_size(policy["min_tensor_bytes"]) >> 4, 4096)
    if smaller >= parse_size(policy["min_tensor_bytes"]):
        return None
    return f"To move smaller saved activations: min_tensor_bytes={as_setting(smaller)}."


def _costs_more(report: RunReport) -> str | None:
    plan = report.plan
    if plan is None or plan.get("measured_overhead") is None or report.policy is None:
        return None
    if report.policy.get("memory_budget") or report.policy.get("activation_budget"):
        return None  # what these cost is not promised
    promised = float(report.policy.get("max_slowdown", 1.0)) - 1
    if plan["measured_overhead"] <= promised + _WORTH_TELLING:  # what disturbs a machine differs from pass to pass
        return None
    return (
        f"Moving took {100 * plan['measured_overhead']:.1f} % of a pass, more than the {100 * promised:.0f} % that "
        f"max_slowdown allows; to move less: max_slowdown={1 + promised / 2:.3f}."
    )


def _lacks_whole_pages(report: RunReport) -> str | None:
    if not report.lacks_whole_pages or (report.policy or {}).get("activations") not in ("auto", "offload"):
        return None
    return "Start Python with THP_MEM_ALLOC_ENABLE=1: moving tensors is cheaper then (fewer page faults)."


def _wears(report: RunReport) -> str | None:
    days = report.metrics.get("wear/drive_life_days")
    if days is None or days >= 365:
        return None
    activations = (report.policy or {}).get("activations")
    is_auto = "" if activations == "auto" else 'activations="auto", '
    less = "" if activations == "recompute_offload" else ' activations="recompute_offload" writes less.'
    return (
        f"Written to like this day and night, a drive has been written its drive_endurance in {days:,.0f} days. "
        f'{is_auto}wear_budget="1.0DWPD" bounds what is written.{less}'
    )


_RULES: tuple[Callable[[RunReport], str | None], ...] = (
    _failures,
    _unusable,
    _nothing_offloads,
    _held_elsewhere,
    _reads_limit,
    _writes_limit,
    _update_waits,
    _costs_more,
    _lacks_whole_pages,
    _wears,
    _too_small,
    _stays,
)


def _is_long(record: StepRecord, phase: PhaseName) -> bool:
    return record.length_s > 0 and record.waited_s(phase) > _WORTH_TELLING * record.length_s


def _keep_more(report: RunReport, more_bytes: float) -> str:
    """A second path, or a budget by which as much more is kept as the drives could not move in the waited time."""
    budget = math.ceil((report.held("resident") + more_bytes) / _MIB)
    path = "A second drive in HardwareProfile.paths"
    if budget * _MIB >= report.held("saved"):
        return f"{path} would make that less."
    is_auto = "" if (report.policy or {}).get("activations") == "auto" else 'activations="auto", '
    return f'{path}, or {is_auto}activation_budget="{budget}MiB", would take about all of that away.'
