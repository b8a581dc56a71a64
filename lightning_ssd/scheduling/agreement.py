"""Numbers that processes which train together plan with: the smallest of each number over all of them."""

from __future__ import annotations

import math
from dataclasses import replace

from lightning_ssd.common.collectives import AllReduceMin
from lightning_ssd.planning.plan import Machine, TierRates

__all__ = ["agreed"]

_NOTHING = TierRates(write_bytes_per_s=0.0, read_bytes_per_s=0.0)


def agreed(
    agree: AllReduceMin, own: Machine, *, limit_bytes: int | None, floor_bytes: int
) -> tuple[Machine, float, int]:
    """Wait for the others; return the slowest drive with the highest cost and host memory if all have it.

    Args:
        agree: gives the smallest of each number.
        own: machine, as measured here.
        limit_bytes: of saved activations; ``None``: there is none.
        floor_bytes: the smallest limit for which a plan is known here.

    Returns:
        The machine, the smallest limit and the largest floor of all.
    """
    ssd, host = own.ssd or _NOTHING, own.host
    write, read, capacity, limit, negative_floor, negative_cost = agree(
        [
            ssd.write_bytes_per_s,
            ssd.read_bytes_per_s,
            0.0 if host is None else float(host.capacity_bytes or 0),
            math.inf if limit_bytes is None else float(limit_bytes),
            float(-floor_bytes),
            -own.cost_s_per_byte,
        ]
    )
    unusable = ssd.unusable
    if unusable is None and write < ssd.write_bytes_per_s and not write:
        unusable = "another process of this run has none that could be measured"
    machine = Machine(
        cost_s_per_byte=-negative_cost,
        ssd=own.ssd and replace(ssd, write_bytes_per_s=write, read_bytes_per_s=read, unusable=unusable),
        host=None if host is None or not capacity else replace(host, capacity_bytes=int(capacity)),
    )
    return machine, limit, int(-negative_floor)
