"""What glibc's malloc keeps of freed tensors, in processes of their own."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lightning_ssd.memory.malloc import PAGES_VARIABLE, MallocThreshold, foreign_malloc, trim
from tests.support.patience import PATIENCE_S
from tests.support.processes import BARE_PACKAGE

glibc_only = pytest.mark.skipif(MallocThreshold().reason is not None, reason=f"no mallopt: {MallocThreshold().reason}")
ON, OFF = {PAGES_VARIABLE: "1"}, {PAGES_VARIABLE: "0"}

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

def is_mapped(nbytes):    # more than any hole
    mapped = libc.mallinfo2().hblks
    block = libc.malloc(nbytes)
    found = libc.mallinfo2().hblks > mapped
    libc.free(block)
    return found
"""


def run(program, begin=(sys.executable,), **env):
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


def much(values):
    """Whether the heap serves such tensors again."""
    return min(values) > 100


HOLES = """
threshold, before = MallocThreshold(), libc.mallinfo2().arena
for _ in range(3):
    threshold.fix()
    grown = libc.mallinfo2().arena - before
    threshold.restore()
    print(grown // MIB, (libc.mallinfo2().arena - before) // MIB)
threshold.fix()
print(held_after_free()[0])
threshold.restore()
large, last_large = held_after_free(33 * MIB, 132 * MIB)
small, last = held_after_free()
print(small, large)
"""
PROGRAMS = {
    "one live buffer on top keeps all of them resident": ("print(held_after_free()[0])", much),
    "the fixed threshold": (
        """
threshold = MallocThreshold()
threshold.fix()
print(held_after_free()[0], held_after_free(8 * MIB)[0])
""",
        lambda values: max(values) <= 10,
    ),
    **{
        f"holes are held without a new one, {name}": (
            heap + HOLES,
            # 2 MiB lies under the restored threshold, 33 MiB over it: mapped, so freed at once.
            lambda values: max(values[:6]) <= 0 and values[6] <= 4 and values[7] > 100 and values[8] <= 34,
        )
        for name, heap in (("small heap", ""), ("holes in 128 MiB", "make_heap(128 * MIB)"))
    },
    "a claim holds until the last restore": (
        """
first, second = MallocThreshold(), MallocThreshold()
first.fix(), first.fix(), second.fix()
both, last = held_after_free()
second.restore(), second.restore()
one, last = held_after_free()
first.restore()
print(both, one, held_after_free()[0])
""",
        lambda values: values[0] <= 4 and values[1] <= 4 and values[2] > 100,
    ),
    "freed tensors of any size stay until somebody trims": (
        """
from lightning_ssd.memory.malloc import trim
threshold = MallocThreshold()
threshold.reuse(), threshold.reuse()
before = read_memory().host_bytes
buffers = [torch.ones(33 * MIB, dtype=torch.uint8) for _ in range(4)]
buffers.clear()
kept = read_memory().host_bytes - before
trim()
print(kept // MIB, (read_memory().host_bytes - before) // MIB)
assert not is_mapped(512 * MIB)
threshold.restore()
assert is_mapped(900 * MIB), "what is mapped is freed at once"
assert not MallocThreshold._is_changed
""",
        lambda values: values[0] > 120 and values[1] <= 4,
    ),
    "the latest claim of one user holds, and that to map each tensor comes first": (
        """
threshold, other = MallocThreshold(), MallocThreshold()
for claims in (["fix", "reuse", "fix"], ["reuse", "fix"], ["fix"]):
    for claim in claims:
        getattr(threshold, claim)()
    fixed, last = held_after_free()
    threshold.reuse()
    other.fix()
    inside, last = held_after_free()
    other.restore()
    print(fixed, inside, held_after_free()[0])
    threshold.restore()
    assert not (MallocThreshold._holes or MallocThreshold._users or MallocThreshold._reusers)
""",
        lambda values: max(values[0::3] + values[1::3]) <= 4 and min(values[2::3]) > 100,
    ),
}
"""What they print, in MiB, and what is to hold of each value or of all."""
SEVERAL = [name for name in PROGRAMS if "claim" in name or "128 MiB" in name]


@glibc_only
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in SEVERAL else ()) for name in PROGRAMS]
)
def test_what_stays_resident(name, forks):
    program, holds = PROGRAMS[name]
    values = [int(value) for value in run(PATTERN + program, forks).split()]
    assert holds(values), values


@glibc_only
@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "1048576"}, marks=pytest.mark.exhaustive),
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072:glibc.malloc.mmap_threshold=1048576"},
    ],
)
def test_restore_returns_to_the_users_own_setting(env):
    program = "threshold = MallocThreshold()\nthreshold.fix(), threshold.restore()\nprint(held_after_free()[0])"
    assert int(run(PATTERN + program, **env)) <= 4


CHURN = """
# A layer's output lives until the next one is there; beside each of them something small lives on.
import torch
libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
small, last = [], None

def churn(num):
    global last, small
    before = libc.mallinfo2().arena
    for _ in range(num):
        last = torch.empty(6 * MIB, dtype=torch.uint8)
        small += [torch.empty(n) for n in range(1, 8)]
    return (libc.mallinfo2().arena - before) // MIB

churn(40)    # the heap that imports have left gives room to a few first, each time other ones
print(churn(80))
"""


@glibc_only
def test_where_pytorch_has_tensors_in_whole_pages_what_one_leaves_fits_the_next_one():
    grown = int(run(PATTERN + CHURN, **ON))
    assert grown < 40, "of 480 MiB in turn; without whole pages it is all of them in most runs"


@glibc_only
def test_a_setting_of_pytorch_is_told_by_addresses():
    """The recipes turn it on, where a user has not said otherwise."""
    ask = "import recipes; from lightning_ssd.memory.malloc import *; print(has_whole_pages(), malloc_name())"
    fakes = "; from torch._subclasses.fake_tensor import FakeTensorMode; FakeTensorMode().__enter__()"
    again = fakes + "; has_whole_pages.cache_clear(); print(has_whole_pages())"
    with_pages, faked = run(ask + again, ("env", "-u", PAGES_VARIABLE, sys.executable)).splitlines()
    without = run(ask, **OFF)
    assert with_pages.startswith("True glibc ")
    assert with_pages.endswith(", tensors in whole pages")
    assert faked == "True"
    assert without.startswith("False glibc ")
    assert "pages" not in without


def test_a_foreign_malloc_is_left_alone(monkeypatch):
    monkeypatch.setattr("lightning_ssd.memory.malloc.foreign_malloc", lambda: "libjemalloc.so.2")
    threshold = MallocThreshold()
    threshold.fix()
    assert threshold.reason in ("libjemalloc.so.2 replaces glibc's malloc", "the C library is not glibc")
    threshold.restore()
    assert not trim()


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
    assert held[MallocThreshold._M_MMAP_THRESHOLD] == 64 << 10
    threshold.reuse()
    assert held[MallocThreshold._M_MMAP_THRESHOLD] == 32 << 20
    assert held[MallocThreshold._M_TRIM_THRESHOLD] == MallocThreshold._UNREACHED_NBYTES
    threshold.restore()
    assert held[MallocThreshold._M_TRIM_THRESHOLD] == MallocThreshold._RESTORED_TRIM_NBYTES
