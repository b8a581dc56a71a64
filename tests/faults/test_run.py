"""Every fault of ``tests.faults.run`` once, for real, and that the recipe would notice what it looks for."""

from __future__ import annotations

import ast
import errno
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lightning_ssd
from lightning_ssd.errors import OffloaderClosedError, StorageError
from lightning_ssd.storage import spill_file
from tests.faults import run as faults
from tests.faults.run import FAULTS, Fault, Row, own_disk, run_fault
from tests.faults.server import Order, Server, leftovers
from tests.faults.shim import ShimUnavailableError, build
from tests.support.helpers import open_offloader
from tests.support.patience import PATIENCE_S

ROW = {"kill -9": 2, "SIGTERM": 1, "SIGINT": 2}
PACKAGE = Path(lightning_ssd.__file__).parent


class Bench:
    """A server, a place for its trials, and why something is missing."""

    def __init__(self, server: Server, directory: Path, *, shim: str, disk: str) -> None:
        self.server, self.directory, self.shim, self.disk = server, directory, shim, disk

    def run(self, fault: Fault, *, seed: int = 3) -> Row:
        why = faults._why_not(fault, shim=self.shim, disk=self.disk)
        if why:
            pytest.skip(why)
        return run_fault(fault, self.server, self.directory, seed=seed, owns_space=not self.disk)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One server for all trials: starting Python with torch takes longer than most of them."""
    scratch = tmp_path_factory.mktemp("faults")
    library, why = None, ""
    try:
        library = build(scratch)
    except ShimUnavailableError as error:
        why = str(error)
    with own_disk(scratch) as (place, no_disk), Server.start(library) as server:
        directory = place / "trials"
        directory.mkdir()
        yield Bench(server, directory, shim=why, disk=no_disk)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_no_fault_costs_a_wrong_result_a_hang_or_a_mess(fault: Fault, bench: Bench) -> None:
    row = bench.run(replace(fault, num_trials=ROW.get(fault.name, 1)))
    assert row.is_good, f"{row.cells} {row.leftovers}"
    assert sum(row.outcomes.values()) == ROW.get(fault.name, 1)
    if fault.signal:
        assert row.outcomes == Counter(killed=ROW[fault.name])


# -- that it can fail ------------------------------------------------------------------------------------------------


def order(bench: Bench, trial: str, **changes: object) -> Order:
    return replace(Order(trial=trial, seed=5, directory=str(bench.directory), owns_space=not bench.disk), **changes)


def test_a_hang_is_noticed_and_ended(bench: Bench) -> None:
    """It trains until a signal comes, and none comes."""
    result = bench.server.ask(order(bench, "until killed", timeout_s=1.5))
    assert result.outcome == "hang"
    assert "1.5 s" in result.note
    assert bench.server.ask(order(bench, "next run")).outcome == "exact", "the server goes on"


def test_wrong_bits_are_noticed(bench: Bench) -> None:
    """A flipped bit that nobody looks for: so the trials with ``verify="full"`` are no vain ones."""
    row = bench.run(replace(next(f for f in FAULTS if f.name == "bit flip, verify=off"), num_trials=3))
    assert row.outcomes["wrong"] > 0
    assert not Row(replace(row.fault, may_be_wrong=False), outcomes=row.outcomes).is_good


def test_full_checks_find_every_flipped_bit(bench: Bench) -> None:
    row = bench.run(replace(next(f for f in FAULTS if f.name == "bit flip, verify=full"), num_trials=4))
    assert row.outcomes == Counter(raised=4)
    assert row.notes == Counter({"CorruptionError": 4})


def test_faults_below_us_are_really_injected(bench: Bench) -> None:
    row = bench.run(replace(next(f for f in FAULTS if f.name == "short writes and reads"), num_trials=2))
    assert row.injected > 0


def test_leftovers_are_named(tmp_path: Path) -> None:
    assert leftovers(tmp_path, killed=False) == []
    (tmp_path / "spill" / ".lightning_ssd-7").mkdir(parents=True)
    assert leftovers(tmp_path, killed=True) == []
    assert leftovers(tmp_path, killed=False) == ["spill/.lightning_ssd-7 stays"]
    (tmp_path / "spill" / ".lightning_ssd-7" / "file").touch()
    assert leftovers(tmp_path, killed=True) == ["spill/.lightning_ssd-7/file stays"]


# -- what the trials have found --------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_never_waits_for_a_lock_that_was_held(tmp_path: Path) -> None:
    """Another thread may hold the accounting lock at the fork; in the child it is held for ever."""
    with open_offloader(tmp_path) as offloader:
        x = torch.randn(64, 64, requires_grad=True)
        with offloader.saved_tensors():
            loss = (x * 1).sin().exp().sum()
        assert offloader._cache is not None
        with offloader._cache.accounting.lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(_use_in_fork(offloader))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()
        offloader.end_backward()
        assert offloader.stats.bytes_saved > 0


def _use_in_fork(offloader: lightning_ssd.Offloader) -> int:
    """Which use was not refused, or not harmless; 0: none. A wait ends by the alarm."""
    refused: list[Callable[[], object]] = [
        offloader.flush,
        offloader.reset_peaks,
        offloader.end_backward,
        offloader.wait_for_plan,
        lambda: offloader.saved_tensors().__enter__(),
    ]
    for number, use in enumerate(refused[:3] + refused[4:], 1):
        try:
            use()
        except OffloaderClosedError as error:
            if "open one after forking" in str(error):
                continue
        return number
    harmless: list[Callable[[], object]] = [
        lambda: offloader.stats,
        lambda: offloader.optimizer_stats,
        lambda: offloader.machine,
        offloader.drain_metrics,
        offloader.abort,
        offloader.close,
        offloader.close,
    ]
    for number, use in enumerate(harmless, 10):
        try:
            use()
        except BaseException:
            return number
    return 0


def test_an_opening_that_fails_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the trials with few descriptors: the private directory was made, and then the file could not be."""

    def refuse(folder: int, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spill_file, "_create", refuse)
    with pytest.raises(StorageError, match="Too many open files"):
        spill_file.Arena(tmp_path, block_bytes=4096, direct=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [0, 3])
def test_an_interrupt_while_threads_start_leaves_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by SIGINT at random moments. ``start`` waits for the new thread, so that interrupts like to come there."""
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        real(thread)
        if thread.name.startswith("lightning_ssd-ssd"):
            started.append(thread)
            if len(started) == number + 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), open_offloader(tmp_path):
        pass
    for thread in started:
        thread.join(timeout=PATIENCE_S)
    assert len(started) == number + 1
    assert not any(thread.is_alive() for thread in started)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert list(tmp_path.iterdir()) == []


WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}


def wall_clocks(source: str) -> list[str]:
    """Uses of clocks that somebody may set."""
    tree = ast.parse(source)
    names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    found = [name for name in names if any(name == clock or name.endswith(f".{clock}") for clock in WALL_CLOCKS)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"time.{a.name}" for a in node.names if f"time.{a.name}" in WALL_CLOCKS]
    return found


def test_nothing_reads_a_clock_that_jumps() -> None:
    found = {path: wall_clocks(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    assert {path: clocks for path, clocks in found.items() if clocks} == {}


def test_the_clock_test_can_fail() -> None:
    assert wall_clocks("import time\nx = time.time()") == ["time.time"]
    assert wall_clocks("from time import time") == ["time.time"]
    assert wall_clocks("import datetime\nx = datetime.datetime.now()") == ["datetime.datetime.now"]
    assert wall_clocks("import time\nx = time.monotonic() + time.perf_counter()") == []
