"""``Trainer(strategy="ssd_offload_fsdp")``: train sharded models (FSDP2, tensor parallelism) with offloaded tensors."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.strategies.mixin import OffloadMixin
from lightning_ssd.strategies.session import refuse_master_weights

__all__ = ["SSDOffloadFSDPStrategy"]

Size = int | Literal["auto"]
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


class SSDOffloadFSDPStrategy(OffloadMixin, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with tensors offloaded to SSD: bit for bit the same results.

    The module's ``configure_model`` shards it over ``self.device_mesh`` (dimensions ``"data_parallel"`` and
    ``"tensor_parallel"``), with ``fully_shard``, ``parallelize_module`` or both. Each process offloads its own tensors:
    the activations of its batch, and its shards of the optimizer's states; on a CPU also its shards of weights and
    gradients. Parameters that FSDP2 has gathered are recognised, and not offloaded.

    Example::

        class Sharded(L.LightningModule):
            def configure_model(self):
                for block in self.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        trainer = L.Trainer(strategy="ssd_offload_fsdp", devices=8)

    Args:
        policy: says what is offloaded; default: ``OffloadPolicy()``. ``master_weights=True`` is refused, because
            ``fully_shard`` with a ``MixedPrecisionPolicy`` keeps float32 shards by itself.
        hardware: says where to; default: ``$LIGHTNING_SSD_PATHS``, else the Trainer's ``default_root_dir``.
        log_metrics: log as an :class:`~lightning_ssd.monitor.OffloadMonitor` does if there is none.
        data_parallel_size: number of processes that the batch is spread over; "auto": all processes, divided by
            ``tensor_parallel_size``.
        tensor_parallel_size: number of processes that share each layer; "auto": all processes, divided by
            ``data_parallel_size``. Both "auto": as in Lightning, the number of nodes and the devices of a node.
        save_distributed_checkpoint: each process writes its shards into a directory. ``False``: rank zero collects the
            full weights and states, which have to fit into its memory, and writes one file. On a GPU that is refused
            with ``optimizer_states="offload"``.
        timeout: timeout of the process group; default: Lightning's own. Others are those of
            :class:`~lightning_ssd.strategies.ssd_offload.SSDOffloadStrategy`.

    Raises:
        ConfigError: a size is not "auto" or a whole number above 0, or the policy has ``master_weights=True``. The
            Trainer raises it if the sizes do not multiply to the number of processes.
    """

    strategy_name = "ssd_offload_fsdp"
    description = "saved activations of a sharded model are offloaded to SSD"
    is_sharded = True

    def __init__(
        self,
        policy: OffloadPolicy | None = None,
        *,
        hardware: HardwareProfile | None = None,
        log_metrics: bool = True,
        data_parallel_size: Size = "auto",
        tensor_parallel_size: Size = 1,
        save_distributed_checkpoint: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        _check_size("data_parallel_size", data_parallel_size)
        _check_size("tensor_parallel_size", tensor_parallel_size)
        super().__init__(
            policy,
            hardware,
            log_metrics,
            data_parallel_size,
            tensor_parallel_size,
            save_distributed_checkpoint,
            process_group_backend,
            timeout,
        )
        self._accelerator = accelerator
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        if precision_plugin is not None:
            self.precision_plugin = precision_plugin
        self._wanted_sizes = data_parallel_size, tensor_parallel_size
        refuse_master_weights(type(self).__name__, self.policy)

    @override
    def _configure_launcher(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = _sizes(
            type(self).__name__, *self._wanted_sizes, self.num_nodes, self.num_processes
        )
        # Lightning checks this itself where it was given an object, not a name.
        if self.precision_plugin.precision not in _PRECISIONS:
            raise ConfigError(
                f"{type(self).__name__} got precision={self.precision_plugin.precision!r}, which Lightning does not "
                f"offer with FSDP2. Pass one of {', '.join(map(repr, _PRECISIONS))} to the Trainer"
            )
        device = self.root_device
        if device.type != "cpu" and self.policy.optimizer_states != "keep" and not self._save_distributed_checkpoint:
            raise ConfigError(
                f"{type(self).__name__} got save_distributed_checkpoint=False and OffloadPolicy.optimizer_states="
                f"{self.policy.optimizer_states!r} on {str(device)!r}: the states wait in files, from which PyTorch "
                "collects no full ones. Write save_distributed_checkpoint=True; python -m "
                "lightning.pytorch.utilities.consolidate_checkpoint DIRECTORY makes one file of what it saves"
            )
        if device.type != "cpu" and self.policy.parameters != "keep":
            raise ConfigError(
                f"{type(self).__name__} got OffloadPolicy.parameters={self.policy.parameters!r} on {str(device)!r}, "
                "and shards of weights can only be offloaded from a CPU so far. Write parameters='keep'; or offload "
                "the weights of one device with SSDOffloadStrategy"
            )
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        import torch.distributed.fsdp  # noqa: F401  # so that its shards are seen, also if the program imports it later

        super().setup_environment()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        # PyTorch writes the shards without progress reports, so that the line is drawn at once.
        doing = "Saving a checkpoint" if self.policy.optimizer_states == "offload" else None
        with StatusLine(doing, delay_s=0):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not any(isinstance(optimizer, OffloadedOptimizer) for optimizer in self.optimizers):
            return super().load_checkpoint(checkpoint_path, weights_only)
        # Imported here, because that takes long, and few runs begin with a checkpoint.
        from lightning_ssd.optimizer.checkpoint.sharded import saved_in_directory, saved_in_full

        path = Path(self.broadcast(checkpoint_path))
        optimizers, self.optimizers = self.optimizers, []  # the base class would bring all states into memory
        try:
            checkpoint = super().load_checkpoint(path, weights_only)
        finally:
            self.optimizers = optimizers
        for number, optimizer in enumerate(optimizers):
            if path.is_dir():
                states = saved_in_directory(path, number, self.module, optimizer)
            else:
                states = saved_in_full(checkpoint, path, number, self.module, optimizer)
            optimizer.load_state_dict(states)
        return checkpoint


def _check_size(name: str, size: object) -> None:
    if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigError(f'{name}={size!r} is no size. Write "auto", or a whole number above 0')


def _sizes(owner: str, data: Size, tensor: Size, num_nodes: int, num_devices: int) -> tuple[int, int]:
    """Return the sizes of the device mesh."""
    world_size = num_nodes * num_devices
    if data == "auto" and tensor == "auto":
        return num_nodes, num_devices
    data_size = world_size // tensor if data == "auto" and tensor != "auto" else data
    tensor_size = world_size // data if tensor == "auto" and data != "auto" else tensor
    if data_size == "auto" or tensor_size == "auto" or data_size * tensor_size != world_size:
        raise ConfigError(
            f"{owner} got data_parallel_size={data!r} and tensor_parallel_size={tensor!r} with {num_nodes} x "
            f"{num_devices} processes (nodes x devices), and the product of the sizes has to be {world_size}. Write "
            '"auto" for one of them, or give the Trainer other devices'
        )
    return data_size, tensor_size
