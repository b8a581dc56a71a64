"""The rates of the tiers: from a short probe first, then from the run itself."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from lightning_ssd.common.accelerators import accelerator_of, locks_host_memory
from lightning_ssd.common.interrupts import deferring_interrupts
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.errors import StorageError
from lightning_ssd.memory.mmap import READ_WRITE, MappedBlock, address_of, map_anonymous
from lightning_ssd.planning.bandwidth import RateEstimate, first_guess
from lightning_ssd.planning.plan import Machine, TierRates
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, Backend
from lightning_ssd.storage.drive_probe import Rates
from lightning_ssd.storage.spill_file import SPACE_ADVICE
from lightning_ssd.telemetry.events import EventLog, TransferEvent
from lightning_ssd.tiers.base import Progress, ReadEnd, StoredBytes, WriteEnd
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover, Mover
from lightning_ssd.tiers.host import HostTier
from lightning_ssd.tiers.ssd import SsdTier

__all__ = ["BandwidthMeter", "measure_copies", "measure_mapping", "measure_rates"]

_PROBE_BYTES = 16 << 20
"""Enough for a first guess of a drive's rates: a run soon tells them better."""
_MIN_CHUNKS = 4
"""Per directory: its two workers take one each at once, and the others show how fast it is beside others."""
_MAX_AGE_S = 0.05
_UNKNOWN = Rates(0.0, 0.0)


class _Trial:
    """One chunk that a probe writes and reads back."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory = memory
        self.stored: StoredBytes | None = None
        self.error: BaseException | None = None

    @staticmethod
    def all_begin(trials: Sequence[_Trial]) -> list[torch.UntypedStorage | None]:
        return [trial.memory for trial in trials]

    def is_wanted(self) -> bool:
        return True

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        for trial, stored, error in ends:
            trial.stored, trial.error = stored, error

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        for trial, _, mark, error in ends:
            trial.error = error
            if mark is not None:
                mark.synchronize()

    def result(self) -> StoredBytes:
        """Return where it was written to, or raise what went wrong with it."""
        if self.error is not None or self.stored is None:
            raise self.error or StorageError("a move of a probe ended without a result; please report this")
        return self.stored


def measure_rates(
    backend: Backend,
    directories: Sequence[Path],
    mover: Mover | None = None,
    *,
    device: torch.device | str = "cpu",
    nbytes: int = _PROBE_BYTES,
) -> Rates:
    """Write ``nbytes`` per directory and read them back, in all at once, as training does.

    After a round that preallocates and warms up. A directory gets as much as it takes, and a full one nothing.

    Args:
        backend: reaches the directories.
        directories: one per drive.
        mover: moves the bytes; ``None``: without a copy, as those of a CPU.
        device: of the memory.
        nbytes: of each direction, per directory.

    Raises:
        OSError: no directory takes the bytes, or one does not give them back.
    """
    mover, device = mover or HostMover(backend, None), torch.device(device)
    chunk = max(min(DEFAULT_CHUNK_BYTES, nbytes // _MIN_CHUNKS) // backend.block_bytes, 1) * backend.block_bytes
    source, target = (_memory(chunk, device) for _ in range(2))
    after = mover.copies.mark()
    trials = [_Trial(source) for _ in range(nbytes * len(directories) // chunk)]
    events = EventLog()
    tier = SsdTier(backend, mover, directories, events=events, sampler=Sampler("off"), chunk_bytes=chunk)
    with closing(tier):
        for _ in range(2):
            for trial in trials:
                if trial.stored is not None:
                    tier.free(trial.stored)
            events.drain()
            begin_s = time.perf_counter()
            for trial in trials:
                tier.write(trial, chunk, after, label="a probe")
            tier.flush()
            written_s = time.perf_counter() - begin_s
            places = [trial.result() for trial in trials]
        by_directory = _rates_of([one for one in events.drain() if isinstance(one, TransferEvent)], len(directories))
        begin_s = time.perf_counter()
        reads = [
            tier.read(trial, place, device, urgent=False, into=target, after=after)
            for trial, place in zip(trials, places, strict=True)
        ]
        for read in reads:
            read.wait()
        read_s = time.perf_counter() - begin_s
        for trial in trials:
            trial.result()
    return Rates(len(trials) * chunk / written_s, len(trials) * chunk / read_s, by_directory)


def _rates_of(moved: Sequence[TransferEvent], num_directories: int) -> tuple[float, ...]:
    """Return the rate of each directory from its first move until its last one: the others may have gone on then."""
    rates = [0.0] * num_directories
    for drive in {one.drive for one in moved if one.drive is not None}:
        mine = [one for one in moved if one.drive == drive]
        rates[drive] = sum(one.nbytes for one in mine) / (mine[-1].end_s - min(one.start_s for one in mine))
    return tuple(rates)


def _memory(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return memory that a backend can reach, and that was touched."""
    if device.type == "cpu":
        memory = torch.frombuffer(MappedBlock(nbytes).export(), dtype=torch.uint8)
    else:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return memory.fill_(1).untyped_storage()


