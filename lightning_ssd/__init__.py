"""Train models that do not fit: tensors that nobody needs right now wait on NVMe SSDs.

Importing the package registers ``Trainer(strategy="ssd_offload")``, ``Trainer(strategy="ssd_offload_fsdp")``,
``Fabric(strategy="ssd_offload")`` and the other names of :mod:`lightning_ssd.strategies.names`, with ``lightning`` and
with ``pytorch_lightning``.
"""

from lightning_ssd.callback import OffloadCallback
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.huggingface import OffloadTrainerMixin
from lightning_ssd.monitor import OffloadMonitor
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
from lightning_ssd.strategies.fsdp import SSDOffloadFSDPStrategy
from lightning_ssd.strategies.names import register as _register
from lightning_ssd.strategies.names import register_strategy
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = [
    "HardwareProfile",
    "OffloadCallback",
    "OffloadMonitor",
    "OffloadPolicy",
    "OffloadStats",
    "OffloadTrainerMixin",
    "Offloader",
    "SSDOffloadFSDPStrategy",
    "SSDOffloadFabricStrategy",
    "SSDOffloadStrategy",
    "register_strategy",
]

_register()
