"""One call of a module that keeps its inputs, and runs again in backward instead of keeping what it computed.

The mechanism is PyTorch's own non-reentrant checkpoint (``torch.utils.checkpoint``), which sees to random numbers and
autocast. What it leaves to its caller is done here:

* What the user may change by contract (``call_state.py``) is put back while the call is repeated: attributes,
  parameters, buffers, parts and hooks of its modules.
* What was edited in place since (a tensor, a list or dict among the attributes), or got other data, is an error.
* All else (globals, context variables, modes of the process, objects that attributes refer to) shows only where it has
  an effect on what the repetition saves, which is compared with what the call has saved (``fingerprint.py``). So
  gradients of this call are right. What the repetition changes there stays changed for the next step.

Each error comes before any gradient of the call is used. In a trial a call is kept and repeated as well; a difference
is no error then (:func:`watch`). A tensor given twice stays one; lists among the arguments that
the forward fills are filled once.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, _StopRecomputationError, checkpoint

from lightning_ssd.common.accelerators import is_capturing
from lightning_ssd.common.collectives import MeetingCount
from lightning_ssd.common.inplace_edits import VersionProbe, inplace_error
from lightning_ssd.common.rng import RandomStates, default_sources
from lightning_ssd.common.tensors import TensorSpec, class_of
from lightning_ssd.errors import ConfigError, OffloadError, RecomputeError
from lightning_ssd.recompute.call_inputs import CallInputs, apart, fill, is_plain
from lightning_ssd.recompute.call_state import CallState
from lightning_ssd.recompute.fingerprint import Fingerprint

__all__ = ["Called", "Recomputable", "Watched", "device_of", "recompute", "recompute_blocker", "watch"]

_log = logging.getLogger(__name__)

_MEETS = "its forward waits for other processes, which may not run it again"
_ASKS = "it asks for gradients in its own forward (torch.autograd.grad, backward)"
# The innermost saved-tensor hooks, and the innermost transform of torch.func. Neither has a public name.
_top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_innermost_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack


def recompute_blocker() -> str | None:
    """Why nothing may be recomputed just here, whatever the call.

    A checkpoint of the model's own runs its part again without us: that has to save what it saved the first time.
    """
    if _innermost_transform() is not None:
        return "it runs under a transform of torch.func"
    if is_capturing():
        return "a graph of the device is captured, in which nothing can be compared"
    hooks = _top_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__:
        return "the model checkpoints it by itself"
    return None


@dataclass(kw_only=True, slots=True)
class Recomputable:
    """A block, and what its repetitions have shown."""

    name: str
    kind: str
    """The name of its class."""
    full: bool = False
    """Whether every byte that a repetition saves is compared."""
    is_agreed: bool = False
    """Whether all processes recompute the same blocks: else no repetition may wait for another process, which would
    take what it gets for the answer to something else."""
    changed: str | None = None
    """Why it was found out in a repetition that the block had better be kept."""
    unwritten: set[tuple[int, int]] = field(default_factory=set)
    """Saved integers that differ without meaning, and are no indices: what the call saved, and which of it."""

    def refuse(self, reason: str) -> RecomputeError:
        """From now on it is kept. Returns the error to raise."""
        self.changed = reason
        return RecomputeError(
            f"block {self.name!r} ({self.kind}) was to run again in backward as it ran in forward, and "
            f"cannot: {reason}. No gradient of it was used, and from now on it is kept: call zero_grad() and repeat "
            "the step. To keep such blocks from the start, name the classes of others in "
            "OffloadPolicy.recompute_modules, or leave it empty with activations='auto'"
        )


class Called(NamedTuple):
    """A module that is to run, and all that it takes to run it again."""

    module: nn.Module
    run: Callable[..., Any]
    """Its forward."""
    inputs: CallInputs
    """Made of ``first``; not ``opaque``."""
    first: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments and keyword arguments, as the caller gave them."""
    block: Recomputable
    """Is told if a repetition turns out not to be exact."""
    state: CallState
    """State of the module and of modules among the arguments; not ``opaque``."""


