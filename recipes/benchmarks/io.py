"""How close the SSD tier comes to fio, from real torch tensors, in the same directory and the same minutes.

    python -m recipes.benchmarks.io --dir DIR [--size 2GiB] [--rounds 3] [--json FILE]
    python -m recipes.benchmarks.io --dir DIR --sweep          # which chunk size and how many workers

All contenders run in turn within each round, since the rate of a drive drifts by up to two within an hour: only numbers
of one round compare. Reported are medians over rounds, and medians of the rounds' ratios. Files are overwritten, as in
a training run, so that no contender measures the allocation of blocks. What was read back is compared with what was
written, outside of the measured time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_ssd.common.validation import parse_size
from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.storage.backend import DEFAULT_CHUNK_BYTES, DEFAULT_WORKERS, Backend
from lightning_ssd.storage.factory import open_backend
from lightning_ssd.storage.filesystem import inspect_directory
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.base import ReadEnd, StoredBytes, WriteEnd
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover
from lightning_ssd.tiers.ssd import SsdTier
from recipes.benchmarks.step import environment

GIB = float(1 << 30)
TENSOR_NBYTES = (48 << 20, 12 << 20)
FIO_REQUEST_BYTES, FIO_DEPTH = 4 << 20, 8
IN_FLIGHT_BYTES = 256 << 20
SWEEP = tuple(itertools.product((1, 2, 3, 4), (1 << 20, 4 << 20, 16 << 20, 64 << 20)))


@dataclass(frozen=True)
class Sample:
    """One direction of one contender in one round."""

    contender: str
    direction: str
    gib_per_s: float
    core_s_per_gib: float


class Contender(Protocol):
    """Moves ``nbytes`` in either direction; says how long it took and what it cost."""

    name: str

    def run(self, direction: str) -> Sample:
        """Move everything once."""

    def close(self) -> None:
        """Remove what lies on the drive."""


class Owner:
    """One tensor on its way down and up again: both owners of ``SsdTier``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.stored: StoredBytes | None = None
        self.reloaded: torch.UntypedStorage | None = None
        self.error: BaseException | None = None

    @staticmethod
    def all_begin(owners: Sequence[Owner]) -> list[torch.UntypedStorage | None]:
        return [owner.tensor.untyped_storage() for owner in owners]

    def is_wanted(self) -> bool:
        return True

    @staticmethod
    def all_written(ends: Sequence[WriteEnd]) -> None:
        for owner, stored, error in ends:
            owner.stored, owner.error = stored, error

    @staticmethod
    def all_read(ends: Sequence[ReadEnd]) -> None:
        for owner, storage, _, error in ends:
            owner.reloaded, owner.error = storage, error

    def require_stored(self) -> StoredBytes:
        """What a write has left, or its error."""
        if self.error is not None or self.stored is None:
            raise self.error or RuntimeError("a write ended without a result")
        return self.stored

    def is_right(self) -> bool:
        """Whether the reload has the tensor's bytes."""
        if self.error is not None or self.reloaded is None:
            raise self.error or RuntimeError("a read ended without a result")
        again = torch.empty(0, dtype=self.tensor.dtype).set_(self.reloaded, 0, self.tensor.size())
        return torch.equal(again, self.tensor)


class TierContender:
    """The library: tier, mover and backend as a training run uses them on CPU."""

    def __init__(
        self,
        backend: Backend,
        directories: Sequence[Path],
        tensors: Sequence[torch.Tensor],
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        num_workers: int = DEFAULT_WORKERS,
    ) -> None:
        self.name = f"ours, {num_workers} x {chunk_bytes >> 20} MiB"
        self._reload = ReloadPool(2 * IN_FLIGHT_BYTES)
        self._tier = SsdTier(
            backend,
            HostMover(backend, self._reload),
            directories,
            events=EventLog(),
            sampler=Sampler("off"),
            chunk_bytes=chunk_bytes,
            num_workers=num_workers,
        )
        self._owners = [Owner(tensor) for tensor in tensors]
        self._nbytes = sum(tensor.nbytes for tensor in tensors)

    def run(self, direction: str) -> Sample:
        work = self._write if direction == "write" else self._read
        return measure(self.name, direction, self._nbytes, work)

    def check(self) -> None:
        """Read everything once more and compare. Not measured."""
        wrong = self._read(check=True)
        if wrong:
            raise SystemExit(f"{self.name}: {wrong} of {len(self._owners)} tensors came back with other bytes")

    def close(self) -> None:
        self._tier.close()
        self._reload.close()

    def _write(self) -> None:
        for owner in self._owners:
            if owner.stored is not None:
                self._tier.free(owner.stored)
        for owner in self._owners:
            self._tier.write(owner, owner.tensor.nbytes, None, label="bench")
        self._tier.flush()
        for owner in self._owners:
            owner.require_stored()

    def _read(self, *, check: bool = False) -> int:
        """Reload within a window of bytes in flight, last written first, as a backward pass does."""
        window, in_flight, wrong = [], 0, 0
        for owner in reversed(self._owners):
            transfer = self._tier.read(owner, owner.require_stored(), torch.device("cpu"), urgent=False)
            window.append((owner, transfer))
            in_flight += owner.tensor.nbytes
            while in_flight > IN_FLIGHT_BYTES or (owner is self._owners[0] and window):
                oldest, oldest_transfer = window.pop(0)
                oldest_transfer.wait()
                wrong += check and not oldest.is_right()
                if oldest.error is not None:
                    raise oldest.error
                oldest.reloaded = None
                in_flight -= oldest.tensor.nbytes
                del oldest_transfer
        return wrong


