"""Order directories so that a process begins with drives of its own NUMA node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_ssd.storage.filesystem import read_number

__all__ = ["directory_order", "near_first"]


def directory_order(
    directories: Sequence[Path], device: torch.device, local_rank: int, *, sysfs: Path = Path("/sys")
) -> list[int]:
    """Return the numbers of directories, which exist, in the order in which a process prefers them."""
    blocks = [os.stat(directory).st_dev for directory in directories]
    nodes = [_node_of(sysfs / f"dev/block/{os.major(block)}:{os.minor(block)}") for block in blocks]
    own = None
    if device.type == "cuda":
        card: Any = torch.cuda.get_device_properties(device)
        if hasattr(card, "pci_domain_id"):  # not in an older PyTorch
            address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
            own = _node_of(sysfs / "bus/pci/devices" / address)
    elif device.type == "cpu":
        cores = [sysfs / f"devices/system/cpu/cpu{core}" for core in os.sched_getaffinity(0)]
        found = {int(link.name[4:]) for core in cores for link in core.glob("node[0-9]*")}
        own = found.pop() if len(found) == 1 else None  # else it is bound to none
    return near_first(nodes, own, local_rank)


def near_first(nodes: Sequence[int | None], own: int | None, local_rank: int) -> list[int]:
    """Return the numbers of drives: those on the node of a process, then the others. ``None``: a node is unknown.

    Processes begin with different ones of each. Drives are alike where all are near, where none is, and where the node
    of one is unknown.
    """
    near = [number for number, node in enumerate(nodes) if node == own and None not in nodes]
    far = [number for number in range(len(nodes)) if number not in near]
    return [drives[(local_rank + i) % len(drives)] for drives in (near, far) for i in range(len(drives))]


def _node_of(device: Path) -> int | None:
    """Return the node that a device, or the nearest one above it, is on; of an array, that of all its drives."""
    device = device.resolve()
    for place in (device, *device.parents):
        if drives := [*place.glob("slaves/*")]:  # of md or device-mapper
            nodes = set(map(_node_of, drives))
            return nodes.pop() if len(nodes) == 1 else None
        if (node := read_number(place / "numa_node")) is not None:
            return node if node >= 0 else None
    return None
