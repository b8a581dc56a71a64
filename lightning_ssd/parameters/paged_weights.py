"""Weights that wait on a drive, and come back just before the part of the model that uses them runs.

On a CPU a weight stays what it is to everybody: the same object, of the same shape, at the same address. Only the
memory at that address is a part of a file, whose pages leave after a use and come back ahead of the next one. Whoever
touches a weight in between, by whatever way, finds its bytes: that costs page faults and never a number. So what is
decided here, when to bring in and when to send out, is a matter of time and memory alone.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_ssd.common.formatting import format_sizes
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.common.tensors import TensorSpec
from lightning_ssd.common.uninterrupted import undisturbed
from lightning_ssd.errors import forget_frames
from lightning_ssd.memory.malloc import trim
from lightning_ssd.parameters.pager import Pager, Unit, Weight
from lightning_ssd.parameters.units import SharedWeights, owners, shared_weights, why_it_stays
from lightning_ssd.parameters.weight_files import WeightFiles
from lightning_ssd.telemetry.stats import WeightStats

__all__ = ["PagedWeights"]

_log = logging.getLogger(__name__)
_Place = tuple[str, nn.Module | None]
"""Name and module of a unit; ``None``: not known (yet), or not to be watched."""
_TRIM_BYTES = 64 << 20
"""After so many bytes malloc is told to give back what the weights had: it would keep it for tensors to come."""


class PagedWeights:
    """The weights of one process that wait on drives.

    Note [exactness]: a weight is taken over only if nobody but its parameters holds its memory; then the parameters are
    given other memory with the same bytes, which shows a file that nobody else knows. Nothing that is done to it later
    can be lost: the mapping is shared with the file, so that the kernel keeps what is written through any view. A fork
    would see what its parent writes later, and so sees nothing at all.

    Args:
        files: where they wait.
        min_nbytes: smaller ones stay.
        trained: those that are trained wait, too.
    """

    def __init__(self, files: WeightFiles, *, min_nbytes: int, trained: bool = False) -> None:
        self._files = files
        self._trained = trained
        self._min_nbytes = min_nbytes
        self.pager = Pager()
        self._windows: list[_Window] = []
        self._taken_bytes = 0
        self._building: int | None = None
        self._held: dict[str, str] = {}
        # Guards the exchange of memory against an interrupted caller who goes on. A leaf lock.
        self._exchange = threading.Lock()

    # -- taking over ---------------------------------------------------------------------------------------------

    def register_module(self, module: nn.Module) -> None:
        """Take over the weights of a module. Those that somebody else holds stay.

        Raises:
            OutOfSpaceError: the drives have no room for all of them. None was taken over.
            StorageError: a drive refuses. What was taken over before it did is as good as before.
        """
        self.pager.border()  # what is gone leaves its place to the new ones
        self._windows = [window for window in self._windows if window.module is not None]
        found = shared_weights(module, self._min_nbytes)
        places = owners(module, [weights.names[0] for weights in found])
        new, trained = self._sorted_out(found)
        self._files.check_room([weights.storage.nbytes() for weights in new])
        doing = f"Writing {format_sizes(sum(weights.storage.nbytes() for weights in new))[0]} of weights"
        del found
        work = partial(self._take_all, new, [places[weights.names[0]] for weights in new], trained)
        if new or trained:
            try:
                self._uninterrupted(work, doing)
            except Exception:
                new.clear()  # whoever handles the error has our frame, and what it holds would count as held
                trained.clear()
                raise
        self._name_units(module, places)
        self._stand_in(places)

    def _uninterrupted(self, work: Callable[[_Stop], None], doing: str | None = None) -> None:
        """Take over in a thread of its own. Once an interrupt has taken us from it, it exchanges no memory any more."""
        stop = _Stop(self._exchange)
        try:
            undisturbed(partial(work, stop), "lightning_ssd-weights", doing=doing)
        except BaseException as error:
            stop.now()
            forget_frames(error)  # they hold the storages, which would count as held when it is tried again
            raise

    def _sorted_out(self, found: list[SharedWeights]) -> tuple[list[SharedWeights], list[SharedWeights]]:
        """Those to take over, and those to give back because they are trained."""
        new, trained = [], []
        self._held = {}
        for weights in found:
            is_taken = self.pager.find(weights.storage) is not None
            waits = self._trained or weights.is_frozen
            if is_taken and not waits:
                trained.append(weights)
            elif not is_taken and waits:
                reason = why_it_stays(weights)
                if reason is None:
                    new.append(weights)
                else:
                    self._held[weights.names[0]] = reason
        return new, trained

    def _take_all(
        self, new: list[SharedWeights], places: Sequence[_Place], trained: list[SharedWeights], stop: _Stop
    ) -> None:
        """Their old memory goes one by one, as each has its new one."""
        for place in places:
            self._take(place, new.pop(0), stop)
        while trained:
            self._release(trained.pop(0), stop)
        self._files.sync()

    def _take(self, place: _Place, weights: SharedWeights, stop: _Stop) -> None:
        """Write one storage to a file, and give its weights memory that shows it."""
        if stop.has_come():
            return
        mapped = self._files.write(weights.storage)
        storage = mapped.show()
        with self._exchange:
            if stop.has_come() or why_it_stays(weights) is not None:  # the caller has gone on meanwhile
                del storage
                mapped.forget()
                return
            self.pager.add(place, Weight(weights.names, mapped))
            _show(weights, storage)
        self._taken_bytes += mapped.nbytes
        if self._taken_bytes >= _TRIM_BYTES:
            self._taken_bytes = 0
            trim()

    def _release(self, weights: SharedWeights, stop: _Stop) -> None:
        """Give weights that are trained after all ordinary memory: each update would be written to the drive."""
        ordinary = torch.empty(0, dtype=torch.uint8).set_(weights.storage).clone().untyped_storage()
        with self._exchange:
            if not stop.has_come() and why_it_stays(weights) is None:
                _show(weights, ordinary)

    def _name_units(self, module: nn.Module, places: Mapping[str, _Place]) -> None:
        """Weights that were taken over while the model was built get the units and names that they have in it."""
        for weights in shared_weights(module, self._min_nbytes):
            weight = self.pager.find(weights.storage)
            if weight is not None:
                weight.names = weights.names
                self.pager.add(places[weights.names[0]], weight)

    def _stand_in(self, places: Mapping[str, _Place]) -> None:
        standing = {window.module: window for window in self._windows}
        for place in places.values():
            unit, module = self.pager.find_unit(place), place[1]
            if unit is None or module is None:
                continue
            if module in standing:
                standing[module].unit = unit
            else:
                standing[module] = _Window(module, unit, self.pager)
                self._windows.append(standing[module])

    def tell(self) -> None:
        """Log how much waits, and warn of what the user may not expect, of the last module that was registered."""
        self.pager.border()
        nbytes, held = self.stats.nbytes, self._held
        _log.info("%s of weights wait on drives between their uses", format_sizes(nbytes)[0])
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
                "set requires_grad=False on those that are not trained, or min_tensor_bytes lower, or let the trained "
                "ones wait, too, with optimizer_states='offload'",
                stacklevel=4,
            )

    # -- while a model is built ----------------------------------------------------------------------------------

    @contextmanager
    def streamed_init(self) -> Iterator[None]:
        """Take over the weights of modules that this thread builds inside, as soon as each module is part of another.

        A module's weights are whole in memory only until then. Those that turn out to be trained come back to memory
        when the model is registered.
        """
        before, hooks = self._building, []
        try:
            self._building = threading.get_ident()
            hooks.append(register_module_module_registration_hook(self._module_is_registered))
            hooks.append(register_module_parameter_registration_hook(self._parameter_is_registered))
            yield
        finally:
            self._building = before  # first: an interrupt would leave hooks behind, which do nothing then
            for hook in hooks:
                hook.remove()

    @property
    def _builds_here(self) -> bool:
        return threading.get_ident() == self._building and not self.pager.is_closed

    def _module_is_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None and self._builds_here:
            self._take_built(shared_weights(submodule, self._min_nbytes), type(submodule).__name__)

    def _parameter_is_registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """One that replaces another one has its values already; others are about to be initialised."""
        if parameter is not None and module._parameters.get(name) is not None and self._builds_here:
            holder = nn.Module()
            holder._parameters[name] = parameter
            self._take_built(shared_weights(holder, self._min_nbytes), type(module).__name__)

    def _take_built(self, built: list[SharedWeights], unit_name: str) -> None:
        while built:
            weights = built.pop(0)
            weight = self.pager.find(weights.storage)
            if weight is not None:
                weight.mapped.send_out()
            elif why_it_stays(weights) is None:
                work = partial(self._take, (unit_name, None), weights)
                del weights  # else its old memory would be held until the next one
                self._uninterrupted(work)

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> WeightStats:
        """Now."""
        return WeightStats(
            nbytes=sum(weight.mapped.nbytes for weight in self.pager.weights),
            resident_bytes=self.pager.resident_bytes,
            resident_peak_bytes=self.pager.resident_peak_bytes,
            written_bytes=self._files.written_bytes,
            disk_bytes=self._files.disk_bytes,
            stall_s=self.pager.stall_s,
            num_late=self.pager.num_late,
        )

    def reset_peak(self) -> None:
        """Start the peak anew at what is in memory now."""
        self.pager.resident_peak_bytes = self.pager.resident_bytes

    def close(self) -> None:
        """Nothing is brought in or sent out any more. Weights stay what they are: memory that the system fills from the
        files when it is touched, and takes when it needs the room. The files go with the last weight. Idempotent.

        Raises:
            StorageError: the drive has lost what was written to a weight in place.
        """
        if self.pager.is_closed:
            return
        for window in self._windows:
            window.remove()
        self._windows.clear()
        self.pager.close()
        try:
            self._files.sync()
        finally:
            for weight in self.pager.weights:
                weight.mapped.send_out()
                weight.mapped.make_private()
            for unit in self.pager.units:
                unit.weights.clear()  # graphs may hold the unit, and it would hold the memory of a model that is gone


def _show(weights: SharedWeights, storage: torch.UntypedStorage) -> None:
    """Exchange the memory of weights. Those made in inference mode take none but of their kind."""
    for tensor in weights.tensors:
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = TensorSpec.of(tensor).view(storage)


class _Stop:
    """Tells a thread that whoever has asked for its work has gone on.

    Args:
        exchange: held while memory is exchanged.
    """

    def __init__(self, exchange: threading.Lock) -> None:
        self._exchange = exchange
        self._come = False

    def has_come(self) -> bool:
        """Whether to do nothing more."""
        return self._come

    def now(self) -> None:
        """From the return on, no memory is exchanged."""
        self._come = True  # already for what has not begun
        with self._exchange:
            pass


class _Window(MethodPatch):
    """Tells when the forward of a unit's module runs."""

    def __init__(self, module: nn.Module, unit: Unit, pager: Pager) -> None:
        self.unit = unit
        self._pager = pager
        super().__init__(module, label=f"unit {unit.name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        if torch.compiler.is_compiling() or not unit.weights:
            return self.__wrapped__(*args, **kwargs)
        try:
            self._pager.enter(unit)
            return self.__wrapped__(*args, **kwargs)
        finally:  # also after an interrupt on the way in
            self._pager.leave(unit)
