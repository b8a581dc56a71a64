import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from lightning_ssd.errors import ConfigError
from lightning_ssd.memory.malloc import MallocThreshold, foreign_malloc, trim
from tests.support.patience import PATIENCE_S
from tests.support.processes import BARE_PACKAGE

glibc_only = pytest.mark.skipif(MallocThreshold().reason is not None, reason=f"no mallopt: {MallocThreshold().reason}")

PATTERN = """
import ctypes
import torch
from lightning_ssd.memory.malloc import MallocThreshold
from lightning_ssd.memory.readings import read_memory
from tests.support.patience import PATIENCE_S

MIB = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

class MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks".split()]
    _fields_ += [("rest", ctypes.c_size_t * 3)]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
libc.mallinfo2.restype = MallInfo2

def occupy_holes():
    '''Take every hole of a MiB and more, so that nothing depends on the heap that imports happen to leave.'''
    libc.mallopt(M_MMAP_THRESHOLD, MIB)
    for size in (128, 64, 32, 16, 8, 4, 2, 1):
        mapped = libc.mallinfo2().hblks
        while block := libc.malloc(size * MIB):
            if libc.mallinfo2().hblks > mapped:
                libc.free(block)
                break

def make_heap(nbytes):
    '''A heap of so many bytes more, with live blocks and resident holes of 1 to 24 MiB in turn.'''
    libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    goal, holes = libc.mallinfo2().arena + nbytes, []
    while libc.mallinfo2().arena < goal:
        size = (1, 3, 24)[len(holes) % 3] * MIB
        holes.append(libc.malloc(size))
        ctypes.memset(holes[-1], 1, size)
        # Lives on, so that holes on either side never meet. No smaller: imports leave holes below a MiB, elsewhere.
        libc.malloc(MIB)
    for hole in holes:
        libc.free(hole)

def held_after_free(nbytes=2 * MIB, total=128 * MIB):
    '''MiB that stay resident after all but the last of many buffers were freed, as activations are in backward.'''
    libc.malloc_trim(0)    # or what is free and resident, left by imports, would be used without being seen
    before = read_memory().host_bytes
    buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(total // nbytes)]
    assert read_memory().host_bytes - before > 0.9 * total
    last = buffers[-1]
    buffers.clear()
    return (read_memory().host_bytes - before) // MIB, last

read_memory(), torch.ones(64 * MIB, dtype=torch.uint8)    # code that was never run would become resident later
occupy_holes()
libc.mallopt(M_MMAP_THRESHOLD, 32 * MIB)    # where glibc's own adjustment ends up
"""


