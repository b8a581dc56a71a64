"""Huge pages are switched off for the whole process only while somebody wants them off, and never against its wish."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ssd.memory.malloc import PAGES_VARIABLE, MallocThreshold
from tests.memory.test_malloc import run

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")

BEGIN = """
import os, subprocess, sys
import torch
from lightning_ssd.memory.huge_heap import HugeHeap
from lightning_ssd.memory.mmap import libc

def are_off():
    return libc.prctl(42, 0, 0, 0, 0)  # PR_GET_THP_DISABLE

def in_child(ask):
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, str(ask()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(read, 99).decode()

first, second = HugeHeap(), HugeHeap()
"""


def answers(script: str) -> list[str]:
    return run(BEGIN + script, **{PAGES_VARIABLE: "1"}).split()


def test_they_are_off_while_any_is_suspended() -> None:
    told = answers(
        """
print(are_off())
first.suspend(), first.suspend(), second.suspend()
print(are_off())
first.resume(), first.resume()
print(are_off())
second.resume()
print(are_off())
"""
    )
    assert told == ["0", "1", "1", "0"]


def test_a_fork_has_them_and_may_switch_them_off_itself() -> None:
    told = answers(
        """
first.suspend()
print(in_child(are_off))
print(in_child(lambda: (second.suspend(), are_off())[1]), in_child(lambda: (first.resume(), are_off())[1]))
print(are_off())
first.resume()
print(are_off())
"""
    )
    assert told == ["0", "1", "0", "1", "0"]


def test_a_process_that_wants_none_gets_none() -> None:
    told = answers(
        """
libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
mine = HugeHeap()
mine.suspend(), mine.resume()
print(are_off(), in_child(are_off))
"""
    )
    assert told == ["1", "1"]


def test_tensors_lie_in_small_pages_meanwhile() -> None:
    told = answers(
        """
def huge_mib():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) // 1024

before = huge_mib()
first.suspend()
small = torch.ones(64 << 20, dtype=torch.uint8)
print(huge_mib() - before)
first.resume()
large = torch.ones(64 << 20, dtype=torch.uint8)
print(huge_mib() - before)
"""
    )
    small, large = map(int, told)
    if large == 0 or not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel gives no transparent huge pages")
    assert small == 0
    assert large >= 60


def test_one_that_is_dropped_leaves_them_on() -> None:
    told = answers(
        """
first.suspend(), second.suspend()
del first
print(are_off())
del second
print(are_off())
libc.prctl(41, 1, 0, 0, 0)  # by the user, later
third = HugeHeap()
third.resume()
del third
print(are_off())
"""
    )
    assert told == ["1", "0", "1"]
