"""``Trainer(strategy="ssd_offload")``: train with one device, or with several processes that have the whole model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies._lightning_compat import is_named
from lightning_ssd.strategies.mixin import OffloadMixin
from lightning_ssd.strategies.processes import (
    StartMethod,
    check_launch,
    check_model,
    check_start_method,
    ddp_arguments,
)
from lightning_ssd.strategies.single_or_ddp import SingleOrDDPStrategy

__all__ = ["SSDOffloadStrategy"]


class SSDOffloadStrategy(OffloadMixin, SingleOrDDPStrategy):
    """Trains with saved activations on SSD: bit for bit the same results, with less memory.

    One device needs no process group and no wrapper, and works in notebooks. Several devices or nodes train with
    ``DistributedDataParallel``; each process has its own files.
    Files and threads live from ``setup`` to ``teardown`` of ``fit``; validation, test and prediction open nothing,
    because they save nothing.

    Example::

        trainer = L.Trainer(strategy="ssd_offload")
        trainer = L.Trainer(strategy=SSDOffloadStrategy(hardware=HardwareProfile(paths=["/mnt/nvme0", "/mnt/nvme1"])))

    Args:
        policy: says what is offloaded; default: ``OffloadPolicy()``.
        hardware: says where to; default: ``$LIGHTNING_SSD_PATHS``, else the Trainer's ``default_root_dir``.
        log_metrics: give the numbers of :data:`~lightning_ssd.telemetry.metrics.METRICS` to the Trainer's loggers, and
            print the verdict, also if no :class:`~lightning_ssd.monitor.OffloadMonitor` is among the callbacks.
        accelerator: set by the Trainer; CPU and CUDA are supported.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; default: detected.
        checkpoint_io: writes and reads checkpoints, which are ordinary ones; default: Lightning's.
        precision_plugin: set by the Trainer from ``precision``.
        process_group_backend: "nccl", "gloo"; default: by device. This and the following are for several processes.
        timeout: timeout of the process group; default: the backend's own.
        start_method: "popen" runs the script again for each process; "fork" also works in notebooks.
        ddp_comm_state: state for ``ddp_comm_hook``.
        ddp_comm_hook: replaces the gradient all-reduce, see ``DistributedDataParallel.register_comm_hook``.
        ddp_comm_wrapper: wraps that hook, for example to compress gradients.
        find_unused_parameters: argument of ``DistributedDataParallel``, as are the following.
        static_graph: the graph is the same in every step.
        gradient_as_bucket_view: gradients live in the all-reduce buckets, which saves one copy of them.
        broadcast_buffers: rank zero's buffers overwrite the others' before each forward; default: PyTorch's.
        bucket_cap_mb: size of the all-reduce buckets in MiB; default: PyTorch's.
    """

    strategy_name = "ssd_offload"
    description = "saved activations are offloaded to SSD"

    def __init__(
        self,
        policy: OffloadPolicy | None = None,
        *,
        hardware: HardwareProfile | None = None,
        log_metrics: bool = True,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod = "popen",
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(
            policy,
            hardware,
            log_metrics,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        check_start_method(self, start_method)
        if is_named(ddp_comm_state, "PostLocalSGDState"):
            raise ConfigError(
                f"{type(self).__name__}.ddp_comm_state is a PostLocalSGDState, and this strategy averages no models "
                "between steps, as post-local SGD has to. Use another hook, or Lightning's DDPStrategy"
            )
        self.process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._hook = ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper
        self._ddp_arguments = ddp_arguments(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
        )

    @override
    def _configure_launcher(self) -> None:
        check_launch(self, "Trainer", self.root_device)
        super()._configure_launcher()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        if trainer.state.fn == TrainerFn.FITTING and module is not None:
            check_model(self, module)
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        if self.policy.parameters != "keep" and self.offloader is not None and self.offloader.is_open:
            self.offloader.move_in(self.module)
        super().model_to_device()
