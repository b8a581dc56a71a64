import os
import shutil
import subprocess
import sys

import pytest

from lightning_ssd.errors import ConfigError
from lightning_ssd.malloc import MallocThreshold, foreign_malloc, trim

glibc_only = pytest.mark.skipif(MallocThreshold().reason is not None, reason=f"no mallopt: {MallocThreshold().reason}")

PATTERN = """
import torch
from lightning_ssd.malloc import MallocThreshold
from lightning_ssd.memory import read_memory
MIB = 1 << 20

def held_after_free(nbytes=2 * MIB, total=128 * MIB):
    '''MiB that stay resident after all but the last of many buffers were freed, as activations are in backward.'''
    before = read_memory().host_bytes
    buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(total // nbytes)]
    assert read_memory().host_bytes - before > 0.9 * total
    last = buffers[-1]
    buffers.clear()
    return (read_memory().host_bytes - before) // MIB, last

del [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(2)][:]    # glibc's threshold follows to 16 MiB
"""


def run_pattern(body: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PATTERN + body],
        env={key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@glibc_only
def test_freed_buffers_leave_the_process_only_with_the_fixed_threshold():
    assert int(run_pattern("print(held_after_free()[0])")) > 100, "one live buffer on top keeps all of them resident"
    fixed = run_pattern(
        """
threshold = MallocThreshold()
assert threshold.fix() and threshold.reason is None
print(held_after_free()[0], held_after_free(8 * MIB)[0])
"""
    )
    two, eight = map(int, fixed.split())
    assert two <= 4
    assert eight <= 10


@glibc_only
def test_holes_that_the_heap_has_already_are_not_used():
    output = run_pattern(
        """
_, last = held_after_free()             # leaves 126 MiB of hole below a live buffer
with MallocThreshold():
    inside, last_inside = held_after_free()
after, last_after = held_after_free()
print(inside, after)
"""
    )
    inside, after = map(int, output.split())
    assert inside <= 4
    assert after > 100, "restored: the heap serves such buffers again"


@glibc_only
def test_after_restore_the_threshold_is_32_mib():
    output = run_pattern(
        """
with MallocThreshold():
    inside, last = held_after_free()
large, last_large = held_after_free(33 * MIB, 132 * MIB)
small, last = held_after_free()
print(inside, small, large)
"""
    )
    inside, small, large = map(int, output.split())
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
def test_the_lowest_claim_holds_until_the_last_restore():
    output = run_pattern(
        """
low, high = MallocThreshold(64 * 1024), MallocThreshold(8 * MIB)
low.fix(), low.fix(), high.fix()
both, last = held_after_free()
high.restore(), high.restore()
one, last = held_after_free()
low.restore()
print(both, one, held_after_free()[0])
"""
    )
    both, one, none = map(int, output.split())
    assert both <= 4
    assert one <= 4
    assert none > 100


def test_a_foreign_malloc_is_left_alone(monkeypatch):
    monkeypatch.setattr("lightning_ssd.malloc.foreign_malloc", lambda: "libjemalloc.so.2")
    threshold = MallocThreshold()
    assert not threshold.fix()
    assert threshold.reason in ("libjemalloc.so.2 replaces glibc's malloc", "the C library is not glibc")
    threshold.restore()
    assert not trim()


def test_a_threshold_that_glibc_would_refuse():
    with pytest.raises(ConfigError, match=r"MallocThreshold\.nbytes=1; allowed: an integer from 4096"):
        MallocThreshold(1)


FOREIGN = """
#define _GNU_SOURCE
#include <stddef.h>
extern void *__libc_malloc(size_t);
void *malloc(size_t nbytes) { return __libc_malloc(nbytes); }
"""
ASK = "from lightning_ssd.malloc import foreign_malloc, trim; print(foreign_malloc(), trim())"


@glibc_only
@pytest.mark.skipif(shutil.which("cc") is None, reason="a library with a malloc of its own has to be compiled")
def test_the_library_that_gives_malloc_is_recognised(tmp_path):
    (tmp_path / "foreign.c").write_text(FOREIGN)
    library = tmp_path / "libother.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "foreign.c"], check=True)
    assert run_pattern(ASK, LD_PRELOAD=str(library)) == "libother.so.1 False"


@glibc_only
def test_a_preloaded_name_is_not_enough():
    assert foreign_malloc() is None
    assert run_pattern(ASK, LD_PRELOAD="/nowhere/jemalloc/libtcmalloc.so.4").startswith("None ")
