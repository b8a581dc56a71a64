"""``Trainer(strategy="ssd_offload")``: wires Lightning's hooks to an :class:`~lightning_ssd.offloader.Offloader`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd.checkpoint import StreamedCheckpointIO
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.offloader import Offloader
from lightning_ssd.optimizer import OffloadedOptimizer
from lightning_ssd.parallel import GroupOptions, HookOptions, OneOrManyDevices, StartMethod
from lightning_ssd.signature import signature_of
from lightning_ssd.stats import OffloadStats

__all__ = ["SSDOffloadStrategy", "register"]


class SSDOffloadStrategy(OneOrManyDevices):
    """Trains with saved activations on SSD: bit for bit the same results, with less memory.

    One device needs no process group and no wrapper, and works in notebooks. Several devices or nodes train with
    ``DistributedDataParallel``; each process has its own files, in a sub-directory ``lightning_ssd-rank-<n>``. Files
    and threads live from ``setup`` to ``teardown`` of ``fit``; validation, test and prediction open nothing, because
    they save nothing.

    Example::

        trainer = L.Trainer(strategy="ssd_offload")
        trainer = L.Trainer(strategy=SSDOffloadStrategy(hardware=HardwareProfile(paths=["/mnt/nvme0", "/mnt/nvme1"])))

    Args:
        policy: what is moved; default: :class:`~lightning_ssd.config.OffloadPolicy` as it is.
        hardware: where to; default: ``$LIGHTNING_SSD_PATHS``, else the Trainer's ``default_root_dir``.
        accelerator: set by the Trainer; CPU and CUDA are supported.
        parallel_devices: set by the Trainer.
        cluster_environment: how processes find each other; default: detected.
        checkpoint_io: writes and reads checkpoints, which are ordinary ones; default: Lightning's.
        precision_plugin: set by the Trainer from ``precision``.
        process_group_backend: "nccl", "gloo"; default: by device. Like what follows, for several processes only.
        timeout: of the process group; default: the backend's own.
        start_method: "popen" runs the script once more for each process, "fork" works in notebooks too.
        ddp_comm_state: state for ``ddp_comm_hook``.
        ddp_comm_hook: replaces the gradient all-reduce, see ``DistributedDataParallel.register_comm_hook``.
        ddp_comm_wrapper: wraps that hook, for example to compress gradients.
        model_averaging_period: steps between averages for post-local SGD; needed with its ``ddp_comm_state``.
        find_unused_parameters: of ``DistributedDataParallel``, as are the following.
        static_graph: the graph is the same in every step.
        gradient_as_bucket_view: gradients live in the all-reduce buckets, which saves one copy of them.
        broadcast_buffers: rank zero's buffers overwrite the others' before each forward; default: PyTorch's.
        bucket_cap_mb: size of the all-reduce buckets in MiB; default: PyTorch's.
    """

    strategy_name = "ssd_offload"
    _offloader: Offloader | None = None
    _num_borders = 0

    def __init__(
        self,
        *,
        policy: OffloadPolicy | None = None,
        hardware: HardwareProfile | None = None,
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
        model_averaging_period: int | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        group = GroupOptions(process_group_backend, timeout, start_method)
        hook = HookOptions(ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper, model_averaging_period)
        ddp: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        if broadcast_buffers is not None:  # PyTorch 2.13 warns whoever passes this one at all
            ddp["broadcast_buffers"] = broadcast_buffers
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, group, hook, ddp
        )
        checked = Offloader(policy=policy, hardware=hardware)  # opens nothing
        self.policy, self.hardware = checked.policy, checked.hardware

    @property
    def offloader(self) -> Offloader | None:
        """``None`` before the first ``fit``, open while it runs, closed afterwards."""
        return self._offloader

    @property
    def stats(self) -> OffloadStats:
        """Counters of the present or last ``fit`` in this process."""
        return OffloadStats() if self._offloader is None else self._offloader.stats

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        default_directory = trainer.default_root_dir
        offloader = self._offloader = Offloader(
            policy=self.policy,
            hardware=self.hardware,
            device=self.root_device,
            default_directory=None if "://" in default_directory else default_directory,
            subdirectory=f"lightning_ssd-rank-{self.global_rank}",
            agree=self._smallest if self.is_distributed else None,
        )
        # Opened first, so that a directory that cannot serve is refused before the model is moved and optimizers are
        # built. Registered last: moving to the device and converting the precision make new parameter storages.
        offloader.open()
        super().setup(trainer)
        offloader.register_module(self.module)
        # Last: Lightning has moved the states to the device and looked at the optimizers' classes.
        self.optimizers = [offloader.offload_optimizer(optimizer) for optimizer in self.optimizers]
        self._warn_of_whole_compile()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.policy.optimizer_states == "offload" and type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = StreamedCheckpointIO()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.policy.optimizer_states == "keep":
            super().load_optimizer_state_dict(checkpoint)
            return
        # The base class would bring all states to the device.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _warn_of_whole_compile(self) -> None:
        name = _compiled_whole(self.module)
        if name is not None and self.policy.activations != "keep":
            rank_zero_warn(
                f"{name} is compiled as a whole: its backward asks for all saved tensors before its first operation, "
                "so that offloading saves little memory. Compile each block instead: "
                "for block in model.blocks: block.compile()",
                category=UserWarning,
            )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._offloader is None:
            raise RuntimeError(f"{type(self).__name__}.training_step before setup; call Trainer.fit")
        num_borders = self._num_borders
        with self._offloader.saved_tensors(signature=signature_of((args, kwargs), self.module)):
            output = super().training_step(*args, **kwargs)
        if not self.module.automatic_optimization and self._num_borders == num_borders:
            # Manual optimization may call loss.backward() itself, past us.
            self._end_backward(self._offloader)
        return output

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._offloader is not None:
            self._end_backward(self._offloader)
        return closure_loss

    def _smallest(self, values: Sequence[float]) -> list[float]:
        """Of each number the smallest that any process has, so that all plan alike."""
        if not self._has_group:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.root_device)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        return tensor.tolist()

    def _end_backward(self, offloader: Offloader) -> None:
        offloader.end_backward()
        self._num_borders += 1

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._offloader is not None:
            self._offloader.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            if self._offloader is not None:
                self._offloader.close()
        finally:
            # Lightning would bring the states to the CPU. Those on SSD are there, or lost with a step that failed.
            optimizers = self.optimizers
            self.optimizers = [o for o in optimizers if not isinstance(o, OffloadedOptimizer)]
            try:
                super().teardown()
            finally:
                self.optimizers = optimizers

    def __getstate__(self) -> dict[str, Any]:
        # Threads and files stay here; a process that is spawned opens its own in setup.
        return {**super().__getstate__(), "_offloader": None}

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make ``Trainer(strategy="ssd_offload")`` mean this class; again (after a reload) without an error."""
        for name in (cls.strategy_name, f"{cls.strategy_name}_activations"):
            _register(strategy_registry, name, cls, "saved activations wait on SSD")


