"""``OffloadCallback``: offload saved activations and optimizer states to SSD with any strategy of the Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_ssd._both_packages import callback_of_both_packages
from lightning_ssd.activations.dtensor_hooks import unwrapped_within
from lightning_ssd.common.dtensor import is_shard
from lightning_ssd.common.validation import expect
from lightning_ssd.config import HardwareProfile, OffloadPolicy, from_section
from lightning_ssd.errors import ConfigError
from lightning_ssd.offloader import Offloader
from lightning_ssd.strategies.batch_signature import signature_of
from lightning_ssd.strategies.default_monitor import DefaultMonitor
from lightning_ssd.strategies.names import POLICIES
from lightning_ssd.strategies.session import (
    OffloadSession,
    check_options,
    offloaded,
    offloaded_optimizers_hidden,
    refuse_master_weights,
    refuse_weights,
)
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["OffloadCallback", "callbacks_from_environment"]

VARIABLE = "LIGHTNING_SSD"
_REFUSED = ("FSDPStrategy", "DeepSpeedStrategy")
"""Strategies of Lightning that free the memory of weights between their uses, which has not been tried with this."""
_FRESH = {"_session": None, "_put_back": None, "_num_ended": 0}


@callback_of_both_packages
class OffloadCallback(Callback):
    """Keeps a Trainer's strategy, and offloads what that strategy trains: bit for bit the same results.

    For Trainers of ``lightning`` and of ``pytorch_lightning`` whose strategy is fixed: DDP with its own options, FSDP2,
    a strategy of the project, or a program that takes only callbacks. Saved activations and optimizer states can be
    offloaded. Weights and gradients need a strategy of this package.

    Files and threads live from ``on_fit_start`` to the strategy's ``teardown``. Several Trainers may have the same
    callback, one after the other. Copies (``copy.deepcopy``, ``pickle``) have only the settings. While one of
    Lightning's finders (of a batch size, of a learning rate) tries steps, it removes all callbacks from the Trainer.
    These steps offload nothing.

    Example::

        trainer = L.Trainer(strategy="ddp", callbacks=[OffloadCallback(policy=OffloadPolicy(activations="offload"))])

    Args:
        policy: says what is offloaded; default: ``OffloadPolicy()``.
        hardware: says where to; default: ``$LIGHTNING_SSD_PATHS``, else the Trainer's ``default_root_dir``.
        log_metrics: log to the Trainer's loggers, and print the verdict, as the strategies do.

    Raises:
        ConfigError: the policy offloads weights or gradients.
    """

    def __init__(
        self,
        policy: OffloadPolicy | None = None,
        *,
        hardware: HardwareProfile | None = None,
        log_metrics: bool = True,
    ) -> None:
        self.policy, self.hardware = check_options(policy, hardware)
        self.log_metrics = expect("OffloadCallback.log_metrics", log_metrics, bool, "True or False")
        refuse_weights("OffloadCallback", self.policy)
        self._session: OffloadSession | None = None
        self._put_back: Callable[[], None] | None = None  # while the strategy's methods are replaced
        self._num_ended = 0
        """Number of backwards of the present or last ``fit``."""

    def __getstate__(self) -> dict[str, Any]:
        # Threads and files are not copied, and neither are the model's methods that Lightning sets here.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")} | _FRESH

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
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer that would offload tensors twice, and strategies that have not been tried.

        Raises:
            ConfigError: the strategy offloads, another callback does, or it is ``FSDPStrategy`` or DeepSpeed.
        """
        if stage != "fit":
            return
        name = type(trainer.strategy).__name__
        others = [one for one in trainer.callbacks if isinstance(one, OffloadCallback)]  # type: ignore[attr-defined]
        if len(others) > 1 or isinstance(getattr(trainer.strategy, "policy", None), OffloadPolicy):
            other = "another OffloadCallback" if len(others) > 1 else f"strategy={name}"
            raise ConfigError(
                f"this Trainer has an OffloadCallback and {other}, and only one of them can move a tensor. Remove the "
                f"callback; if it comes from {VARIABLE}, unset {VARIABLE}"
            )
        refused = next((base.__name__ for base in type(trainer.strategy).__mro__ if base.__name__ in _REFUSED), None)
        if refused is not None:
            raise ConfigError(
                f"OffloadCallback got strategy={name}: {refused} frees the memory of weights in its own way, which has "
                "not been tried with the callback. Use another strategy, such as ModelParallelStrategy (FSDP2) or "
                '"ddp", or write Trainer(strategy="ssd_offload_fsdp") without the callback'
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy, directory = trainer.strategy, trainer.default_root_dir
        is_sharded = any(map(is_shard, pl_module.parameters()))
        if is_sharded:
            refuse_master_weights("OffloadCallback", self.policy)
        is_automatic = pl_module.automatic_optimization
        owner = SimpleNamespace(
            policy=self.policy,
            hardware=self.hardware,
            root_device=strategy.root_device,
            global_rank=trainer.global_rank,
            local_rank=trainer.local_rank,
            num_processes=trainer.num_devices,
            is_distributed=trainer.world_size > 1,
            is_sharded=is_sharded,
        )
        # With manual optimization one process may run other backwards than the rest, so that each plans by itself.
        self._session = OffloadSession(
            owner,
            default_directory=None if "://" in directory else directory,
            meets_others=lambda: is_automatic,
        )
        replaced = ("training_step", "teardown")
        before: dict[str, Any] = {name: vars(strategy)[name] for name in replaced if name in vars(strategy)}

        def put_back() -> None:
            for name in replaced:
                del vars(strategy)[name]
            vars(strategy).update(before)

        step = partial(self._training_step, trainer, strategy.training_step, is_sharded)
        teardown = partial(self._teardown, strategy, strategy.teardown)
        vars(strategy).update({"training_step": step, "teardown": teardown})
        self._put_back = put_back
        # The model is on its device by now, in its precision, and wrapped or cut.
        self._session.offloader.open(pl_module)
        if self.log_metrics:
            DefaultMonitor().attach(trainer, after=self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # By now a checkpoint's states are loaded. Schedulers go on with the optimizers that they have.
        strategy, session = trainer.strategy, self._session
        assert session is not None
        strategy.optimizers = [offloaded(optimizer, session.offloader) for optimizer in strategy.optimizers]

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.offloader is not None:
            self.offloader.abort()

    def _teardown(self, strategy: Any, teardown: Callable[[], None]) -> None:
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        try:
            if self._session is not None:
                self._session.offloader.close()
        finally:
            with offloaded_optimizers_hidden(strategy):
                teardown()

    # -- in a step -----------------------------------------------------------------------------------------------

    def _training_step(
        self, trainer: pl.Trainer, step: Callable[..., Any], is_sharded: bool, *args: Any, **kwargs: Any
    ) -> Any:
        session, module = self._session, trainer.lightning_module
        if session is None or self not in trainer.callbacks:  # type: ignore[attr-defined]  # a finder's trial
            return step(*args, **kwargs)
        num_ended = self._num_ended
        saving = session.offloader.saved_tensors(signature=signature_of((args, kwargs), module))
        with saving, unwrapped_within(saving) if is_sharded else nullcontext():
            output = step(*args, **kwargs)
        if not module.automatic_optimization and self._num_ended == num_ended:
            self._end_backward()  # manual optimization may call loss.backward() itself, past all hooks
        return output

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_backward()

    def _end_backward(self) -> None:
        assert self._session is not None
        self._session.offloader.end_backward()
        self._num_ended += 1


def callbacks_from_environment() -> list[OffloadCallback]:
    """Make the callback that ``$LIGHTNING_SSD`` describes: an entry point of both packages of Lightning.

    Trainers alone ask for it. Fabric has no such entry point, so that the variable does nothing for a Fabric: pass
    ``Fabric(strategy="ssd_offload")``.

    The variable is a name in :data:`lightning_ssd.strategies.names.POLICIES`, or the path of a YAML file with settings
    of :class:`OffloadPolicy` under ``policy`` and of :class:`HardwareProfile` under ``hardware``.

    Raises:
        ConfigError: the variable is neither, or the file has other settings.
    """
    value = os.environ.get(VARIABLE, "")
    if not value:
        return []
    if value in POLICIES:
        return [OffloadCallback(policy=POLICIES[value])]
    path = Path(value)
    example = "policy: {activations: offload}"
    if not path.is_file():
        names = ", ".join(repr(name) for name, policy in POLICIES.items() if policy.parameters == "keep")
        raise ConfigError(
            f"{VARIABLE}={value!r} is no policy's name and no file. Set it to one of {names}, or to the path of a YAML "
            f"file, for example with the line `{example}`"
        )
    import yaml  # type: ignore[import-untyped]  # only where the variable is set, to keep the training path short

    kinds: dict[str, Any] = {"policy": OffloadPolicy, "hardware": HardwareProfile}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not found.keys() <= kinds.keys():
            raise ValueError(f"it has {', '.join(map(repr, found)) if isinstance(found, dict) else repr(found)}")
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE}={value!r} is no file of settings: {error}. Write the sections policy and hardware alone, such "
            f"as `{example}`"
        ) from None
    options = {name: from_section(kinds[name], settings, name) for name, settings in found.items()}
    return [OffloadCallback(**options)]
