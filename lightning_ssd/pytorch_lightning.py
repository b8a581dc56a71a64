"""The strategies for Trainers of ``pytorch_lightning`` and Fabrics of ``lightning_fabric``, to derive from.

To pass one, no other import is needed: these Trainers and Fabrics take the same names as those of ``lightning``
(``strategy="ssd_offload"``), and objects of the classes in ``lightning_ssd``. A class that a user derives needs the
right base::

    from lightning_ssd.pytorch_lightning import SSDOffloadStrategy
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from lightning_ssd._both_packages import SecondFinder

__all__ = ["SSDOffloadFSDPStrategy", "SSDOffloadFabricStrategy", "SSDOffloadStrategy"]

__path__: list[str] = []  # below are the modules of lightning_ssd.strategies, loaded a second time

if TYPE_CHECKING:
    from lightning_ssd.strategies.fabric import SSDOffloadFabricStrategy
    from lightning_ssd.strategies.fsdp import SSDOffloadFSDPStrategy
    from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
else:
    sys.meta_path.append(SecondFinder())

    def _second(module: str, name: str) -> type:
        first = getattr(import_module(f"lightning_ssd.strategies.{module}"), name)
        second = getattr(import_module(f"{__name__}.strategies.{module}"), name)
        first.register(second)  # so that isinstance(trainer.strategy, lightning_ssd.SSDOffloadStrategy) holds for both
        return second

    SSDOffloadFabricStrategy = _second("fabric", "SSDOffloadFabricStrategy")
    SSDOffloadFSDPStrategy = _second("fsdp", "SSDOffloadFSDPStrategy")
    SSDOffloadStrategy = _second("ssd_offload", "SSDOffloadStrategy")