def register() -> None:
    """Register the strategies' names with Lightning. Importing ``lightning_ssd`` does it."""
    SSDOffloadStrategy.register_strategies(StrategyRegistry)
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        # Not supported, but a Trainer of that package would call the name invalid and leave the user guessing.
        for name in (SSDOffloadStrategy.strategy_name, f"{SSDOffloadStrategy.strategy_name}_activations"):
            _register(other.StrategyRegistry, name, _refuse_pytorch_lightning, "see lightning.pytorch")


def _register(registry: _StrategyRegistry, name: str, strategy: Callable[..., Any], description: str) -> None:
    known = registry[name]["strategy"] if name in registry else strategy
    if (known.__module__, known.__qualname__) != (strategy.__module__, strategy.__qualname__):
        raise ConfigError(
            f"strategy name {name!r} belongs to {known.__module__}.{known.__qualname__} already; "
            f"allowed: only one of the two packages in one process"
        )
    registry.register(name, strategy, description=description, override=True)


def _refuse_pytorch_lightning() -> NoReturn:
    raise ConfigError(
        "this Trainer comes from pytorch_lightning, whose classes are not those of lightning; allowed: "
        "lightning.pytorch.Trainer. Write `import lightning as L` instead of `import pytorch_lightning`, everywhere"
    )


def _compiled_whole(module: pl.LightningModule) -> str | None:
    """The name of a compiled part that holds more than half of the parameters: then there is no block order left."""
    if module._compiler_ctx is not None:
        return type(module).__name__
    for name, child in module.named_modules():
        is_compiled = isinstance(child, OptimizedModule) or child._compiled_call_impl is not None
        if is_compiled and 2 * _num_parameters(child) > _num_parameters(module):
            return f"{type(module).__name__}.{name}" if name else type(module).__name__
    return None


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
