"""Train models that do not fit: offload tensors to NVMe SSDs between their uses.

Importing the package registers ``Trainer(strategy="ssd_offload")``, ``Trainer(strategy="ssd_offload_fsdp")``,
``Fabric(strategy="ssd_offload")`` and the other names of :mod:`lightning_ssd.strategies.names`, with ``lightning`` and
with ``pytorch_lightning``.
"""

import sys
import typing

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

_SCRIPT = "lightning_ssd_command"


def _is_command() -> bool:
    """Tell whether the program is our command line, which makes no Trainer: the script, or ``-m`` with our name.

    While Python looks for the module of ``-m``, it imports the package, and "-m" stands for the path of the program.
    """
    return _SCRIPT in sys.modules or (sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == __name__)


if typing.TYPE_CHECKING or not _is_command():
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

    _register()
else:

    def __getattr__(name: str) -> typing.Any:
        """Load everything for a user's model that ``lightning-ssd plan`` imports and that asks for a name of ours."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import reload

        sys.modules.pop(_SCRIPT, None)
        return getattr(reload(sys.modules[__name__]), name)