def recompute(called: Called, told: Callable[[Iterable[int]], None] | None = None) -> Any:
    """Run a module, and again whenever backward needs what it computed.

    Saved-tensor hooks around it see its tensor inputs, those in keyword arguments and in lists too, and nothing else.

    Args:
        called: the module and its arguments.
        told: gets the sizes of the storages that the first repetition has saved: not those of weights and inputs.

    Raises:
        ConfigError: the call has edited one of its inputs, which is needed again as it was, or another tensor.
    """
    block = called.block
    call = _Call(called, _Saved, _Saved.unpack, told)
    probes = _probes_of(called.inputs)
    pack, unpack = _top_hooks(True) or (_as_it_is, _as_it_is)

    def checked(packed: Any) -> Any:
        if _are_edited(probes):
            raise block.refuse("an input of it was modified by an inplace operation")
        return unpack(packed)

    with saved_tensors_hooks(pack, checked):  # inputs are what is saved of a checkpoint
        result = call.begin(called.inputs)
    if call.edits is not None:
        raise ConfigError(
            f"a {block.kind} edits {call.edits} in place, so that it cannot be recomputed; let it edit a "
            "copy (or a buffer), or name classes of other blocks in OffloadPolicy.recompute_modules"
        )
    if call.has_met and not block.is_agreed:
        raise ConfigError(
            f"a {block.kind} was to run again in backward, and {_MEETS}; use activations='recompute', with "
            "which all processes recompute the same blocks (in a loop of your own: Offloader(agree=...)), or name "
            "classes of other blocks in OffloadPolicy.recompute_modules"
        )
    return result


class Watched:
    """Evidence of a call that was kept on whether it may be recomputed.

    Attributes:
        reason: why it had better not be; ``None``: nothing speaks against it, as far as is known. What others have
            edited is known once backward has reached the call, as a repetition would have met it.
        is_on_trial: whether it is to run again then: backward needs something that it has saved.
        is_tried: whether it did, so that ``reason`` holds for other blocks of its class, too.
    """

    def __init__(self, called: Called) -> None:
        self.reason: str | None = None
        self.is_on_trial = self.is_tried = False
        self._block = called.block
        self._inputs = _probes_of(called.inputs)
        self._is_over = self._is_looked_at = False

    def settle(self, edits: str | None, *, has_met: bool) -> None:
        """The call is over, and has edited something in place, or met other processes."""
        edits = "an input" if _are_edited(self._inputs) else edits
        reason = _MEETS if has_met and not self._block.is_agreed else None
        reason = reason if edits is None else f"{edits} is edited in place by it"
        self.reason, self._is_over = self.reason or reason, True

    def look(self, state: CallState) -> bool:
        """Has anything been edited by now? Returns whether this is the first time, which counts, and nothing has."""
        if self._is_looked_at:
            return False
        self._is_looked_at = True
        if not self._is_over:
            self.reason = _ASKS
        elif _are_edited(self._inputs):
            self.reason = self.reason or "an input of it is edited in place"
        else:
            self.reason = self.reason or state.change()
        return self.reason is None

    def run_again(self, repeat: Callable[[], object]) -> None:
        """Note what differs in a repetition."""
        try:
            repeat()
            self.is_tried = True
        except RecomputeError:
            self.reason, self.is_tried = self._block.changed, True
            _log.warning(
                "blocks of the class %s are kept, since one was run again: %s. What its forward changes elsewhere than "
                "in its own modules, such as a generator of random numbers, was changed once more",
                self._block.kind,
                self.reason,
            )
        except Exception as error:
            if not _ran_out(error):  # which says nothing of the block, and what backward needs was kept
                raise


def watch(called: Called, told: Callable[[float, float], None] | None = None) -> tuple[Any, Watched]:
    """Run a module, and keep what it saves. Returns the result, and what shows whether it may be recomputed.

    Args:
        called: the module and its arguments.
        told: the call is on trial: it runs again when backward reaches it, and this gets when that began and ended.
    """
    watched, state = Watched(called), called.state
    pack, unpack = _top_hooks(True) or (_as_it_is, _as_it_is)
    holders: list[Any] = []  # the first of the checkpoint's: by it all is made again, and is held by no other

    def keep(tensor: torch.Tensor, holder: Any) -> Any:
        if not holders:
            holders.append(holder)
        return pack(tensor)

    def look(packed: Any, again: Callable[[Any], object] | None = None) -> Any:
        if watched.look(state) and again is not None and told is not None:
            begin_s = time.perf_counter()
            watched.run_again(lambda: again(*holders))
            told(begin_s, time.perf_counter())
        return unpack(packed)

    if told is None:
        meetings = MeetingCount()
        with saved_tensors_hooks(pack, look) if pack is not _as_it_is else nullcontext():
            result = called.run(*called.first[0], **called.first[1])
        edits, has_met = state.settle(), meetings.has_grown
        state.release_graphs()
    else:
        call = _Call(called, keep, look)
        # Its inputs go past the hooks: other passes do not save them.
        with saved_tensors_hooks(_copies(), _as_it_is):
            result = call.begin(called.inputs)
        edits, has_met = call.edits, call.has_met
        watched.is_on_trial = bool(holders)
    watched.settle(edits, has_met=has_met)
    return result, watched


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter is."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


