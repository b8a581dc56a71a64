import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_ssd.storage.extents import Extent, ExtentAllocator

BLOCK = 4096


class AllocatorAgainstByteMap(RuleBasedStateMachine):
    """The allocator does what a list with one entry per block does by looking at every entry."""

    @initialize(block=st.sampled_from([1, 512, 4096]))
    def start(self, block):
        self.block = block
        self.allocator = ExtentAllocator(block)
        self.blocks = []
        self.lent = []

    def first_fit(self, num_blocks):
        for start in range(len(self.blocks) - num_blocks + 1):
            if not any(self.blocks[start : start + num_blocks]):
                return start
        return None

    def mark(self, extent, used):
        start, count = extent.offset // self.block, extent.nbytes // self.block
        assert self.blocks[start : start + count] == [not used] * count, "overlap, or freed twice"
        self.blocks[start : start + count] = [used] * count

    @rule(num_blocks=st.integers(1, 12))
    def grow(self, num_blocks):
        self.allocator.grow(num_blocks * self.block)
        self.blocks += [False] * num_blocks

    @rule(nbytes=st.integers(1, 9 * 4096))
    def allocate(self, nbytes):
        count = -(-nbytes // self.block)
        if self.block == 1:
            count = nbytes = nbytes % 13 + 1
        expected = self.first_fit(count)
        extent = self.allocator.allocate(nbytes)
        if expected is None:
            assert extent is None
            return
        assert extent == Extent(expected * self.block, count * self.block)
        self.mark(extent, True)
        self.lent.append(extent)

    @rule(counts=st.lists(st.integers(0, 4), max_size=5))
    def allocate_side_by_side(self, counts):
        expected = self.first_fit(sum(counts)) if any(counts) else 0
        extents = self.allocator.allocate_all([count * self.block for count in counts])
        if expected is None:
            assert extents is None
            return
        for extent, count in zip(extents, counts, strict=True):
            assert extent == (Extent(expected * self.block, count * self.block) if count else Extent(0, 0))
            expected += count
        lent = [extent for extent in extents if extent.nbytes]
        for extent in lent:
            self.mark(extent, True)
        self.lent += lent

    @precondition(lambda self: self.lent)
    @rule()
    def free_all(self):
        self.allocator.free(*self.lent)
        for extent in self.lent:
            self.mark(extent, False)
        self.lent.clear()

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def free(self, data):
        extent = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.allocator.free(extent)
        self.mark(extent, False)
        with pytest.raises(ValueError, match="freed twice"):
            self.allocator.free(extent)

    @invariant()
    def counts_agree(self):
        self.allocator.merge_returned()
        assert self.allocator.capacity_bytes == len(self.blocks) * self.block
        assert self.allocator.used_bytes == sum(self.blocks) * self.block
        tail = next((i for i, used in enumerate(reversed(self.blocks)) if used), len(self.blocks))
        assert self.allocator.tail_free_bytes == tail * self.block

    def teardown(self):
        for extent in self.lent:
            self.allocator.free(extent)
        if self.blocks:
            whole = self.allocator.allocate(len(self.blocks) * self.block)
            assert whole == Extent(0, len(self.blocks) * self.block), "free neighbours were not merged"


TestAllocatorAgainstByteMap = AllocatorAgainstByteMap.TestCase
TestAllocatorAgainstByteMap.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_refuses_what_is_no_extent_of_its_own():
    allocator = ExtentAllocator(BLOCK)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least 1 byte"):
            allocator.allocate(nbytes)
    with pytest.raises(ValueError, match="multiple of 4096"):
        allocator.grow(100)
    allocator.grow(4 * BLOCK)
    assert allocator.allocate(2 * BLOCK) == Extent(0, 2 * BLOCK)
    with pytest.raises(ValueError, match="belongs to another arena"):
        allocator.free(Extent(0, BLOCK))
    allocator.free(Extent(0, 2 * BLOCK))
