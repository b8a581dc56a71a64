"""Passes and machines for the tests of planning: a regular network, what hypothesis thinks of, a plan played."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

from hypothesis import strategies as st

from lightning_ssd.planning.lifetimes import Lifetimes
from lightning_ssd.planning.placement import Placement
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.planning.recompute_trace import input_of, recomputed
from lightning_ssd.planning.simulator import Replay
from lightning_ssd.planning.trace import Trace, TracedBlock, TracedStorage

KEEP, SSD, HOST = Placement.KEEP, Placement.SSD, Placement.HOST


def rates(write, read=None, capacity=None):
    read = write if read is None else read
    return TierRates(write_bytes_per_s=write, read_bytes_per_s=read, capacity_bytes=capacity)


def ssd(write, read=None):
    return Machine(ssd=rates(write, read))


def storage(nbytes, packed, wanted, freed, *, last_used=None, **more):
    last_used = packed if last_used is None else last_used
    return TracedStorage(nbytes=nbytes, packed_s=packed, last_used_s=last_used, wanted_s=wanted, freed_s=freed, **more)


def trace(storages, *, forward_end=0.0, end=0.0, blocks=()):
    wants = sorted((s.wanted_s, -i) for i, s in enumerate(storages) if s.wanted_s is not None)
    order = tuple(-i for _, i in wants)
    return Trace(storages=tuple(storages), order=order, blocks=blocks, forward_end_s=forward_end, end_s=end)


def network(num_blocks=10, per_block=10, *, nbytes=100, forward_s=1.0, backward_s=2.0, input_nbytes=100):
    """Equal blocks; backward wants the storages in reverse, each right after the one before it is freed."""
    turn = num_blocks * forward_s
    storages, blocks = [], []
    for b in range(num_blocks):
        start, back = b * forward_s, turn + (num_blocks - 1 - b) * backward_s
        blocks.append(
            TracedBlock(
                name=f"blocks.{b}",
                forward_start_s=start,
                forward_end_s=start + forward_s,
                backward_start_s=back,
                backward_end_s=back + backward_s,
                input_nbytes=input_nbytes,
            )
        )
        for i in range(per_block):
            wanted = back + backward_s * (per_block - 1 - i) / per_block
            packed = start + forward_s * i / per_block
            freed = back + backward_s * (per_block - i) / per_block
            storages.append(storage(nbytes, packed, wanted, freed, block=b))
    end = turn + num_blocks * backward_s
    return trace(storages, forward_end=turn, end=end, blocks=tuple(blocks))


@st.composite
def _storages(draw, packed, back, block):
    """One that is wanted, if at all, within three seconds from ``back`` on, and freed within three more."""
    quarters = st.integers(0, 12).map(lambda n: n / 4)
    want = draw(st.one_of(st.none(), quarters))
    freed = (packed if want is None else back + want) + draw(quarters)
    return TracedStorage(
        nbytes=draw(st.integers(0, 100)),
        packed_s=packed,
        last_used_s=min(packed + draw(quarters) / 3, freed),
        wanted_s=None if want is None else back + want,
        freed_s=freed,
        block=block,
        movable=draw(st.integers(0, 5)) > 0,
    )


@st.composite
def passes(draw):
    """Up to 18 storages in up to 3 blocks (or none), with ties, gaps, zero lengths and things never wanted back."""
    quarters = st.integers(0, 12).map(lambda n: n / 4)
    num_blocks = draw(st.integers(0, 3))
    slots = max(num_blocks, 1)
    turn, storages, blocks = 3.0 * slots, [], []
    for slot in range(slots):
        start, back = 3.0 * slot, turn + 6.0 * (slots - 1 - slot)
        if num_blocks:
            inputs = draw(st.integers(0, 40))
            blocks.append(
                TracedBlock(
                    name=str(slot),
                    forward_start_s=start,
                    forward_end_s=start + 3,
                    backward_start_s=back,
                    backward_end_s=back + 6,
                    input_nbytes=inputs,
                )
            )
        storages += [draw(_storages(start + packed, back, slot)) for packed in draw(st.lists(quarters, max_size=4))]
        # Saved by backward itself, as for a second derivative or by another forward in the same pass.
        if draw(st.integers(0, 3)) == 0:
            storages += [
                draw(_storages(back + packed, back + 3, slot)) for packed in draw(st.lists(quarters, max_size=2))
            ]
    storages.sort(key=lambda s: s.packed_s)
    if not num_blocks:
        storages = [replace(s, block=-1) for s in storages]
    return trace(storages, forward_end=turn, end=turn + 6.0 * slots + 3, blocks=tuple(blocks))


def tier_rates():
    speed = st.integers(1, 300)
    return st.builds(rates, speed, speed, st.one_of(st.none(), st.integers(0, 600)))


def machines():
    return st.builds(lambda s, h: Machine(ssd=s, host=h), tier_rates(), st.one_of(st.none(), tier_rates()))


def placements(case, machine):
    tiers = [KEEP, SSD] if machine.host is None else [KEEP, SSD, HOST]
    return st.tuples(*(st.sampled_from(tiers) for _ in case.storages))


def play(case, machine, plan):
    """Play a plan that was made from this trace in full detail; its prediction is the plan's."""
    other, old = recomputed(case, plan.recompute - case.recomputed)
    inputs = dict(plan.inputs)
    places = [plan.placements[i] if i >= 0 else inputs[input_of(i)] for i in old]
    kept = [KEEP if place is Placement.RECOMPUTE else place for place in places]
    return simulate(other, kept, machine, limit_bytes=plan.limit_bytes, ahead_bytes=plan.ahead_bytes)


class Played(NamedTuple):
    """One move or stall of a played pass; times have the stalls before in them."""

    what: str
    start_s: float
    end_s: float
    nbytes: int
    number: int
    placement: Placement


class Watched(Replay):
    """Notes moves, stalls and the bytes in memory."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.noted, self.levels = [], []

    def _note(self, what, start, end, index):
        placement = self.lane_of[index].placement if what in ("write", "read") else KEEP
        self.noted.append(Played(what, start, end, self.lives.sizes[index], index, placement))

    def _occupy(self, index, now):
        super()._occupy(index, now)
        self.levels.append((now, self.resident))

    def _leave(self, index, now, state):
        super()._leave(index, now, state)
        self.levels.append((now, self.resident))


def simulate(case, placements, machine, *, limit_bytes, ahead_bytes):
    """Play a pass, and tell its moves, its stalls and the bytes in memory besides."""
    replay = Watched(Lifetimes(case), placements, machine, limit_bytes, ahead_bytes)
    prediction = replay.play()
    last = replay.levels[-1][1] if replay.levels else 0
    return SimpleNamespace(
        prediction=prediction,
        moves=[one for one in replay.noted if one.what in ("write", "read")],
        stalls=[one for one in replay.noted if one.what in ("room", "late")],
        resident=[*replay.levels, (case.end_s + prediction.stall_s, last)],
    )
