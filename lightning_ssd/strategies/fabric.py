"""``Fabric(strategy="ssd_offload")``: offload in a training loop of the user's own, with Lightning's Fabric.

Note: Where a pass begins
    In Fabric the user calls the model and computes the loss. So the ``forward`` of each module that ``fabric.setup``
    returns is replaced (``forward_context.py``) by one that enters ``offloader.saved_tensors()``. Tensors that the loss
    saves outside of it stay in memory; backward needs these first. ``strategy.saved_tensors()`` covers more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies._lightning_compat import become_one_device, stands_for_base_backward
from lightning_ssd.strategies.batch_signature import signature_of
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from lightning_ssd.strategies.forward_context import ForwardContextPatch
from lightning_ssd.strategies.one_trainer import one_trainer
from lightning_ssd.strategies.processes import (
    StartMethod,
    check_launch,
    check_model,
    check_start_method,
    ddp_arguments,
)
from lightning_ssd.strategies.session import OffloadSession, check_options
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["SSDOffloadFabricStrategy"]


@one_trainer("Fabric")
class SSDOffloadFabricStrategy(DDPStrategy):
    """Trains with saved activations on SSD, in the user's own loop: bit for bit the same results, with less memory.

    One device needs neither ``fabric.launch()`` nor a process group; several train with ``DistributedDataParallel``.
    Files and threads are opened by the first setup of an optimizer, or the first forward with gradients. They live
    until :meth:`close`, or the end of the process or of the strategy. Without gradients nothing is opened.

    Example::

        fabric = Fabric(strategy="ssd_offload")
        model, optimizer = fabric.setup(model, optimizer)
        with fabric.strategy:  # optional: closes at the end
            for batch in data:
                loss = compute_loss(model(batch))
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                fabric.log_dict(fabric.strategy.offloader.drain_metrics())

    Args:
        policy: says what is offloaded; default: ``OffloadPolicy()``.
        hardware: says where to; default: ``$LIGHTNING_SSD_PATHS``, else the current directory.
        precision: set by Fabric. Others are those of :class:`~lightning_ssd.strategies.ssd_offload.SSDOffloadStrategy`.
    """

    strategy_name = "ssd_offload"
    description = "saved activations are offloaded to SSD"
    """Description of the name in Fabric's registry."""
    is_sharded = False

    def __init__(
        self,
        policy: OffloadPolicy | None = None,
        *,
        hardware: HardwareProfile | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: StartMethod = "popen",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        check_start_method(self, start_method)
        ddp = ddp_arguments(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb,
        )
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision,
            process_group_backend,
            timeout,
            start_method,
            **ddp,
        )
        self.policy, self.hardware = check_options(policy, hardware)
        self._session: OffloadSession | None = None
        self._stand_ins: list[ForwardContextPatch] = []
        self._is_closed = False
        self._is_setting_up = False
        self._has_seen_forward = False
        self._num_passes = 0
        self._num_ended = 0

    # -- the life of the offloader -------------------------------------------------------------------------------

    @property
    def offloader(self) -> Offloader | None:
        """The offloader; ``None`` before it is first opened, closed after :meth:`close`."""
        return None if self._session is None else self._session.offloader

    @property
    def stats(self) -> OffloadStats:
        return OffloadStats() if self.offloader is None else self.offloader.stats

    def _opened(self) -> Offloader:
        if self._session is None:
            # Processes agree in setup only. Later there is no common point: one process may accumulate over more
            # batches than another, and would wait for it for ever. So each process plans with its own rates.
            self._session = OffloadSession(self, default_directory=Path.cwd(), meets_others=lambda: self._is_setting_up)
            self._session.close_with_process()
        offloader = self._session.offloader
        if not offloader.is_open:
            offloader.open(*(stood.module for stood in self._stand_ins if stood.module is not None))
        return offloader

    def close(self) -> None:
        """Join the threads, close the files, give the modules their ``forward`` back. Idempotent.

        Modules still work, without offloading. Optimizers with states on SSD can no longer step, but their
        ``state_dict`` works. A later ``fabric.setup`` opens new files and threads.

        Raises:
            StorageError: a read had failed for good; the thread that waited for it has seen the same error.
        """
        self._is_closed = True
        for stood in self._stand_ins:
            stood.remove()
        self._stand_ins.clear()
        if self.offloader is not None:
            self.offloader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None and self.offloader is not None:
            self.offloader.abort()
        self.close()

    @override
    def teardown(self) -> None:
        try:
            self.close()
        finally:
            super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Threads and files are not pickled; a process that is spawned opens its own.
        return {**self.__dict__, "_session": None, "_stand_ins": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copied module of fabric.setup (for moving averages) belongs to the same process and devices.
        return self

    # -- from Fabric's construction to setup ---------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        return self.num_nodes * self.num_processes > 1

    @override
    def _set_world_ranks(self) -> None:
        # With one device the launcher (torchrun, SLURM) may have started more processes, each of which trains alone.
        if self.is_distributed:
            super()._set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        check_launch(self, "Fabric", (self.parallel_devices or [torch.device("cpu")])[0])
        has_waiting = self.policy.optimizer_states != "keep" or self.policy.parameters != "keep"
        if has_waiting and self._checkpoint_io is None:
            self.checkpoint_io = StreamedCheckpointIO()
        if not self.is_distributed:
            become_one_device(self)
            return
        super()._configure_launcher()

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # one device needs no wrapper
        self._is_closed = False
        check_model(self, module)
        wrapped = self._wrapped(module) if self.is_distributed else module
        self._stand_ins = [stood for stood in self._stand_ins if stood.module is not None]
        if all(stood.module is not wrapped for stood in self._stand_ins):
            self._stand_ins.append(ForwardContextPatch(wrapped, self._around_forward))
        if self.offloader is not None and self.offloader.is_open:
            self.offloader.register_module(wrapped)
        elif self.policy.parameters != "keep":
            self._opened()
        return wrapped

    @override
    def module_to_device(self, module: nn.Module) -> None:
        if self.policy.parameters != "keep":
            self._opened().move_in(module)
        super().module_to_device(module)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        with nullcontext() if self.offloader is None else self.offloader.host_copies():
            return super().get_module_state_dict(module)

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(super().module_init_context(empty_init))
        if self.policy.parameters != "keep":
            stack.enter_context(self._opened().streamed_init())
        return stack

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        if self.offloader is not None:
            self.offloader.send_out_weights()

    def _wrapped(self, module: nn.Module) -> nn.Module:
        # On the current stream, as in the strategy for the Trainer. Lightning uses a stream of its own.
        return DistributedDataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._is_closed, self._is_setting_up = False, True
        try:
            return self._opened().offload_optimizer(optimizer)
        finally:
            self._is_setting_up = False

    # -- in the training loop ------------------------------------------------------------------------------------

    @contextmanager
    def saved_tensors(self, *, signature: Hashable = None) -> Iterator[None]:
        """Return a context for more than one module's ``forward``, in which all saved tensors are offloaded.

        For example for a large loss, or a method that does not call ``forward``. Modules called inside begin no pass of
        their own. It does nothing if saved-tensor hooks are already installed, or cannot be, or after :meth:`close`.

        Args:
            signature: names the kind of step, see :meth:`Offloader.saved_tensors`.

        Raises:
            BudgetError: on entry: a budget of the policy cannot be kept by any plan for this model and batch.
            StorageError: on first entry: a directory cannot serve, or is full.
        """
        self._has_seen_forward = True
        if self._is_closed or not _may_install():
            yield
            return
        with self._opened().saved_tensors(signature=signature):
            self._num_passes += 1
            yield

    def _around_forward(self, module: nn.Module, arguments: Any) -> AbstractContextManager[None] | None:
        self._has_seen_forward = True  # also without gradients, as a checkpoint first runs the model
        if not torch.is_grad_enabled() or self._is_closed or not _may_install():
            return None
        # With the module's id, because two models may get batches of the same shape.
        return self.saved_tensors(signature=(id(module), signature_of(arguments, module)))

    # Fabric refuses loss.backward() if a strategy overrides backward. Here optimizer_step() ends such a backward.
    @override
    @stands_for_base_backward
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        self._warn_if_past_us()
        super().backward(tensor, module, *args, **kwargs)
        self._end_backward()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self._num_ended < self._num_passes:  # the program has called loss.backward()
            self._end_backward()
        return super().optimizer_step(optimizer, **kwargs)

    def _end_backward(self) -> None:
        self._num_ended = self._num_passes
        if self.offloader is not None and self.offloader.is_open:
            self.offloader.end_backward()

    def _warn_if_past_us(self) -> None:
        if self._has_seen_forward or self._is_closed or self.policy.activations == "keep":
            return
        self._has_seen_forward = True  # once is enough
        rank_zero_warn(
            "fabric.backward() comes before any forward of a module that fabric.setup() returned, so that nothing was "
            "offloaded. Call the module itself, or put what computes the loss into "
            "`with fabric.strategy.saved_tensors():`",
            category=UserWarning,
        )


def _may_install() -> bool:
    """Return whether a pass may begin here.

    Hooks that the program has installed around the forward (a checkpoint, ``save_on_cpu``, another pass) have to get
    the saved tensors. Transforms of ``torch.func`` and ``disable_saved_tensors_hooks`` refuse hooks. A forward inside a
    backward is a recomputation, whose saved tensors are needed at once.
    """
    autograd: Any = torch._C._autograd  # two of the following are in no stub
    return (
        autograd._saved_tensors_hooks_is_enabled()
        and autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._current_autograd_node() is None
    )