class PlainContender:
    """Threads that call ``os.pwritev`` and ``os.preadv`` with O_DIRECT on one long-lived page-aligned buffer each."""

    name = "plain os.pwritev"

    def __init__(self, backend: Backend, directory: Path, nbytes: int, *, num_threads: int = 2) -> None:
        self._arena = backend.open_arena(directory)
        self._offset = self._arena.allocate(nbytes).offset
        self._nbytes = nbytes - nbytes % FIO_REQUEST_BYTES
        self._num_threads = num_threads

    def run(self, direction: str) -> Sample:
        call: Any = os.pwritev if direction == "write" else os.preadv
        return measure(self.name, direction, self._nbytes, lambda: self._move(call))

    def close(self) -> None:
        self._arena.close()

    def _move(self, call: Any) -> None:
        def work(index: int) -> None:
            memory = torch.empty(FIO_REQUEST_BYTES + 4096, dtype=torch.uint8).fill_(index)
            start = -memory.data_ptr() % 4096
            view = memoryview(memory.numpy())[start : start + FIO_REQUEST_BYTES]
            step = FIO_REQUEST_BYTES * self._num_threads
            with self._arena.use() as fd:
                for at in range(index * FIO_REQUEST_BYTES, self._nbytes, step):
                    if call(fd, [view], self._offset + at) != FIO_REQUEST_BYTES:
                        raise SystemExit("plain os.pwritev: a request came back short")

        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(work, range(self._num_threads)))


