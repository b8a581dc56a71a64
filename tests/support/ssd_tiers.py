"""A tier of drives by itself."""

from contextlib import contextmanager

from lightning_ssd.memory.pools import ReloadPool
from lightning_ssd.telemetry.events import EventLog
from lightning_ssd.tiers.checksum import Sampler
from lightning_ssd.tiers.copy_paths import HostMover
from lightning_ssd.tiers.ssd import SsdTier


@contextmanager
def ssd_tier(backend, *directories, mover=None, **settings):
    """Open one on a backend, and close both.

    Args:
        backend: of its files.
        directories: where they lie.
        mover: between these and memory; without one, memory is the host's.
        settings: other than by default.
    """
    settings = {"events": EventLog(), "sampler": Sampler("off")} | settings
    tier = SsdTier(backend, mover or HostMover(backend, ReloadPool(0)), directories, **settings)
    try:
        yield tier
    finally:
        tier.close()
        backend.close()
