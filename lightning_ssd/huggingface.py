"""``OffloadTrainerMixin``: the Trainer of ``transformers`` offloads saved activations and optimizer states."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch

from lightning_ssd.config import HardwareProfile, OffloadPolicy
from lightning_ssd.errors import ConfigError
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies.batch_signature import signature_of
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
    _plain_optimizer: Any = None

    # Attributes of transformers.Trainer, which comes later in the method resolution order.
    args: Any
    model: Any
    optimizer: Any
    callback_handler: Any

    @property
    def stats(self) -> OffloadStats:
        """Counters of the present or last ``train()`` in this process."""
        return OffloadStats() if self.offloader is None else self.offloader.stats

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does, with tensors that wait elsewhere.

        Raises:
            ConfigError: the policy moves weights or gradients, or the Trainer shards or copies its model.
            StorageError: a directory cannot serve, or is full.
        """
        self._refuse()
        offloader = Offloader(
            policy=self.policy,
            hardware=self.hardware,
            device=self.args.device,
            default_directory=self.args.output_dir,
            subdirectory=f"lightning_ssd-rank-{self.args.process_index}",
        )
        self.offloader, self._plain_optimizer = offloader, None
        try:
            with offloader:
                return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            if (plain := self._plain_optimizer) is not None:
                plain.state = defaultdict(dict, plain.state)  # schedulers still hold the wrapper that has the other one
                self.optimizer = self.callback_handler.optimizer = plain

    def _refuse(self) -> None:
        for name in ("parameters", "gradients"):
            if (value := getattr(self.policy, name)) != "keep":
                raise ConfigError(
                    f"OffloadTrainerMixin got OffloadPolicy.{name}={value!r}, and the Trainer of transformers moves "
                    f'weights by itself. Write {name}="keep", or train with L.Trainer(strategy=SSDOffloadStrategy(...))'
                )
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
        if self._plain_optimizer is None:  # else a smaller batch size is tried, with what is offloaded already
            # After an earlier train() this is Accelerate's wrapper.
            self._plain_optimizer = getattr(optimizer, "optimizer", optimizer)
            self.optimizer = offloader.offload_optimizer(self._plain_optimizer)
        return self.optimizer

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch, with saved activations that leave in between."""
        offloader = self.offloader
        if offloader is None or not offloader.is_open:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
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
