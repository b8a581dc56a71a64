"""Weights that wait on a drive, and come back just before the part of the model that uses them runs.

A weight stays what it is to everybody: the same object, of the same shape. How its bytes leave and come back:
``mapped_weights.py`` on a CPU, ``device_weights.py`` on a device.
"""

from __future__ import annotations

import logging
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Generic

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ssd.common.dtensor import CutWatch, ShardedParameter
from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.errors import BudgetError, forget_frames
from lightning_ssd.parameters.pager import Memory, Pager, Place, Weight
from lightning_ssd.parameters.residents import MovableWeights, Residents
from lightning_ssd.parameters.units import SharedWeights, owners, shared_weights, weights_of, why_it_stays
from lightning_ssd.parameters.windows import Gathering, Window
from lightning_ssd.telemetry.stats import OffloadStats

__all__ = ["Choose", "PagedWeights"]

Choose = Callable[[nn.Module, Sequence[MovableWeights]], frozenset[str]]
"""Which of a module's weights that could wait stay."""
_log = logging.getLogger(__name__)


class PagedWeights(ABC, Generic[Memory]):
    """The weights of one process that wait on drives.

    Args:
        pager: brings them in and sends them out.
        min_nbytes: smaller ones stay.
        trained: those that are trained wait, too.
        is_replicated: other processes have the same model: ``DistributedDataParallel`` holds what is trained, which
            stays.
        device: of the weights that may wait.
        residents: says which stay all the same; ``None``: none.
    """

    _watches_compiled = False
    """Whether compiled blocks have windows, too."""

    def __init__(
        self,
        pager: Pager[Memory],
        *,
        min_nbytes: int,
        trained: bool = False,
        is_replicated: bool = False,
        device: str = "cpu",
        residents: Residents | None = None,
    ) -> None:
        self.pager = pager
        self._trained = trained
        self._is_replicated = is_replicated
        self.residents = residents
        if residents is not None:
            residents.gauge.count_out(lambda: pager.passing_bytes)
        self._min_nbytes = min_nbytes
        self._device = device
        self._windows: list[Window | Gathering] = []
        self._builders: list[int] = []
        """Threads that build a model, once for each :meth:`streamed_init` that they are in."""
        self._held: dict[str, str] = {}

    # -- what is done otherwise on a CPU and on a device -----------------------------------------------------------

    @abstractmethod
    def _check_room(self, new: Sequence[SharedWeights]) -> None:
        """Take the space for these weights."""

    @abstractmethod
    def _take_over(self, new: list[SharedWeights], places: Sequence[Place], trained: list[SharedWeights]) -> None:
        """Have new ones wait, one by one, and give back those that turn out to be trained. Both lists are emptied."""

    @abstractmethod
    def _put_away(self, weight: Weight[Memory]) -> None:
        """Put away a weight that waits already, and was touched while the model was built."""

    @abstractmethod
    def _movable(self, weights: SharedWeights, place: Place) -> MovableWeights:
        """Return what residents are to know of weights that could wait."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is brought in or sent out any more. Idempotent."""

    # -- taking over ---------------------------------------------------------------------------------------------

    def register_module(self, module: nn.Module) -> None:
        """Take over the weights of a module. Those that the program holds otherwise stay.

        Raises:
            BudgetError: the memory budget has no room for what cannot wait. Nothing was taken over.
            OutOfSpaceError: the drives have no room for all of them. None was taken over.
            StorageError: a drive refuses. What was taken over before it did is as good as before.
        """
        self._register(module, None if self.residents is None else self.residents.choose)

    def _register(self, module: nn.Module, choose: Choose | None) -> None:
        self.pager.border()  # what is gone leaves its place to the new ones
        self._windows = [window for window in self._windows if window.module is not None]
        found = shared_weights(module, self._min_nbytes, self._device)
        places = owners(module, found, watches_compiled=self._watches_compiled)
        try:
            staying = frozenset() if choose is None else self._staying(module, found, places, choose)
        except BudgetError as error:
            forget_frames(error)  # they hold the storages, which would count as held when it is tried again
            found.clear()
            raise
        new, trained = self._sorted_out(found, places, staying)
        self._check_room(new)
        del found
        if new or trained:
            try:
                self._take_over(new, [places[weights.names[0]] for weights in new], trained)
            except Exception:
                new.clear()  # a handler of the error has our frame, and what it holds would count as held
                trained.clear()
                raise
        # Weights that were taken over while the model was built get the units and names that they have in it.
        for weights in shared_weights(module, self._min_nbytes, self._device):
            weight = self.pager.find(weights.storage)
            if weight is not None:
                weight.names, weight.is_frozen = weights.names, weights.is_frozen
                self.pager.add(places[weights.names[0]], weight)
        standing = {id(window.module): window for window in self._windows}
        for place in places.values():
            unit, user = self.pager.find_unit(place), place[1]
            if unit is None or user is None:
                continue
            if id(user) in standing:
                standing[id(user)].unit = unit
                continue
            make = Window if isinstance(user, nn.Module) else Gathering
            standing[id(user)] = make(user, unit, self.pager)
            self._windows.append(standing[id(user)])

    def _why_it_stays(self, weights: SharedWeights, place: Place) -> str | None:
        """Why a weight that would wait has to stay in memory; ``None``: it can wait."""
        return why_it_stays(weights)

    def _must_move(self, weight: Weight[Memory], weights: SharedWeights, *, beside_frozen: bool) -> bool:
        """Whether what was taken over has to be taken over again, elsewhere, since it is trained."""
        return False

    def _must_return(self, place: Place) -> bool:
        """Whether what was taken over while the model was built cannot wait in this place."""
        return False

    def move_in(self, module: nn.Module) -> None:
        """Before all of a module is moved to where it is used, and before other code holds what of it is trained."""

    def will_be_updated(self, optimizer: Optimizer) -> None:
        """An optimizer enters the pager's ``updating`` for each update of its parameters."""

    def host_copies(self) -> AbstractContextManager[None]:
        """While it is entered, ``weight.detach()`` may give a copy in memory of the host: for a checkpoint."""
        return nullcontext()

    @property
    def _leaves_at_once(self) -> bool:
        """Whether what is made or moved now is to leave before it is known what else will need memory."""
        return self.residents is None or self.residents.is_short()

    def _staying(
        self, module: nn.Module, found: list[SharedWeights], places: Mapping[str, Place], choose: Choose
    ) -> frozenset[str]:
        """First names of those that could wait and stay."""
        movable = []
        for weights in found:
            place = places[weights.names[0]]
            if not self._may_wait(weights):
                continue
            waits = self.pager.find(weights.storage) is not None
            if not self._must_return(place) if waits else self._why_it_stays(weights, place) is None:
                movable.append(self._movable(weights, place))
        return choose(module, movable)

    def _may_wait(self, weights: SharedWeights) -> bool:
        return weights.is_frozen or (self._trained and not self._is_replicated)

    def _sorted_out(
        self, found: list[SharedWeights], places: Mapping[str, Place], staying: frozenset[str]
    ) -> tuple[list[SharedWeights], list[SharedWeights]]:
        """Those to take over, and those to give back because they are trained or stay."""
        new, trained = [], []
        self._held = {}
        beside_frozen = any(weights.is_frozen for weights in found)
        for weights in found:
            weight = self.pager.find(weights.storage)
            is_taken = weight is not None
            waits = self._may_wait(weights) and weights.names[0] not in staying
            if weight is not None and waits and self._must_move(weight, weights, beside_frozen=beside_frozen):
                is_taken = False
            if is_taken and (not waits or self._must_return(places[weights.names[0]])):
                trained.append(weights)
            elif not is_taken and waits:
                reason = self._why_it_stays(weights, places[weights.names[0]])
                if reason is None:
                    new.append(weights)
                else:
                    self._held[weights.names[0]] = reason
            elif self._trained and not self._may_wait(weights):
                self._held[weights.names[0]] = "it is trained, and DistributedDataParallel holds it and its gradient"
        return new, trained

    def tell(self) -> None:
        """Log how much waits, and warn of what the user may not expect, of the last module that was registered."""
        self.pager.border()
        nbytes, held = self.stats.weights_bytes, self._held
        if self.residents is None:
            waiting = format_sizes(nbytes)[0] if nbytes else "none"
            _log.info("%s of weights wait on drives between their uses", waiting)
        else:
            _log.info("%s", self.residents.text)
            if not nbytes:
                return
        if held:
            name, reason = next(iter(held.items()))
            warnings.warn(
                f"{len(held)} weights stay in memory, since exchanging their memory might part them from who else "
                f"holds it; the first is {name}: {reason}",
                stacklevel=4,
            )
        elif not nbytes:
            warnings.warn(
                "OffloadPolicy.parameters='offload' moves nothing: no weight of at least min_tensor_bytes is frozen; "
                "set requires_grad=False on those that are not trained, or min_tensor_bytes lower"
                + (
                    ""
                    if self._is_replicated
                    else ", or let the trained ones wait, too, with optimizer_states='offload'"
                ),
                stacklevel=4,
            )

    # -- while a model is built ----------------------------------------------------------------------------------

    @contextmanager
    def streamed_init(self) -> Iterator[None]:
        """Take over the weights of modules that this thread builds inside, as soon as each module is part of another.
        With residents, only while memory is short.

        A module's weights are whole in memory only until then, and shards until they have been cut. Those that turn out
        to be trained come back to memory when the model is registered. Again inside of itself, or in several threads at
        once: the same.
        """
        hooks: list[RemovableHandle | CutWatch] = []
        thread = threading.get_ident()
        try:
            self._builders.append(thread)
            hooks.append(register_module_module_registration_hook(self._module_is_registered))
            hooks.append(register_module_parameter_registration_hook(self._parameter_is_registered))
            hooks.append(CutWatch(self._shard_is_cut))
            yield
        finally:
            self._builders.remove(thread)  # first: an interrupt would leave hooks behind, which do nothing then
            for hook in hooks:
                hook.remove()

    @property
    def _builds_here(self) -> bool:
        return threading.get_ident() in self._builders and not self.pager.is_closed

    def _module_is_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None and self._builds_here:
            self._take_built(shared_weights(submodule, self._min_nbytes, self._device), type(submodule).__name__)

    def _parameter_is_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """One that replaces another one has its values already; others are about to be initialised."""
        if parameter is not None and module._parameters.get(name) is not None and self._builds_here:
            holder = nn.Module()
            holder._parameters[name] = parameter
            self._take_built(shared_weights(holder, self._min_nbytes, self._device), type(module).__name__)

    def _shard_is_cut(self, shard: ShardedParameter) -> None:
        if self._builds_here and (weights := weights_of(shard, self._min_nbytes, self._device)) is not None:
            unit_name = weights.names[0]
            built = [weights]
            del weights  # or it would count as held
            self._take_built(built, unit_name)

    def _take_built(self, built: list[SharedWeights], unit_name: str) -> None:
        while built:
            weights = built.pop(0)
            weight = self.pager.find(weights.storage)
            if weight is not None:
                del weights
                self._put_away(weight)
            elif (
                not weights.shows_file
                and self._leaves_at_once
                and self._why_it_stays(weights, (unit_name, None)) is None
            ):
                one = [weights]
                del weights  # else its old memory would be held until the next one
                self._take_over(one, [(unit_name, None)], [])

    # -- numbers ---------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> OffloadStats:
        """The counters of the weights; all others are 0."""
        written_bytes, disk_bytes = self._on_drives
        return OffloadStats(
            bytes_written=written_bytes,
            disk_bytes=disk_bytes,
            stall_s=self.pager.stall_s,
            stall_backward_s=self.pager.stall_backward_s,
            weights_bytes=sum(weight.memory.nbytes for weight in self.pager.weights),
            weights_resident_peak_bytes=self.pager.resident_peak_bytes,
            weights_kept_bytes=0 if self.residents is None else self.residents.kept_bytes,
        )

    @property
    @abstractmethod
    def _on_drives(self) -> tuple[int, int]:
        """Bytes written, and size of the files."""

    def reset_peak(self) -> None:
        self.pager.resident_peak_bytes = self.pager.resident_bytes

    def _remove_windows(self) -> None:
        with ExitStack() as removing:  # all of them, should one refuse
            while self._windows:
                removing.callback(self._windows.pop().remove)
