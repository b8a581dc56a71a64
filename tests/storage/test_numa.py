"""A process begins with drives of its own NUMA node, where the machine tells which those are."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ssd.storage.numa import directory_order, near_first

CPU = torch.device("cpu")


class Sysfs:
    """What a kernel would tell of drives, cores and cards, as far as it is made up here."""

    def __init__(self, root):
        self.root = root

    def disk(self, name, node, *partitions):
        """Make a disk behind a controller on a node; return its directory, or those of its partitions."""
        controller = self.root / "devices" / "pci0000:00" / name
        disk = controller / "nvme" / f"{name}n1"
        for place in [disk, *[disk / partition for partition in partitions]]:
            (place / "slaves").mkdir(parents=True)
        (controller / "numa_node").write_text(f"{node}\n")
        return [disk / partition for partition in partitions] or disk

    def array(self, name, *parts):
        array = self.root / "devices" / "virtual" / "block" / name
        (array / "slaves").mkdir(parents=True)
        for number, part in enumerate(parts):
            (array / "slaves" / f"part{number}").symlink_to(part)
        return array

    def lies_on(self, directory, block):
        """Tell that the file system of a directory is on a block device."""
        number = os.stat(directory).st_dev
        link = self.root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(block)

    def cores(self, *nodes):
        """Spread the cores of this process over nodes."""
        for number, core in enumerate(sorted(os.sched_getaffinity(0))):
            (self.root / "devices/system/cpu" / f"cpu{core}" / f"node{nodes[number % len(nodes)]}").mkdir(parents=True)


@pytest.fixture
def sysfs(tmp_path):
    return Sysfs(tmp_path / "sys")


@pytest.fixture
def two(tmp_path):
    """Two directories on different file systems."""
    directories = [Path("/dev/shm"), tmp_path]
    if len({os.stat(directory).st_dev for directory in directories}) < 2:
        pytest.skip("needs two file systems")
    return directories


class TestNearFirst:
    @pytest.mark.parametrize("drives", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]])
    def test_each_rank_begins_with_a_drive_of_its_own_node_that_no_other_begins_with(self, drives):
        ranks = [0, 0, 1, 1]
        orders = [near_first(drives, node, rank) for rank, node in enumerate(ranks)]
        assert sorted(order[0] for order in orders) == [0, 1, 2, 3]
        for order, node in zip(orders, ranks, strict=True):
            assert [drives[number] for number in order] == [node, node, 1 - node, 1 - node]
            assert sorted(order) == [0, 1, 2, 3], "all are used"

    @pytest.mark.parametrize(
        ("drives", "own"),
        [([0, 0, 1, 1], None), ([None] * 4, 0), ([0, 0, 0, 0], 0), ([1, 1, 1, 1], 0), ([None] * 4, None)],
        ids=["of the process unknown", "of drives unknown", "all near", "all far", "all unknown"],
    )
    def test_where_nodes_tell_nothing_ranks_begin_one_after_the_other(self, drives, own):
        assert [near_first(drives, own, rank)[0] for rank in range(5)] == [0, 1, 2, 3, 0]
        assert near_first(drives, own, 6) == [2, 3, 0, 1]

    @pytest.mark.parametrize("drives", [[0, None], [None, 1], [None, 0]])
    def test_one_that_is_unknown_leaves_all_alike(self, drives):
        assert [near_first(drives, 0, rank)[0] for rank in range(4)] == [0, 1, 0, 1]

    @pytest.mark.parametrize("node", [0, 1, None])
    def test_one_drive(self, node):
        assert near_first([node], 0, 3) == [0]


class TestDirectoryOrder:
    def order(self, sysfs, two, rank=0, device=CPU):
        return directory_order(two, device, rank, sysfs=sysfs.root)

    def test_disks(self, sysfs, two):
        sysfs.lies_on(two[0], sysfs.disk("nvme0", 0))
        sysfs.lies_on(two[1], sysfs.disk("nvme1", 1))
        sysfs.cores(1)
        assert self.order(sysfs, two) == self.order(sysfs, two, rank=1) == [1, 0]

    def test_partitions(self, sysfs, two):
        sysfs.lies_on(two[0], sysfs.disk("nvme0", 0, "nvme0n1p1", "nvme0n1p2")[1])
        sysfs.lies_on(two[1], sysfs.disk("nvme1", 1, "nvme1n1p1")[0])
        sysfs.cores(1)
        assert self.order(sysfs, two) == [1, 0]

    @pytest.mark.parametrize(("nodes", "is_near"), [((1, 1), True), ((0, 1), False), ((1, -1), False)])
    def test_arrays(self, nodes, is_near, sysfs, two):
        parts = [sysfs.disk("nvme1", nodes[0], "nvme1n1p1")[0], sysfs.disk("nvme2", nodes[1])]
        mirror = sysfs.array("md0", *parts)
        sysfs.lies_on(two[0], sysfs.disk("nvme0", 0))
        sysfs.lies_on(two[1], sysfs.array("dm-0", mirror))  # a volume over an array
        sysfs.cores(1)
        assert self.order(sysfs, two) == ([1, 0] if is_near else [0, 1])

    @pytest.mark.parametrize("unknown", ["disk", "node", "cores", "bound to both", "nothing is there"])
    def test_unknown(self, unknown, sysfs, two):
        if unknown != "nothing is there":
            sysfs.lies_on(two[0], sysfs.disk("nvme0", 0))
            if unknown != "disk":
                sysfs.lies_on(two[1], sysfs.disk("nvme1", -1 if unknown == "node" else 1))
        if unknown == "bound to both":
            if len(os.sched_getaffinity(0)) < 2:
                pytest.skip("needs two cores")
            sysfs.cores(0, 1)
        elif unknown not in ("cores", "nothing is there"):
            sysfs.cores(1)
        assert [self.order(sysfs, two, rank) for rank in range(2)] == [[0, 1], [1, 0]]

    def test_a_card_tells_its_own_node_whatever_cores_there_are(self, sysfs, two, monkeypatch):
        properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        card = sysfs.root / "bus/pci/devices/0000:dc:00.0"
        card.mkdir(parents=True)
        (card / "numa_node").write_text("1\n")
        sysfs.lies_on(two[0], sysfs.disk("nvme0", 0))
        sysfs.lies_on(two[1], sysfs.disk("nvme1", 1))
        sysfs.cores(0)
        assert self.order(sysfs, two) == [0, 1]
        assert self.order(sysfs, two, device=torch.device("cuda", 0)) == [1, 0]

    def test_sysfs_of_this_machine_is_read(self, tmp_path):
        assert directory_order([tmp_path], CPU, 1) == [0]
