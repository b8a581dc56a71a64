"""Connect an :class:`~lightning_ssd.offloader.Offloader` to a strategy for the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch._dynamo.eval_frame import OptimizedModule
from typing_extensions import override

from lightning_ssd.activations.dtensor_hooks import unwrapped_within
from lightning_ssd.common.validation import expect
from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies._lightning_compat import is_compiled_by_lightning
from lightning_ssd.strategies.batch_signature import signature_of
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from lightning_ssd.strategies.default_monitor import DefaultMonitor
from lightning_ssd.strategies.one_trainer import one_trainer
from lightning_ssd.strategies.session import FitSession, check_options, offloaded, offloaded_optimizers_hidden
from lightning_ssd.strategies.single_or_ddp import WithModule
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["OffloadMixin"]


@one_trainer("Trainer")
class OffloadMixin(WithModule):
    """Adds offloading to a strategy of Lightning that follows it among the bases of a class.

    Files and threads live from ``setup`` to ``teardown`` of ``fit``. Forwards run inside ``saved_tensors``, and
    backwards end with ``end_backward``.
    """

    strategy_name: str
    description: str
    """Description of the name in Lightning's registry."""
    is_sharded = False
    """Whether processes have shards of the model, not the whole model."""

    def __init__(
        self,
        policy: OffloadPolicy | None,
        hardware: HardwareProfile | None,
        log_metrics: bool,
        *others: Any,
    ) -> None:
        super().__init__(*others)
        self.policy, self.hardware = check_options(policy, hardware)
        expect(f"{type(self).__name__}.log_metrics", log_metrics, bool, "True or False")
        self._monitor = DefaultMonitor() if log_metrics else None
        self._session: FitSession | None = None

    @property
    def offloader(self) -> Offloader | None:
        """The offloader: ``None`` before the first ``fit``, open while it runs, closed afterwards."""
        return None if self._session is None else self._session.offloader

    @property
    def stats(self) -> OffloadStats:
        """Counters of the present or last ``fit`` in this process."""
        return OffloadStats() if self.offloader is None else self.offloader.stats

    # -- from setup to teardown ----------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not is_fitting and self.policy.parameters == "keep":
            super().setup(trainer)
            return
        session = self._begun_session(trainer)
        offloader = session.offloader
        # Opened first, so that a directory that cannot serve is refused before the model is moved and optimizers are
        # built. Registered last: moving to the device and converting the precision make new parameter storages.
        offloader.open()
        with offloader.streamed_init() if self.is_sharded else nullcontext():  # parameters on meta get memory here
            super().setup(trainer)
        offloader.register_module(self.module)
        if not is_fitting:
            return  # no pass has a backward
        # Last: Lightning has moved the states to the device and looked at the optimizers' classes.
        self.optimizers = [offloaded(optimizer, offloader) for optimizer in self.optimizers]
        self._warn_of_whole_compile()
        if self._monitor is not None:
            self._monitor.attach(trainer)
        session.is_set_up = True

    def _begun_session(self, trainer: pl.Trainer) -> FitSession:
        """Return the session that building the model has begun, else a new one."""
        if self._session is None or not self._session.offloader.is_open:
            self._session = FitSession(
                self,
                trainer,
                # With manual optimization one process may run more backwards than another, and would wait for it for
                # ever. So each process plans by itself then.
                meets_others=lambda: self.module.automatic_optimization,
            )
        return self._session

    # Not model_sharded_context: Trainer.init_module() warns if a strategy overrides it.
    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        module = self.lightning_module
        with super().tensor_init_context(empty_init):
            if self.policy.parameters == "keep" or module is None:  # there is no module in Trainer.init_module()
                yield
                return
            with self._begun_session(module.trainer).offloader.open().streamed_init():
                yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with nullcontext() if self.offloader is None else self.offloader.host_copies():
            return super().lightning_module_state_dict()

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        if self.offloader is not None:
            self.offloader.send_out_weights()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        streams = self.policy.optimizer_states != "keep" or self.policy.parameters != "keep"
        if streams and type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = StreamedCheckpointIO()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.policy.optimizer_states == "keep" or not self.lightning_restore_optimizer:
            super().load_optimizer_state_dict(checkpoint)
            return
        # The base class would bring all states to the device.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self.offloader is not None:
            self.offloader.abort()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        try:
            if self._session is not None:
                self._session.is_set_up = False
                self._session.offloader.close()
        finally:
            with offloaded_optimizers_hidden(self):
                super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # Threads and files are not pickled; a process that is spawned opens its own in setup.
        return {**super().__getstate__(), "_session": None}

    def _warn_of_whole_compile(self) -> None:
        name = _compiled_whole(self.module)
        if name is not None and self.policy.activations != "keep":
            rank_zero_warn(
                f"{name} is compiled as a whole: its backward asks for all saved tensors before its first operation, "
                "so that offloading saves little memory. Compile each block instead: "
                "for block in model.blocks: block.compile()",
                category=UserWarning,
            )

    # -- in a step -----------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        session = self._session
        if session is None or not session.is_set_up:
            if self.lightning_module is None:
                raise RuntimeError(f"{type(self).__name__}.training_step before setup; call Trainer.fit")
            return super().training_step(*args, **kwargs)  # after fit nothing is offloaded
        num_borders = session.num_borders
        saving = session.offloader.saved_tensors(signature=signature_of((args, kwargs), self.module))
        shards = unwrapped_within(saving) if self.is_sharded else nullcontext()
        with session.translated(), saving, shards:
            output = super().training_step(*args, **kwargs)
        if not self.module.automatic_optimization and session.num_borders == num_borders:
            # Manual optimization may call loss.backward() itself, without post_backward().
            session.end_backward()
        return output

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        # The last call in Lightning's backward. That itself is not overridden, since a wrapper of it expects one call.
        super().post_backward(closure_loss)
        if self._session is not None and self._session.is_set_up:
            self._session.end_backward()


def _compiled_whole(module: pl.LightningModule) -> str | None:
    """Return the name of a compiled part with more than half of the parameters, in which blocks have no order left."""
    if is_compiled_by_lightning(module):
        return type(module).__name__
    half = sum(parameter.numel() for parameter in module.parameters()) / 2
    for name, child in module.named_modules():
        is_compiled = isinstance(child, OptimizedModule) or child._compiled_call_impl is not None
        if is_compiled and sum(parameter.numel() for parameter in child.parameters()) > half:
            return f"{type(module).__name__}.{name}" if name else type(module).__name__
    return None
