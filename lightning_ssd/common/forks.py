"""Tell a process from its forks, which have neither its threads nor the right to its locks and files.

``os.getpid`` tells, too, but is a call of the kernel: hooks would make two for each tensor.
"""

from __future__ import annotations

import os

__all__ = ["FORKS"]

FORKS: list[int] = []
"""Numbers of the processes that were forked on the way from the first one to this one. Its length names a process: what
was made when it was shorter belongs to a parent."""

os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))