class FioContender:
    """fio on a file of its own: O_DIRECT, libaio, one job."""

    name = f"fio {FIO_REQUEST_BYTES >> 20} MiB x {FIO_DEPTH}"

    def __init__(self, program: str, directory: Path, nbytes: int) -> None:
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="bench_io-", dir=directory))
        self._nbytes = nbytes - nbytes % FIO_REQUEST_BYTES

    def run(self, direction: str) -> Sample:
        command = [
            *(self._program, "--name=bench", f"--filename={self._folder / 'data'}", f"--rw={direction}"),
            *(f"--size={self._nbytes}", f"--bs={FIO_REQUEST_BYTES}", f"--iodepth={FIO_DEPTH}", "--ioengine=libaio"),
            *("--direct=1", "--overwrite=0", "--fallocate=native", "--output-format=json", "--thread"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        seconds = job[direction]["runtime"] / 1e3
        moved = job[direction]["io_bytes"] / GIB
        core_s = seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Sample(self.name, direction, moved / seconds, core_s / moved)

    def close(self) -> None:
        shutil.rmtree(self._folder)


def measure(name: str, direction: str, nbytes: int, work: Callable[[], object]) -> Sample:
    """Wall time and the core time of all threads of this process."""
    begin, cores = time.perf_counter(), core_s()
    work()
    seconds, used_s = time.perf_counter() - begin, core_s() - cores
    return Sample(name, direction, nbytes / GIB / seconds, used_s / (nbytes / GIB))


def core_s() -> float:
    """Core time of all threads of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make_tensors(nbytes: int) -> list[torch.Tensor]:
    """Different float32 tensors of activation sizes, as the allocator of torch places them."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(TENSOR_NBYTES[0] // 4, generator=generator)
    tensors: list[torch.Tensor] = []
    sizes = itertools.cycle(TENSOR_NBYTES)
    while (left := nbytes - sum(tensor.nbytes for tensor in tensors)) > 0:
        size = min(next(sizes), left) // 4
        tensors.append(torch.add(base[:size], len(tensors)) if size else torch.zeros(1))
    return tensors


def facts_of(directory: Path, backend: Backend, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        **environment("io", torch.get_num_threads()),
        "file_system": inspect_directory(directory).file_system,
        "backend": backend.name,
        "memory_alignment": backend.memory_alignment,
        "block_bytes": backend.block_bytes,
        "tensor_addresses_mod_4096": sorted({tensor.data_ptr() % 4096 for tensor in tensors}),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
    }


def medians(samples: Sequence[Sample], baseline: str | None) -> list[dict[str, Any]]:
    """One row per contender and direction; the ratio is the median of the rounds' ratios to the baseline."""
    rows = []
    for direction, name in sorted(dict.fromkeys((s.direction, s.contender) for s in samples), reverse=True):
        mine = [s for s in samples if (s.contender, s.direction) == (name, direction)]
        other = [s for s in samples if (s.contender, s.direction) == (baseline, direction)]
        pairs = list(zip(mine, other, strict=False))
        rows.append(
            {
                "contender": name,
                "direction": direction,
                "gib_per_s": statistics.median(s.gib_per_s for s in mine),
                "core_s_per_gib": statistics.median(s.core_s_per_gib for s in mine),
                "rate_ratio": statistics.median(a.gib_per_s / b.gib_per_s for a, b in pairs) if pairs else None,
                "core_ratio": statistics.median(a.core_s_per_gib / max(b.core_s_per_gib, 1e-9) for a, b in pairs)
                if pairs
                else None,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table, in Markdown."""
    print("| contender | direction | GiB/s | core-s per GiB | rate / baseline | core-s / baseline |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        ratios = [f"{row[key]:.2f}" if row[key] is not None else "" for key in ("rate_ratio", "core_ratio")]
        print(
            f"| {row['contender']} | {row['direction']} | {row['gib_per_s']:.2f} | {row['core_s_per_gib']:.3f} "
            f"| {ratios[0]} | {ratios[1]} |"
        )


def write_json(path: Path, facts: dict[str, Any], rows: Sequence[dict[str, Any]], samples: Sequence[Any]) -> None:
    """Environment, medians, and all samples (dataclasses)."""
    content = {"environment": facts, "medians": rows, "samples": [asdict(sample) for sample in samples]}
    path.write_text(json.dumps(content, indent=1))


def race(contenders: Sequence[Contender], rounds: int) -> list[Sample]:
    """Every contender in every round, after one round that allocates and warms up; the order is turned each time."""
    samples: list[Sample] = []
    for index in range(rounds + 1):
        turned = [*contenders[index % len(contenders) :], *contenders[: index % len(contenders)]]
        for direction in ("write", "read"):
            measured = [contender.run(direction) for contender in turned]
            if index:
                samples += measured
    return samples


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.io", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory on the drive to measure")
    parser.add_argument("--size", default="2GiB", help="bytes per pass (held in memory as tensors)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-written", default="16GiB", help="refuse to write more than this in all")
    parser.add_argument("--sweep", action="store_true", help="compare chunk sizes and numbers of workers instead")
    parser.add_argument("--json", type=Path, help="write environment, samples and medians here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = parse_arguments(arguments)
    nbytes = parse_size(args.size, name="--size")
    shapes = SWEEP if args.sweep else ((DEFAULT_WORKERS, DEFAULT_CHUNK_BYTES),)
    planned = (args.rounds + 1) * nbytes * (len(shapes) + 1)
    if planned > parse_size(args.max_written, name="--max-written"):
        sys.exit(f"this would write {planned / GIB:.1f} GiB; lower --size or --rounds, or raise --max-written")
    tensors = make_tensors(nbytes)
    with ExitStack() as stack:
        backend, why = open_backend(
            "posix", directories=[args.dir], device=torch.device("cpu"), allow_unsuitable_paths=True
        )
        stack.callback(backend.close)
        facts = facts_of(args.dir, backend, tensors)
        print(why, *(f"{key}: {value}" for key, value in facts.items()), sep="\n", end="\n\n")
        fio = shutil.which("fio")
        other: Contender = FioContender(fio, args.dir, nbytes) if fio else PlainContender(backend, args.dir, nbytes)
        stack.callback(other.close)
        ours = [
            TierContender(backend, [args.dir], tensors, chunk_bytes=size, num_workers=number) for number, size in shapes
        ]
        for contender in ours:
            stack.callback(contender.close)
        samples = race([other, *ours], args.rounds)
        for contender in ours:
            contender.check()
    rows = medians(samples, other.name)
    show(rows)
    print(f"\nRead back and compared, all equal: {len(tensors)} tensors each. Written: {planned / GIB:.1f} GiB.")
    if args.json:
        write_json(args.json, facts, rows, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