class _Call:
    """Runs a module as it was called, and again from the tensors that were saved of that call.

    The first run gets the caller's own lists and dicts, which it may fill; those of later runs are ours.

    Args:
        called: the module and its arguments.
        stand_in: makes what the graph holds of a saved tensor, of it and of what the checkpoint holds.
        unpack: makes a tensor of that, by what the checkpoint does.
        told: see :func:`recompute`.
    """

    def __init__(
        self,
        called: Called,
        stand_in: Callable[[torch.Tensor, Any], Any],
        unpack: Callable[[Any, Callable[[Any], Any]], Any],
        told: Callable[[Iterable[int]], None] | None = None,
    ) -> None:
        inputs = called.inputs
        self.edits: str | None = None
        """After the first run: what it has edited in place that cannot be put back."""
        self.has_met = False
        """After the first run: whether it has waited for other processes."""
        self._module, self._run = called.module, called.run
        self._pattern = inputs.pattern
        self._devices = {device_of(called.module), *(tensor.device for tensor in inputs.tensors)}
        self._versions = [(tensor, tensor._version) for tensor in inputs.tensors]
        self._first: tuple[Any, Any] | None = called.first
        self._block, self._state = called.block, called.state
        self._saved = Fingerprint(full=self._block.full, weights=self._state.addresses)
        self._output: Fingerprint | None = None
        self._stand_in, self._unpack = stand_in, unpack
        self._told = told

    def begin(self, inputs: CallInputs) -> Any:
        """Run for the first time."""
        tensors, device = list(inputs.tensors), device_of(self._module)
        if device.type != "cpu" and all(tensor.device != device for tensor in tensors):
            # checkpoint looks after the random numbers of the devices of its inputs, and of no others.
            tensors.append(torch.empty(0, device=device))
        # Kinds of what is saved are compared here, as the rest is.
        return checkpoint(self, *tensors, use_reentrant=False, determinism_check="none", **_said_of_hooks(checkpoint))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is None:
            self._run_again(tensors)
            return None
        (args, kwargs), self._first = self._first, None
        seen = _seen_by(self._saved, stand_in=self._stand_in, unpack=self._unpack)
        meetings = MeetingCount()
        try:
            with seen:
                result = self._run(*args, **kwargs)
        except BaseException:
            self._saved.drop()
            self._versions.clear()
            raise
        finally:
            seen.gen.close()  # an interrupt inside of contextlib would leave the hooks to the end of the frame
        self._saved.close()
        if self._saved.has_integers:
            self._output = _fingerprint_of(result)
        self.has_met = meetings.has_grown
        self.edits = self._state.settle()
        self._state.release_graphs()
        if any(tensor._version != version for tensor, version in self._versions):
            self.edits = "an input"
        self._versions.clear()
        return result

    def _run_again(self, tensors: tuple[torch.Tensor, ...]) -> None:
        reason = self._state.change() if self._saved.is_closed else _ASKS
        if reason is not None:
            raise self._block.refuse(reason)
        args, kwargs = fill(self._pattern, [*map(apart, tensors)])
        numbers = RandomStates(default_sources(self._devices) if self._saved.has_integers else ())
        again = Fingerprint(full=self._block.full, frontier=self._saved.frontier)
        sizes: dict[int, int] = {}
        seen = _seen_by(again, sizes=sizes)

        def run() -> None:
            with suppress(_StopRecomputationError):  # the checkpoint needs no more
                self._run(*args, **kwargs)
            again.close()  # while buffers have the bytes that were saved

        try:
            with seen:
                self._state.as_before(run)
        except BaseException as error:
            again.drop()
            if not isinstance(error, Exception) or _ran_out(error) or isinstance(error, OffloadError):
                raise  # it says nothing of the block
            reason = f"its forward raised {type(error).__name__}: {error}"
            raise self._block.refuse(reason) from error
        finally:
            seen.gen.close()  # here, and not by the end of the frame of an interrupt inside of contextlib
        self._compare(again, tensors, numbers)
        if self._told is not None:  # once; inputs were never gone, and weights are no activations
            given = {tensor.untyped_storage()._cdata for tensor in tensors if is_plain(tensor)}
            self._told([n for key, n in sizes.items() if key not in given and key not in self._state.addresses])
            self._told = None

    def _compare(self, again: Fingerprint, tensors: tuple[torch.Tensor, ...], numbers: RandomStates) -> None:
        edited = self._state.edited_container()
        reason = self._saved.difference(again) if edited is None else f"{edited} has other items than in forward"
        if reason is None:
            integers = self._saved.differing_integers(again)
            written = [index for index in integers if not self._saved.may_be_unwritten(index)]
            kinds = self._saved.kinds
            unknown = [index for index in integers if (kinds, index) not in self._block.unwritten]
            if written or (unknown and not self._has_same_output(tensors, numbers)):
                reason = f"the values of saved tensor {(written or unknown)[0]}, integers, differ"
            else:  # what might be an index after all is looked at in each call
                known = [(kinds, index) for index in unknown if self._saved.cannot_be_index(index)]
                self._block.unwritten.update(known)
        if reason is not None:
            raise self._block.refuse(
                f"{reason}: it depends on something that has changed and is not put back, or does not repeat its bits",
            )

    def _has_same_output(self, tensors: tuple[torch.Tensor, ...], numbers: RandomStates) -> bool:
        """Run once more, to the end."""
        numbers.restore()
        args, kwargs = fill(self._pattern, [*map(apart, tensors)])
        with saved_tensors_hooks(lambda tensor: None, _as_it_is):
            output = self._state.as_before(lambda: _fingerprint_of(self._run(*args, **kwargs)))
        return self._output is not None and self._output.difference(output) is None


