"""Who tells that the weights of a unit are about to be used, and that they have been."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_ssd.common.compiler import compiler_is_at_work
from lightning_ssd.common.dtensor import is_alone
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.parameters.pager import Pager, Unit

__all__ = ["Gathering", "Window"]


class _UnitPatch(MethodPatch):
    """In the place of a method that uses the weights of a unit."""

    __slots__ = ("_pager", "unit")

    def __init__(self, module: Any, name: str, unit: Unit[Any], pager: Pager[Any], *, label: str) -> None:
        self.unit = unit
        self._pager = pager
        super().__init__(module, name, label=label)

    def _use(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        try:
            self._pager.enter(unit)
            return self.__wrapped__(*args, **kwargs)
        finally:  # also after an interrupt on the way in
            self._pager.leave(unit)


class Window(_UnitPatch):
    """Tells when the forward of a unit's module runs."""

    __slots__ = ()

    def __init__(self, module: Any, unit: Unit[Any], pager: Pager[Any]) -> None:
        # In front of compiled code, not within.
        name = "forward" if getattr(module, "_compiled_call_impl", None) is None else "_compiled_call_impl"
        super().__init__(module, name, unit, pager, label=f"unit {unit.name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        if torch.compiler.is_compiling() or not unit.weights:
            self._pager.is_traced(unit)
            return self.__wrapped__(*args, **kwargs)
        if not self._pager.has_told_of_splits and compiler_is_at_work():
            self._pager.has_told_of_splits = True
            warnings.warn(
                f"{unit.name or 'the model'} is compiled, after it was registered or with what is around it, and "
                "OffloadPolicy.parameters='offload' divides compiled code where weights come, so that results may "
                "differ in their last bits from those of undivided code. Compile each block by itself "
                "(block.compile()) before the model is registered, or use parameters='keep'",
                stacklevel=2,
            )
        return self._use(*args, **kwargs)


class Gathering(_UnitPatch):
    """Tells when FSDP2 reads the shards of a group.

    Before a forward or backward, often one group ahead, ``unshard`` copies them to where they are gathered. No code
    reads them after that until they are updated. In one process ``unshard`` does nothing, and ``wait_for_unshard``
    copies.
    """

    __slots__ = ("_is_alone",)

    def __init__(self, group: Any, unit: Unit[Any], pager: Pager[Any]) -> None:
        self._is_alone = is_alone(group)
        name = "wait_for_unshard" if self._is_alone else "unshard"
        super().__init__(group, name, unit, pager, label=unit.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group, unit = self.module, self.unit
        is_read = group is not None and group.is_sharded and (group._all_gather_result is None) is not self._is_alone
        if not is_read or not unit.weights:
            return self.__wrapped__(*args, **kwargs)
        return self._use(*args, **kwargs)
