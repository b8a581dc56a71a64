"""Train models that do not fit: tensors that nobody needs right now wait on NVMe SSDs.

Importing the package registers ``Trainer(strategy="ssd_offload")``, ``Trainer(strategy="ssd_offload_fsdp")`` and
``Fabric(strategy="ssd_offload")``.
"""

from lightning_ssd.callback import OffloadMonitor
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.fabric import SSDOffloadFabricStrategy
from lightning_ssd.fabric import register as _register_fabric
from lightning_ssd.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.offloader import Offloader
from lightning_ssd.stats import OffloadStats
from lightning_ssd.strategy import SSDOffloadStrategy
from lightning_ssd.strategy import register as _register

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