def measure_copies(device: torch.device, *, nbytes: int = 64 << 20) -> Rates:
    """How fast bytes get from the device's memory to the host's (locked, where we can) and back."""
    accelerator = accelerator_of(device)
    on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.ones(nbytes, dtype=torch.uint8, device="cpu", pin_memory=locks_host_memory(device))

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        begin_s = time.perf_counter()
        target.copy_(source)
        if accelerator is not None:
            accelerator.synchronize()
        return nbytes / (time.perf_counter() - begin_s)

    timed(on_host, on_device)  # what the first copy sets up is not part of the rate
    return Rates(timed(on_host, on_device), timed(on_device, on_host))


def measure_mapping(nbytes: int = 16 << 20) -> float:
    """Return the seconds that a byte of fresh memory takes: its page is mapped, and comes filled with zeros.

    The best of three: a host may have to find memory.

    Args:
        nbytes: to try it with.
    """
    return min(_map_once(nbytes) for _ in range(3)) / nbytes


def _map_once(nbytes: int) -> float:
    begin_s = time.perf_counter()
    memory = map_anonymous(nbytes, READ_WRITE)
    try:
        ctypes.memset(address_of(memory), 1, nbytes)
    finally:
        memory.close()
    return time.perf_counter() - begin_s


class BandwidthMeter:
    """Reads the tiers' counters when it is asked, and keeps an estimate per tier and direction.

    Args:
        ssd: the drives.
        probe: measures the drives, for the time before the run has told; called once, when the rates are first asked
            for. ``None``: they are unknown (0) until then.
        host: the host tier, if there is one.
        probe_host: the same for it.
        place: of the drives, as the user knows it, for messages.
        expected: of all drives, for this process, as the user has told: see :func:`first_guess`. Without a probe the
            run begins with it. 0: unknown.
        cost_s_per_byte: a first guess of what moving takes besides transfers.
    """

    def __init__(
        self,
        ssd: SsdTier,
        probe: Callable[[], Rates] | None = None,
        *,
        host: HostTier | None = None,
        probe_host: Callable[[], Rates] | None = None,
        place: str = "the SSD tier",
        expected: Rates = _UNKNOWN,
        cost_s_per_byte: float = 0.0,
    ) -> None:
        self._cost_s_per_byte = cost_s_per_byte
        self._ssd = _Channels(ssd.progress, probe, place, expected)
        self._host_tier = host
        self._host: _Channels | None = None
        if host is not None and probe_host is not None:
            self._host = _Channels(host.progress, probe_host, "host memory")

    def machine(self) -> Machine:
        """The tiers as they are known now."""
        host = None
        if self._host is not None and self._host_tier is not None:
            host = self._host.rates(self._host_tier.capacity_bytes)
        return Machine(ssd=self._ssd.rates(None), host=host, cost_s_per_byte=self._cost_s_per_byte)


class _Channels:
    """Both directions of one tier."""

    def __init__(
        self,
        progress: Callable[[], Progress],
        probe: Callable[[], Rates] | None,
        place: str,
        expected: Rates = _UNKNOWN,
    ) -> None:
        self._expected = expected
        self._progress = progress
        self._probe = probe
        self._place = place
        self._unusable: str | None = None
        self._seen = Progress(0, 0.0, 0, 0.0)
        self._seen_s = 0.0
        known = _UNKNOWN if probe is not None else expected
        self._write, self._read = RateEstimate(known.write_per_s), RateEstimate(known.read_per_s)

    def rates(self, capacity_bytes: int | None) -> TierRates:
        now_s = time.perf_counter()
        if now_s - self._seen_s >= _MAX_AGE_S:
            now, before = self._progress(), self._seen
            self._write.sample(now.written_bytes - before.written_bytes, now.write_busy_s - before.write_busy_s)
            self._read.sample(now.read_bytes - before.read_bytes, now.read_busy_s - before.read_busy_s)
            self._seen, self._seen_s = now, now_s
        probe = self._probe  # once: another thread may have just ended it
        if probe is not None and not (self._write.value and self._read.value):
            try:
                with StatusLine(f"Probing {self._place}", delay_s=0), deferring_interrupts():
                    probed = probe()
            # As with a failed write: nothing is moved, training goes on. A device or a host without the memory to try
            # copies with raises a RuntimeError of PyTorch's.
            except (OSError, StorageError, RuntimeError, MemoryError) as error:
                told = getattr(error, "strerror", None) or str(error) or type(error).__name__
                reason, advice, _ = told.partition(f". {SPACE_ADVICE}")
                self._unusable = f"{self._place} could not be measured ({reason})"
                warnings.warn(f"{self._unusable}; nothing will be moved there{advice}", stacklevel=2)
                probed = _UNKNOWN
            self._probe = None
            self._write = self._begun(self._write, probed.write_per_s, self._expected.write_per_s)
            self._read = self._begun(self._read, probed.read_per_s, self._expected.read_per_s)
        return TierRates(
            write_bytes_per_s=self._write.value,
            read_bytes_per_s=self._read.value,
            capacity_bytes=capacity_bytes,
            unusable=None if self._write.value and self._read.value else self._unusable,
        )

    def _begun(self, estimate: RateEstimate, probed: float, expected: float) -> RateEstimate:
        """With what the run has shown already, else with what is known of the drives."""
        return estimate if estimate.value else RateEstimate(first_guess(probed, expected))
