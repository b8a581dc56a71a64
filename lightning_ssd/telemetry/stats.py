"""Counters of one offloader, and snapshots of them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields

from lightning_ssd.common.formatting import format_sizes

__all__ = ["OffloadStats", "OptimizerStats", "SavedBytes", "describe_held", "saved_pct"]


def describe_held(held_bytes: float, saved_bytes: float) -> str:
    """Return ``70.0 -> 11.5 MiB (84 % saved)``: what keeping would hold, and what is held."""
    before, after = format_sizes(saved_bytes, held_bytes)
    percent = saved_pct(held_bytes, saved_bytes)
    share = "" if percent is None else f" ({percent} % saved)"
    return f"{before.partition(' ')[0]} -> {after}{share}"


def saved_pct(held_bytes: float, saved_bytes: float) -> int | None:
    """Return by how many per cent what is held is less than what keeping would hold; ``None``: nothing was saved."""
    return round(100 * (1 - held_bytes / saved_bytes)) if saved_bytes else None


@dataclass(kw_only=True, slots=True)
class OffloadStats:
    """Totals since the offloader was opened (peaks: since the last :meth:`Offloader.reset_peaks`).

    The tensor cache counts in one, which its lock guards; all others are snapshots.
    """

    bytes_saved: int = 0
    """Unique saved storages handed to us that are at least ``min_tensor_bytes`` large (parameters excluded)."""
    bytes_kept: int = 0
    """The part of these kept in memory by decision or because a write failed."""
    bytes_written: int = 0
    """Bytes that reached a drive."""
    bytes_read: int = 0
    """Bytes that came back from a drive."""
    bytes_host: int = 0
    """Bytes that went to host memory instead of a drive."""
    bytes_forwarded: int = 0
    """Taken back before or during their write, or found still alive in memory, so that no read was needed."""
    writes_cancelled_bytes: int = 0
    """The part of the forwarded bytes whose write never began."""
    bytes_held_elsewhere: int = 0
    """The part of the forwarded bytes that was written for nothing: the program holds the tensors itself (a module that
    keeps its output, a list), so that their memory was still there when backward asked for them."""
    stall_s: float = 0.0
    """Time that training threads waited for transfers."""
    stall_backward_s: float = 0.0
    """The part in backward; what is not in backward or an update is in forward."""
    stall_update_s: float = 0.0
    """The part in the steps of optimizers: see :attr:`OptimizerStats.moved`."""
    hook_s: float = 0.0
    """Time of training threads inside the hooks, without stalls. On a device, queued kernels hide forward's."""
    cpu_s: float = 0.0
    """On a CPU: what workers and page faults of moved memory took from the computation, as a calibrated estimate."""
    write_busy_s: float = 0.0
    """Time in which at least one write was under way."""
    read_busy_s: float = 0.0
    """Time in which at least one read was under way."""
    resident_bytes: int = 0
    """Saved activations in memory now."""
    resident_peak_bytes: int = 0
    """Saved activations in memory at the worst moment."""
    settled_peak_bytes: int = 0
    """Their peak in the second half of the passes (the last 64 at most); 0 before a backward has ended."""
    saved_peak_bytes: int = 0
    """Bytes that keeping all of them would have held at its worst moment."""
    recomputed_bytes: int = 0
    """Not among them: the sum of what blocks computed again in one backward, of the pass with most."""
    disk_bytes: int = 0
    """Size of the spill files now."""
    num_saved: int = 0
    """Unique saved storages behind ``bytes_saved``."""
    num_kept_small: int = 0
    """Saved tensors below ``min_tensor_bytes``, kept."""
    num_kept_foreign: int = 0
    """Tensor subclasses, sparse, quantised, meta and other-device tensors, and constants with attributes, kept.
    """
    num_kept_parameters: int = 0
    """Saved tensors that are parameters, buffers or views of them, kept; and copies of frozen weights that wait, which
    are made again."""
    num_plain_passes: int = 0
    """Passes without hooks: like others that were counted they keep everything, and nothing else here counts what they
    save. Peaks hold for them as well."""
    failures: int = 0
    """Transfers that failed."""
    fallbacks: int = 0
    """Failures after which training went on with the tensor in memory, or after a second try."""
    weights_bytes: int = 0
    """Weights that wait on drives between their uses."""
    weights_resident_peak_bytes: int = 0
    """Peak of those brought in and not sent out since. The system may have more in its page cache, which it frees."""
    weights_kept_bytes: int = 0
    """Weights that could wait and stay in memory, which has room for them (``parameters="auto"``)."""

    @property
    def bytes_come(self) -> int:
        """Bytes that were saved, or brought back from a drive, in the whole run."""
        return self.bytes_saved + self.bytes_read

    @property
    def num_packed(self) -> int:
        """Tensors that autograd has handed to us, but for those of a storage that was saved already."""
        return self.num_saved + self.num_kept_small + self.num_kept_foreign + self.num_kept_parameters

    def snapshot(self) -> OffloadStats:
        """Return a copy."""
        return copy(self)

    def __add__(self, other: OffloadStats) -> OffloadStats:
        """Add all counters: the cache, weights and optimizers each count their own part."""
        return OffloadStats(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})


_NAMES = [field.name for field in fields(OffloadStats)]


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Where saved activations are at one moment; what is neither in memory nor on the host is on drives."""

    saved_bytes: int = 0
    """Bytes that keeping all of them would hold, without what is recomputed."""
    resident_bytes: int = 0
    host_bytes: int = 0
    """In host memory, in place of drives."""
    recomputed_bytes: int = 0
    """Not saved at all: what blocks compute again in backward."""

    @property
    def drive_bytes(self) -> int:
        """On drives."""
        return self.saved_bytes - self.resident_bytes - self.host_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStats:
    """Totals of one :class:`~lightning_ssd.optimizer.offloaded_optimizer.OffloadedOptimizer`."""

    num_steps: int = 0
    num_subgroups: int = 0
    subgroup_bytes: int = 0
    """States of a subgroup, about."""
    state_bytes: int = 0
    """All states that move."""
    resident_bytes: int = 0
    """The part of these in memory now."""
    resident_peak_bytes: int = 0
    """In memory at the worst moment."""
    written_bytes: int = 0
    read_bytes: int = 0
    kept_bytes: int = 0
    """Bytes that stayed in memory from one step to the next, summed over the steps."""
    stall_s: float = 0.0
    """Time that steps waited for transfers."""
    fetch_busy_s: float = 0.0
    """Time in which at least one read was under way, summed over the drives."""
    flush_busy_s: float = 0.0
    """Time in which at least one write was under way, summed over the drives."""
    update_s: float = 0.0
    """Time in the user's optimizer."""
    step_s: float = 0.0
    """Time in steps without their closures."""

    @property
    def moved(self) -> OffloadStats:
        """Bytes and stalls, to add to the counters of the offloader."""
        return OffloadStats(
            bytes_written=self.written_bytes,
            bytes_read=self.read_bytes,
            stall_s=self.stall_s,
            stall_update_s=self.stall_s,
        )
