"""Whether this thread may be holding one of our locks already.

A signal handler runs between any two lines of the main thread, and what the garbage collector runs (``__del__``, the
callback of a weak reference) between any two lines of any thread: also between those under a lock of ours. If it asked
for a number then, and waited for that lock, it would wait for ever. An ``RLock`` would let it in, to see counters of
which one has changed and the next one has not. It would not help, either, where this thread holds a lock that comes
later in the order than the one that is asked for: another thread has that one, and waits for ours.

So whoever may be asked from there looks at who is running, before the first lock. A lock is held by a function that is
on the stack: none of ours is held across a ``yield``.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["may_hold_lock"]

_PACKAGE = __name__.partition(".")[0]
_TAKE_LOCKS = frozenset(
    f"{_PACKAGE}.{name}"
    for name in (
        "activations.fetcher",
        "activations.saved_storage",
        "activations.tensor_cache",
        "common.dtensor",
        "common.waiting",
        "memory.host_budget",
        "memory.malloc",
        "memory.pools",
        "optimizer.store.store",
        "parameters.device_memory",
        "parameters.device_moves",
        "parameters.device_pager",
        "parameters.files.mapped_storage",
        "parameters.guard.guard_patches",
        "parameters.guard.swap_patch",
        "parameters.mapped_pager",
        "parameters.mapped_weights",
        "parameters.paged_gradients",
        "parameters.pager",
        "scheduling.plan_maker",
        "scheduling.scheduler",
        "storage.posix",
        "storage.spill_file",
        "tiers.host",
        "tiers.host_arena",
        "tiers.read_priority",
        "tiers.ssd",
        "tiers.transfer_queue",
    )
)
"""All but two. Under the lock of ``recompute.global_modes`` the user's blocks run, which may ask; it comes before all
others. That of ``common.uninterrupted``, below which an offloader closes, guards a flag: nobody asks for it who holds
another one."""

_STAND_INS = frozenset(("_run_backward", "applied", "unpacked"))
"""Of ``parameters.guard.guard_patches``: they stand in for functions of PyTorch that call the user's."""


def may_hold_lock() -> bool:
    """Whether a function that takes a lock of ours is running in this thread. A few microseconds."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _TAKE_LOCKS and frame.f_code.co_name not in _STAND_INS:
            return True
        frame = frame.f_back
    return False
