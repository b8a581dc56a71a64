"""Train models that do not fit: tensors that nobody needs right now wait on NVMe SSDs.

Importing the package registers ``Trainer(strategy="ssd_offload")``, ``Trainer(strategy="ssd_offload_fsdp")`` and
``Fabric(strategy="ssd_offload")``.
"""

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.monitor import OffloadMonitor
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from lightning_ssd.strategies.fabric import register as _register_fabric
from lightning_ssd.strategies.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from lightning_ssd.strategies.ssd_offload import register as _register
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = [
    "HardwareProfile",
    "OffloadMonitor",
    "OffloadPolicy",
    "OffloadStats",
    "Offloader",
    "SSDOffloadFSDPStrategy",
    "SSDOffloadFabricStrategy",
    "SSDOffloadStrategy",
]

_register()
_register_fabric()