class _Saved:
    """Stands for a tensor that a call has saved, to be made again.

    It is checked and kept as autograd does without hooks.
    A checkpoint does neither: what is edited in place after it was saved would give a gradient where PyTorch raises,
    and a backward that asks twice for ``ctx.saved_tensors`` would raise where PyTorch gives them.
    """

    __slots__ = ("_description", "_given", "_packed", "_probe")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self._packed = packed
        self._probe = VersionProbe(tensor) if is_plain(tensor) and not tensor._is_zerotensor() else None
        self._description = tensor.dtype, tensor.device, tensor.shape
        self._given: torch.Tensor | None = None

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        probe = self._probe
        if probe is not None and probe.version != probe.saved:
            raise inplace_error(self._description, version=probe.version, expected=probe.saved)
        try:
            tensor = unpack(self._packed)
        except CheckpointError:
            if self._given is None:
                raise
            return self._given.detach()
        # Operations of PyTorch ask once; what Python's have been given lives as long as their node.
        self._given = tensor.detach() if isinstance(torch._C._current_autograd_node(), BackwardCFunction) else None
        return tensor


@contextmanager
def _seen_by(
    fingerprint: Fingerprint,
    *,
    stand_in: Callable[[torch.Tensor, Any], Any] = lambda tensor, packed: packed,
    unpack: Callable[[Any, Callable[[Any], Any]], Any] = lambda saved, unpack: unpack(saved),
    sizes: dict[int, int] | None = None,
) -> Iterator[None]:
    """Report what is saved meanwhile, and let it go where it would have gone; note bytes of storages in ``sizes``."""
    hooks = _top_hooks(True)
    if hooks is None:
        raise AssertionError("what a recomputed call computes is never saved")
    pack_it, unpack_it = hooks

    def tell(tensor: torch.Tensor) -> Any:
        fingerprint.add(tensor)
        if sizes is not None and is_plain(tensor):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        return stand_in(tensor, pack_it(tensor))

    with saved_tensors_hooks(tell, lambda saved: unpack(saved, unpack_it)):
        yield


@functools.cache
def _said_of_hooks(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the flag without which newer PyTorch warns of hooks, or refuses them. It changes nothing here."""
    flag = "respect_saved_tensors_hooks"
    return {flag: False} if flag in inspect.signature(function).parameters else {}


def _probes_of(inputs: CallInputs) -> list[VersionProbe]:
    return [VersionProbe(tensor) for tensor in inputs.tensors if is_plain(tensor)]


def _are_edited(probes: Iterable[VersionProbe]) -> bool:
    return any(probe.version != probe.saved for probe in probes)


def _fingerprint_of(result: Any) -> Fingerprint:
    fingerprint = Fingerprint(full=True)
    for tensor in CallInputs((result,), {}).tensors:
        fingerprint.add(tensor)
    fingerprint.close()
    return fingerprint


def _ran_out(error: Exception) -> bool:
    """Whether there was too little memory."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _copies() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives an input over a copy of its storage.

    Else the program would be found to hold what it lets go in other passes. Views of one storage get one copy.
    """
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if class_of(tensor) is not type(tensor):  # an offloaded weight: unpacked itself, it would have no memory
            return tensor.detach().clone()
        if not is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        return TensorSpec.of(tensor).view(copies[storage._cdata])

    return copied
