"""Give a strategy object to one Trainer or Fabric, of either package, and refuse it to a second one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning_ssd._both_packages import become_counterpart, is_of_lightning
from lightning_ssd.errors import ConfigError

__all__ = ["one_trainer"]

_T = TypeVar("_T")


def one_trainer(takes_it: str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class of strategies so that an object serves only one Trainer, of either package.

    Lightning's connectors (``_check_config_and_set_final_flags``) read ``_accelerator`` before they take a strategy,
    and set ``accelerator`` after that. All other code of Lightning uses ``accelerator``. It is a decorator, because a
    further base class would give objects another layout than Lightning's classes have (``become_one_device``).
    """

    def given(self: Any) -> Any:
        if self._set_accelerator is not None:
            name = type(self).__name__
            raise ConfigError(
                f"this {name} belongs to a {takes_it} already, and one object serves one {takes_it}. Write "
                f"{takes_it}(strategy={name}(...)) with a new object for each, or the name {self.strategy_name!r}"
            )
        return self._given_accelerator

    def give(self: Any, accelerator: Any) -> None:
        self._given_accelerator = accelerator

    def used(self: Any) -> Any:
        return self._given_accelerator if self._set_accelerator is None else self._set_accelerator

    def use(self: Any, accelerator: Any) -> None:
        is_lightnings = is_of_lightning(type(accelerator))
        if is_lightnings != is_of_lightning(type(self)) and not become_counterpart(self):
            name = type(self).__name__
            base = next(base for base in type(self).__mro__ if base.__module__.startswith("lightning_ssd."))
            source = "lightning_ssd" if is_lightnings else "lightning_ssd.pytorch_lightning"
            raise ConfigError(
                f"this {takes_it} comes from {type(accelerator).__module__.partition('.')[0]}, and {name} derives from "
                f"classes of the other package of Lightning. Write `from {source} import {base.__name__}` and derive "
                f"{name} from that"
            )
        self._set_accelerator = accelerator

    def decorate(cls: type[_T]) -> type[_T]:
        more = {"_given_accelerator": None, "_set_accelerator": None}
        for name, value in {**more, "_accelerator": property(given, give), "accelerator": property(used, use)}.items():
            setattr(cls, name, value)
        return cls

    return decorate