def run(program: str, begin: Sequence[str] = (sys.executable,), **env: str) -> str:
    done = subprocess.run(
        [*begin, "-c", BARE_PACKAGE + program],
        env={key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_pattern(body: str, begin: Sequence[str] = (sys.executable,), **env: str) -> str:
    return run(PATTERN + body, begin, **env)


@glibc_only
def test_freed_buffers_leave_the_process_only_with_the_fixed_threshold(forks):
    assert int(run_pattern("print(held_after_free()[0])", forks)) > 100, (
        "one live buffer on top keeps all of them resident"
    )
    fixed = run_pattern(
        """
threshold = MallocThreshold()
assert threshold.fix() and threshold.reason is None
print(held_after_free()[0], held_after_free(8 * MIB)[0])
""",
        forks,
    )
    two, eight = map(int, fixed.split())
    assert two <= 4
    assert eight <= 10


@glibc_only
def test_holes_that_the_heap_has_already_are_not_used(forks):
    output = run_pattern(
        """
_, last = held_after_free()             # leaves 126 MiB of hole below a live buffer
with MallocThreshold():
    inside, last_inside = held_after_free()
after, last_after = held_after_free()
print(inside, after)
""",
        forks,
    )
    inside, after = map(int, output.split())
    assert inside <= 4
    assert after > 100, "restored: the heap serves such buffers again"


@glibc_only
def test_an_interrupt_while_holes_are_held_leaves_nothing(forks):
    output = run_pattern(
        """
from lightning_ssd.memory.malloc import _HeldHoles

hold = _HeldHoles._hold
def interrupted(self, size):
    hold(self, size)
    if self._blocks:
        raise KeyboardInterrupt
_, last = held_after_free()             # leaves 126 MiB of hole below a live buffer
threshold = MallocThreshold()
_HeldHoles._hold = interrupted
try:
    threshold.fix()
except KeyboardInterrupt:
    print("interrupted")
_HeldHoles._hold = hold
threshold.restore()
print(held_after_free()[0], MallocThreshold._holes)
""",
        forks,
    )
    told, after = output.splitlines()
    assert told == "interrupted"
    assert int(after.removesuffix(" None")) > 100, "the heap serves such buffers again"


@glibc_only
@pytest.mark.parametrize("heap", ["", "make_heap(128 * MIB)"], ids=["small heap", "holes in 128 MiB"])
def test_holes_are_held_without_a_new_one_and_after_restore_the_threshold_is_32_mib(heap, forks):
    output = run_pattern(
        heap
        + """
before = libc.mallinfo2().arena
for _ in range(3):
    with MallocThreshold():
        grown = libc.mallinfo2().arena - before
    print(grown // MIB, (libc.mallinfo2().arena - before) // MIB)
with MallocThreshold():
    inside, last = held_after_free()
large, last_large = held_after_free(33 * MIB, 132 * MIB)
small, last = held_after_free()
print(inside, small, large)
""",
        forks,
    )
    *grown, inside, small, large = map(int, output.split())
    assert max(grown) <= 0, output
    assert inside <= 4
    assert small > 100, "2 MiB lies under the restored threshold"
    assert large <= 34, "33 MiB lies over it: mapped, so freed at once"


@glibc_only
@pytest.mark.parametrize(
    "env",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=1048576"},
    ],
)
def test_restore_returns_to_the_users_own_setting(env):
    output = run_pattern("MallocThreshold().__enter__().restore()\nprint(held_after_free()[0])", **env)
    assert int(output) <= 4


@glibc_only
def test_the_lowest_claim_holds_until_the_last_restore(forks):
    output = run_pattern(
        """
low, high = MallocThreshold(64 * 1024), MallocThreshold(8 * MIB)
low.fix(), low.fix(), high.fix()
both, last = held_after_free()
high.restore(), high.restore()
one, last = held_after_free()
low.restore()
print(both, one, held_after_free()[0])
""",
        forks,
    )
    both, one, none = map(int, output.split())
    assert both <= 4
    assert one <= 4
    assert none > 100


def test_a_foreign_malloc_is_left_alone(monkeypatch):
    monkeypatch.setattr("lightning_ssd.memory.malloc.foreign_malloc", lambda: "libjemalloc.so.2")
    threshold = MallocThreshold()
    assert not threshold.fix()
    assert threshold.reason in ("libjemalloc.so.2 replaces glibc's malloc", "the C library is not glibc")
    threshold.restore()
    assert not trim()


@glibc_only
def test_an_old_glibc_reuses_all_but_the_largest_tensors(monkeypatch):
    """Before 2.35 it refuses thresholds of more than 32 MiB."""
    libc, held = MallocThreshold()._libc, {}

    def mallopt(option, value):
        if option == MallocThreshold._M_MMAP_THRESHOLD and value > 32 << 20:
            return 0
        held[option] = value
        return libc.mallopt(option, value)

    threshold = MallocThreshold()
    old = SimpleNamespace(mallopt=mallopt, malloc=libc.malloc, free=libc.free, malloc_trim=libc.malloc_trim)
    monkeypatch.setattr(threshold, "_libc", old)
    threshold.fix()
    assert held[MallocThreshold._M_MMAP_THRESHOLD] == threshold.nbytes
    threshold.reuse()
    assert held[MallocThreshold._M_MMAP_THRESHOLD] == 32 << 20
    assert held[MallocThreshold._M_TRIM_THRESHOLD] == MallocThreshold._UNREACHED_NBYTES
    threshold.restore()
    assert held[MallocThreshold._M_TRIM_THRESHOLD] == MallocThreshold._RESTORED_TRIM_NBYTES


def test_a_threshold_that_glibc_would_refuse():
    with pytest.raises(ConfigError, match=r"MallocThreshold\.nbytes=1; give an integer from 4096"):
        MallocThreshold(1)


FOREIGN = """
#define _GNU_SOURCE
#include <stddef.h>
extern void *__libc_malloc(size_t);
void *malloc(size_t nbytes) { return __libc_malloc(nbytes); }
"""
ASK = "from lightning_ssd.memory.malloc import foreign_malloc, trim; print(foreign_malloc(), trim())"


@glibc_only
@pytest.mark.skipif(shutil.which("cc") is None, reason="a library with a malloc of its own has to be compiled")
def test_the_library_that_gives_malloc_is_recognised(tmp_path):
    (tmp_path / "foreign.c").write_text(FOREIGN)
    library = tmp_path / "libother.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "foreign.c"], check=True)
    assert run(ASK, LD_PRELOAD=str(library)) == "libother.so.1 False"


@glibc_only
def test_a_preloaded_name_is_not_enough():
    assert foreign_malloc() is None
    assert run(ASK, LD_PRELOAD="/nowhere/jemalloc/libtcmalloc.so.4").startswith("None ")
