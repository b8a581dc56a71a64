"""``OffloadTrainerMixin``: the Trainer of ``transformers`` offloads saved activations and optimizer states."""

from __future__ import annotations

import warnings
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.offloader import Offloader
from lightning_ssd.optimizer.offloaded_optimizer import OffloadedOptimizer
from lightning_ssd.strategies.batch_signature import signature_of
from lightning_ssd.strategies.session import refuse_weights
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["OffloadTrainerMixin"]


class OffloadTrainerMixin:
    """Makes a ``transformers.Trainer`` move what training does not need now: bit for bit the same.

    Saved activations leave in the forward of ``training_step`` and return for its backward, also with
    ``gradient_checkpointing=True`` (the inputs of blocks move) and with accumulation. Optimizer states wait between
    updates. Files and threads live as long as ``train()``; afterwards ``trainer.optimizer`` is plain again, with
    its states. Evaluation is as it is. The numbers join what the Trainer logs.

    Weights and gradients are not moved here, and neither are Accelerate's FSDP, DeepSpeed and ``DataParallel``
    served: ``train()`` refuses these before its first step.

    Example::

        class Trainer(lightning_ssd.OffloadTrainerMixin, transformers.Trainer):
            policy = lightning_ssd.OffloadPolicy(activations="offload", optimizer_states="offload")
            hardware = lightning_ssd.HardwareProfile(paths=["/mnt/nvme0"])

        Trainer(model=model, args=args, train_dataset=data).train()
    """

    policy: OffloadPolicy = OffloadPolicy()
    """Settings of what moves; set it in the class or on the Trainer before ``train()``."""
    hardware: HardwareProfile = HardwareProfile()
    """Where to; without ``paths``: ``$LIGHTNING_SSD_PATHS``, else ``args.output_dir``."""
    offloader: Offloader | None = None
    """``None`` before ``train()``, open while it runs, closed afterwards."""
    _signature: Any = None
    """The kind of the step under way, until its backward has ended."""
    _offloaded: OffloadedOptimizer | None = None
    """The optimizer of the present or last ``train()``, where its states wait."""
    _is_registered: bool = False
    """Whether this ``train()`` has come by :meth:`create_optimizer`."""
    _num_steps: int = 0
    """Calls of :meth:`training_step` in the present or last ``train()``."""

    # Attributes of transformers.Trainer, which comes later in the method resolution order.
    args: Any
    model: Any
    optimizer: Any
    callback_handler: Any
    state: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a class in which ``Trainer`` comes first, so that no method of ours would be called.

        Raises:
            ConfigError: the order of the bases is the wrong one.
        """
        super().__init_subclass__(**kwargs)
        first = cls.__mro__[: cls.__mro__.index(OffloadTrainerMixin)]
        trainer = next((base for base in first if base.__module__.startswith("transformers.")), None)
        if trainer is not None:
            raise ConfigError(
                f"class {cls.__name__} has {trainer.__name__} before OffloadTrainerMixin, so that nothing would be "
                f"offloaded. Write class {cls.__name__}(OffloadTrainerMixin, {trainer.__name__})"
            )

    @property
    def stats(self) -> OffloadStats:
        """Counters of the present or last ``train()`` in this process."""
        return OffloadStats() if self.offloader is None else self.offloader.stats

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does, with tensors that wait elsewhere.

        Raises:
            ConfigError: the policy moves weights or gradients, or the Trainer shards or copies its model, or has a
                ``create_optimizer`` that does not call ours.
            RuntimeError: an earlier ``train()`` ended in the middle of an update whose states waited.
            StorageError: a directory cannot serve, or is full.
        """
        self._refuse()
        offloader = Offloader(
            policy=self.policy,
            hardware=self.hardware,
            device=self.args.device,
            default_directory=self.args.output_dir,
        )
        self.offloader, self._offloaded, self._is_registered, self._num_steps = offloader, None, False, 0
        begun_at = self.state.global_step
        try:
            with offloader:
                output = super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._hand_back()
        if not self._num_steps and self.state.global_step > begun_at:
            warnings.warn(
                f"{type(self).__name__}.training_step does not call super().training_step(), so that no saved "
                "activation was offloaded. Call it there",
                stacklevel=2,
            )
        return output

    def _hand_back(self) -> None:
        """Put the plain optimizer where the other one was.

        One whose update was interrupted stays: it refuses further steps and checkpoints, and the plain one would not.
        """
        offloaded, holder = self._offloaded, self.optimizer
        if offloaded is None or offloaded.is_incomplete:
            return
        plain: Any = offloaded.inner
        plain.state = defaultdict(dict, plain.state)  # schedulers still hold the wrapper that has the other one
        if getattr(holder, "optimizer", None) is offloaded:  # Accelerate's, by which the accelerator knows it
            holder.optimizer = plain
        else:
            self.optimizer = plain
        self.callback_handler.optimizer = self.optimizer

    def _refuse(self) -> None:
        if self._offloaded is not None and self._offloaded.is_incomplete:
            raise RuntimeError(
                "the last train() ended in the middle of an update whose states waited, so that weights and states are "
                "partly new. Make a new Trainer and call its train(resume_from_checkpoint=...)"
            )
        refuse_weights("OffloadTrainerMixin", self.policy)
        for what, is_on in (
            ("FSDP", getattr(self, "is_fsdp_enabled", False)),
            ("DeepSpeed", getattr(self, "is_deepspeed_enabled", False)),
            (f"DataParallel over {self.args.n_gpu} GPUs", self.args.n_gpu > 1),
        ):
            if is_on:
                raise ConfigError(
                    f"OffloadTrainerMixin got a Trainer with {what}, with which it has not been tried. Start one "
                    "process per GPU (torchrun, accelerate launch), or train with "
                    'L.Trainer(strategy="ssd_offload_fsdp")'
                )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and let its states wait on SSD where the policy says so."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        offloader = self.offloader
        if offloader is None or not offloader.is_open:
            return optimizer
        offloader.register_module(self.model)
        self._is_registered = True
        if self._offloaded is None:  # else a smaller batch size is tried, with what is offloaded already
            from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

            # After an earlier train() it is wrapped. A wrapper of the user's is his optimizer.
            plain = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
            found = offloader.offload_optimizer(plain)
            if isinstance(found, OffloadedOptimizer):
                self.optimizer = self._offloaded = found
        return self.optimizer

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch, with saved activations that leave in between."""
        offloader = self.offloader
        if offloader is None or not offloader.is_open:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not self._is_registered:
            raise ConfigError(
                f"{type(self).__name__}.create_optimizer does not call super().create_optimizer(), by which the "
                "offloader gets the model and the optimizer. Call it there, with self.optimizer set before"
            )
        self._num_steps += 1
        model.train()  # as the Trainer is about to do: the signature of a step contains it
        self._signature = signature_of(inputs, model)
        try:
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._signature = None
        offloader.end_backward()
        return loss

    def compute_loss_context_manager(self) -> ExitStack:
        """Return what the forward of a step runs within."""
        stack: ExitStack = super().compute_loss_context_manager()  # type: ignore[misc]
        if self._signature is not None and self.offloader is not None:  # else an evaluation
            stack.enter_context(self.offloader.saved_tensors(signature=self._signature))
        return stack

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what the Trainer logs, and the metrics of the offloader since the last call."""
        offloader = self.offloader
        if offloader is not None and offloader.is_open and "loss" in logs:
            logs = logs | offloader.drain_metrics()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
