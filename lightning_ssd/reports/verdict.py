"""The verdict on a run: a headline, at most three short lines, and what to do next. The terminal, the page and W&B show
the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ssd.common.formatting import format_sizes, pluralize
from lightning_ssd.common.validation import parse_size
from lightning_ssd.reports.adviser import advise
from lightning_ssd.reports.run_report import RunReport
from lightning_ssd.telemetry.stats import describe_held

__all__ = ["Verdict", "judge"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one run."""

    headline: str
    """Settled memory against keeping, and the cost of it."""
    lines: tuple[tuple[str, str], ...]
    """At most three: a label, and numbers."""
    next_step: str
    """The most urgent advice, with the setting to write."""

    def text(self) -> str:
        """Return it for a terminal, one fact a line."""
        rows = (*self.lines, ("next", self.next_step))
        return "\n".join([f"lightning_ssd: {self.headline}", *(f"  {label:<8} {text}" for label, text in rows)])


def judge(report: RunReport) -> Verdict:
    """Return the verdict on a run that ended well."""
    lines = ("drives", _drives(report)), ("memory", _memory(report)), ("besides", _besides(report))
    one_of = f" (process 1 of {report.num_processes})" if report.num_processes > 1 else ""
    return Verdict(_headline(report) + one_of, tuple((name, text) for name, text in lines if text), advise(report)[0])


def _headline(report: RunReport) -> str:
    policy, (saved, recomputed) = report.policy, (report.held("saved"), report.stat("recomputed_bytes"))
    if policy is None:
        return "nothing was offloaded: the Trainer's strategy does not offload"
    if policy["activations"] == "keep":
        return f"saved activations {format_sizes(saved)[0]}, all kept as asked" if saved else "activations are kept"
    if recomputed and (policy["activations"] == "recompute" or not report.stat("bytes_saved")):
        return f"blocks recomputed: saved activations {describe_held(saved, saved + recomputed)}"
    others = report.optimizers or report.stat("weights_bytes")
    if not report.stat("bytes_saved"):
        return (
            f"no saved activation was {'moved' if others else 'offloaded'}: none has "
            f"min_tensor_bytes={policy['min_tensor_bytes']!r} or more, {int(report.stat('num_kept_small'))} are smaller"
        )
    if policy["activations"] == "recompute":
        return f"no block was recomputed: saved activations {format_sizes(saved)[0]}"
    if not report.saved_pct:
        all_stay = f"at the peak all {format_sizes(saved)[0]} of saved activations are in memory"
        return f"{'' if others else 'nothing saved: '}{all_stay}, because {_why_nothing_is_saved(report)}"
    plan = report.plan  # what moving took is of the steps that the memory is of
    took = 100 * plan["measured_overhead"] if plan is not None and plan["moved_bytes"] else None
    cost = "" if took is None else f", cost {took:.1f} % of the step time"
    return f"saved activations {describe_held(report.settled_bytes, report.held('saved'))}{cost}"


def _why_nothing_is_saved(report: RunReport) -> str:
    policy = report.policy or {}
    if report.unusable is not None:
        return report.unusable
    if policy["activations"] != "auto":
        if report.stat("failures"):
            return "writes failed"
        if report.stat("bytes_held_elsewhere") > report.stat("bytes_written") / 2:
            return "the program holds what was written"
        return "writes had not ended by then"
    if policy["activation_budget"] or policy["memory_budget"]:
        return "the budget was never needed"
    if report.lacks_whole_pages:
        return "without THP_MEM_ALLOC_ENABLE=1 moving costs more (page faults) than it gains"
    return f"moving costs more than max_slowdown={policy['max_slowdown']} allows, or gains too little"


def _drives(report: RunReport) -> str:
    written = report.stat("bytes_written") + sum(one["written_bytes"] for one in report.optimizers)
    read = report.stat("bytes_read") + sum(one["read_bytes"] for one in report.optimizers)
    on_host = report.stat("bytes_host")
    parts = []
    if written or read:
        sizes = format_sizes(written, report.metrics.get("io/write_gib", 0.0) * _GIB, read)
        parts.append("{} written ({} per step), {} read".format(*sizes))
    if on_host:
        parts.append(f"{format_sizes(on_host)[0]} to host memory")
    if parts:
        stall_s = report.metrics.get("io/stall_s", 0.0)
        share = f" ({100 * stall_s / report.step_s:.1f} %)" if report.step_s > 0 else ""
        parts.append(f"stalls {stall_s:.2g} s per step{share}")
    elif report.unusable is not None:
        parts.append("nothing written")
    if num := int(report.stat("failures")):
        parts.append(f"{pluralize(num, 'transfer', 'transfers')} failed, {int(report.stat('fallbacks'))} made good")
    if (days := report.metrics.get("wear/drive_life_days")) is not None:
        parts.append(f"drive life {days:,.0f} days of training")
    return ", ".join(parts)


def _memory(report: RunReport) -> str:
    """Return the peak of the device or the process, and whether each budget was kept."""
    parts = []
    policy, peak = report.policy or {}, report.peak_bytes
    if peak is not None:
        owner = "of the device" if "memory/device_peak_gib" in report.metrics else "of the process, libraries included"
        parts.append(f"peak {format_sizes(peak)[0]} {owner}")
    for name, held in (("activation_budget", report.held("resident")), ("memory_budget", peak)):
        if (budget := policy.get(name)) is not None and held is not None:
            # The peak of all memory has what came before training in it.
            before = ", maybe before training" if name == "memory_budget" else ""
            exceeded = f"exceeded ({format_sizes(held)[0]}){before}"
            parts.append(f"{name}={budget!r} {'kept' if held <= parse_size(budget) else exceeded}")
    return ", ".join(parts)


def _besides(report: RunReport) -> str:
    """Return what became of optimizer states and weights."""
    parts = []
    if report.optimizers:
        held, states = (sum(one[name] for one in report.optimizers) for name in ("resident_peak_bytes", "state_bytes"))
        parts.append("optimizer states: at most {} of {} in memory".format(*format_sizes(held, states)))
    offloaded, kept = report.stat("weights_bytes"), report.stat("weights_kept_bytes")
    if offloaded:
        peak = max(
            report.stat("weights_resident_peak_bytes"), _GIB * report.metrics.get("memory/weights_resident_peak_gib", 0)
        )
        parts.append("weights: at most {} of {} offloaded in memory".format(*format_sizes(peak, offloaded)))
    if kept:
        parts.append(f"weights: {format_sizes(kept)[0]} stay, because memory has room")
    return "; ".join(parts)
