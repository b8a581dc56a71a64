"""A profiled pass and the rates of the machine as JSON and back, so that another process may plan with them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage

__all__ = ["machine_from_json", "trace_from_json", "trace_to_json"]


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """What ``json.dumps`` takes."""
    return asdict(trace) | {"recomputed": sorted(trace.recomputed)}


def trace_from_json(fields: dict[str, Any]) -> Trace:
    """The inverse."""
    return Trace(
        **fields
        | {
            "storages": tuple(TracedStorage(**storage) for storage in fields["storages"]),
            "blocks": tuple(TracedBlock(**block) for block in fields["blocks"]),
            "order": tuple(fields["order"]),
            "recomputed": frozenset(fields["recomputed"]),
        }
    )


def machine_from_json(fields: dict[str, Any]) -> Machine:
    """From ``dataclasses.asdict`` of a machine."""
    return Machine(**{name: TierRates(**one) if isinstance(one, dict) else one for name, one in fields.items()})
