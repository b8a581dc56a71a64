"""Where PyTorch has tensors begin with a page, glibc reuses what they leave."""

from __future__ import annotations

import sys

import pytest

from lightning_ssd.memory.malloc import PAGES_VARIABLE, MallocThreshold
from tests.memory.test_malloc import run, run_pattern

pytestmark = pytest.mark.skipif(MallocThreshold().reason is not None, reason="there is no glibc with mallopt")

ON, OFF = {PAGES_VARIABLE: "1"}, {PAGES_VARIABLE: "0"}
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

IS_MAPPED = """
def is_mapped(nbytes):    # more than any hole
    mapped = libc.mallinfo2().hblks
    block = libc.malloc(nbytes)
    found = libc.mallinfo2().hblks > mapped
    libc.free(block)
    return found
"""


def test_a_setting_of_pytorch_is_told_by_addresses() -> None:
    ask = "from lightning_ssd.memory.malloc import *; print(has_whole_pages(), malloc_name())"
    with_pages, without = run(ask, **ON), run(ask, **OFF)
    assert with_pages.startswith("True glibc ")
    assert with_pages.endswith(", tensors in whole pages")
    assert without.startswith("False glibc ")
    assert "pages" not in without


def test_whoever_fakes_tensors_gets_the_same_answer() -> None:
    ask = """
from torch._subclasses.fake_tensor import FakeTensorMode
from lightning_ssd.memory.malloc import has_whole_pages
with FakeTensorMode():
    print(has_whole_pages())
"""
    assert run(ask, **ON) == "True"


def test_what_a_tensor_leaves_fits_the_next_one_of_its_size() -> None:
    assert int(run_pattern(CHURN, **ON)) < 40, "of 480 MiB in turn; without whole pages it is all of them in most runs"


def test_freed_tensors_of_any_size_stay_until_somebody_trims(forks: list[str]) -> None:
    output = run_pattern(
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
"""
        + IS_MAPPED
        + """
inside = is_mapped(512 * MIB)
threshold.restore()
print(inside, is_mapped(900 * MIB), MallocThreshold._is_changed)
""",
        forks,
    )
    reused, restored = (line.split() for line in output.splitlines())
    assert int(reused[0]) > 120
    assert int(reused[1]) <= 4
    assert restored == ["False", "True", "False"], "what is mapped is freed at once"


def test_the_latest_claim_of_one_user_holds_and_that_to_map_each_tensor_comes_first(forks: list[str]) -> None:
    output = run_pattern(
        """
threshold, other = MallocThreshold(), MallocThreshold()
for claims in (["fix", "reuse", "fix"], ["reuse", "fix"], ["fix"]):
    for claim in claims:
        getattr(threshold, claim)()
    fixed, last = held_after_free()
    threshold.reuse()
    with other:
        inside, last = held_after_free()
    print(fixed, inside, held_after_free()[0])
    threshold.restore()
    print(MallocThreshold._holes, MallocThreshold._users, MallocThreshold._reusers)
""",
        forks,
    )
    lines = output.splitlines()
    for numbers in lines[::2]:
        fixed, inside, reused = map(int, numbers.split())
        assert max(fixed, inside) <= 4
        assert reused > 100
    assert lines[1::2] == ["None set() set()"] * 3


def test_an_interrupt_between_claim_and_setting_is_made_good() -> None:
    output = run_pattern(
        IS_MAPPED
        + """
threshold = MallocThreshold()
apply = MallocThreshold._apply
def interrupted(self):
    raise KeyboardInterrupt
for begin in (threshold.reuse, threshold.restore):
    MallocThreshold._apply = interrupted
    try:
        begin()
    except KeyboardInterrupt:
        print("interrupted")
    MallocThreshold._apply = apply
threshold.reuse()
print(held_after_free(33 * MIB, 132 * MIB)[0])
threshold.restore()
print(is_mapped(512 * MIB), MallocThreshold._is_changed)
"""
    )
    *told, reused, restored = output.splitlines()
    assert told == ["interrupted"] * 2
    assert int(reused) > 120, "the next pass makes it good: freed tensors stay"
    assert restored == "True False", "large ones are mapped again, and so freed at once"


def test_the_recipes_have_it_and_a_user_may_say_otherwise() -> None:
    begin = "import recipes; from lightning_ssd.memory.malloc import has_whole_pages; print(has_whole_pages())"
    assert run(begin, ("env", "-u", PAGES_VARIABLE, sys.executable)) == "True"
    assert run(begin, **OFF) == "False"
