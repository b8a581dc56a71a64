"""Threads and open files of ours that something has left behind."""

import os
import threading
import time

_ON_ITS_WAY_S = 10.0


def open_files(directory):
    """Descriptors of this process that lead into ``directory``; anonymous files show as deleted ones."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [target for target in targets if target.startswith(str(directory))]


def assert_nothing_left(directory):
    # A task's end is told by the task: its thread is on its way out then, which on a busy machine takes a moment.
    deadline_s = time.monotonic() + _ON_ITS_WAY_S
    while names := [t.name for t in threading.enumerate() if t.name.startswith("lightning_ssd")]:
        assert time.monotonic() < deadline_s, names
        time.sleep(0.001)
    assert open_files(directory) == []
    assert list(directory.glob(".lightning_ssd*")) == []
