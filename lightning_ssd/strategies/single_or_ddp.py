"""Train one device without a wrapper, and several processes with DistributedDataParallel. Contains no offloading.

Note: Why not Lightning's DDPStrategy
    Lightning tests ``isinstance(strategy, DDPStrategy)`` to know whether a run is distributed. A subclass always is,
    also with one device. Its samplers are replaced (which gives another order of the data, and other losses), the
    batch-size finder refuses it, and it needs a process group. Therefore this is a ``ParallelStrategy`` that answers
    ``is_distributed`` by its number of processes, and wraps the module only if there are several.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ssd.strategies import _lightning_compat as compat
from lightning_ssd.strategies.processes import StartMethod

__all__ = ["SingleOrDDPStrategy", "WithModule"]

_T = TypeVar("_T")


class WithModule(ParallelStrategy):
    """Properties of strategies that describe their module and processes."""

    num_nodes: int

    @property
    def module(self) -> pl.LightningModule:
        if self.lightning_module is None:
            raise RuntimeError(f"{type(self).__name__} has no LightningModule yet; it gets one from Trainer.fit")
        return self.lightning_module

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process. Lightning reads it, too."""
        return self.num_nodes * self.num_processes > 1


class SingleOrDDPStrategy(WithModule):
    """Data parallel training with as little machinery as the number of processes needs."""

    # Set by the constructor of the class that has these arguments.
    process_group_backend: str | None
    _timeout: timedelta | None
    _start_method: StartMethod
    _hook: tuple[object | None, Callable[..., Any] | None, Callable[..., Any] | None]
    _ddp_arguments: dict[str, Any]

    num_nodes = 1
    _static_graph_started = False
    _fitting = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._forward_redirection = compat.DDPForwardRedirection()

    # -- who and where -------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        if not self.parallel_devices:
            raise RuntimeError(f"{type(self).__name__} has no device yet; it gets one from the Trainer")
        return self.parallel_devices[self.local_rank]

    # With one device the launcher (torchrun, SLURM) may have started more processes, each of which trains alone.

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self.is_distributed else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self.is_distributed else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self.is_distributed else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self.is_distributed else 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the ranks of this process in the cluster environment. Called by the Trainer, and in each process."""
        if self.is_distributed and self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- from the Trainer's construction to teardown --------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        if self.is_distributed and self.cluster_environment is not None:
            self._launcher = compat.make_launcher(
                self, self.cluster_environment, self._start_method, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if not self.is_distributed or self.cluster_environment is None:
            return
        reset_seed()
        self.set_world_ranks()
        device = self.root_device
        backend = self.process_group_backend or compat.default_backend(device)
        self.process_group_backend = backend
        compat.start_process_group(self.cluster_environment, backend, self._timeout, device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        if self._syncs_layers and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.module)
        super().setup(trainer)

    @property
    def _syncs_layers(self) -> bool:
        return self._fitting and self.is_distributed

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    @override
    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if not self.is_distributed:
            return model
        if not self._fitting:
            compat.sync_module_states(model)
            return model
        # On the current stream: DDP makes the nodes that accumulate gradients, which run on the stream of their making.
        # If backward has another stream, each gradient costs a wait across streams (and PyTorch warns).
        device_ids = None if self.root_device.type == "cpu" else [self.root_device.index]
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._ddp_arguments)
        compat.register_comm_hook(wrapped, *self._hook)
        return wrapped

    @override
    def teardown(self) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        if self._syncs_layers and self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        self._fitting = False
        super().teardown()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        compat.explain(
            exception,
            pattern=".*Expected to have finished reduction in the prior iteration.*",
            new_message=(
                "Some parameters took no part in the loss that training_step returned. If that is intended, pass "
                f"strategy={type(self).__name__}(find_unused_parameters=True) to the Trainer."
            ),
        )

    # -- in a step -----------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        # In manual optimization the forward ran with gradient sync off, so that DDP has not prepared itself.
        if isinstance(self.model, DistributedDataParallel) and not self.module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        model = self.model
        if not isinstance(model, DistributedDataParallel) or self.module.automatic_optimization:
            return
        if model.static_graph and not self._static_graph_started:
            # A static graph delays its first all-reduce to the end of a backward that DDP itself prepared.
            model.reducer._delay_all_reduce()  # type: ignore[attr-defined]
            self._static_graph_started = True

    # -- between processes ---------------------------------------------------------------------------------------

    @property
    def _has_group(self) -> bool:
        return self.is_distributed and torch.distributed.is_available() and torch.distributed.is_initialized()

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._has_group:
            return
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        objects = [obj]
        if self._has_group:
            torch.distributed.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(
        self, tensor: torch.Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> torch.Tensor | Any:
        if self._has_group and isinstance(tensor, torch.Tensor):
            return compat.reduce_over_processes(tensor, group, reduce_op=reduce_op)
        return tensor

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._has_group else tensor


compat.allow_compiled_modules(SingleOrDDPStrategy)
