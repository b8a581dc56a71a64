"""One call of a module that keeps its inputs, and runs again in backward instead of keeping what it computed.

The mechanism is PyTorch's own non-reentrant checkpoint (``torch.utils.checkpoint``), which sees to random numbers and
autocast. What it leaves to its caller is done here:

* What the user may change by contract (``call_state.py``) is put back while the call is repeated: attributes,
  parameters, buffers, parts and hooks of its modules, context variables.
* What was edited in place since, or got other data, cannot be put back, and is an error.
* All else (globals, modes of the process, objects that attributes refer to) shows only where it has an effect on what
  the repetition saves, which is compared with what the call has saved (``fingerprint.py``). So gradients of this call
  are right. What the repetition changes there stays changed for the next step.

Each error comes before any gradient of the call is used. A tensor given twice stays one; lists among the arguments that
the forward fills are filled once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_ssd.common.accelerators import is_capturing
from lightning_ssd.common.collectives import MeetingCount
from lightning_ssd.common.inplace_edits import Origin, VersionProbe, inplace_error
from lightning_ssd.common.rng import RandomStates, default_sources
from lightning_ssd.errors import ConfigError, OffloadError, RecomputeError
from lightning_ssd.recompute.call_inputs import CallInputs, apart, fill, is_plain
from lightning_ssd.recompute.call_state import CallState, contents_of, restore, restoring
from lightning_ssd.recompute.fingerprint import Fingerprint

__all__ = ["Recomputable", "Watched", "device_of", "recompute", "recompute_blocker", "watch"]

_MEETS = "its forward waits for other processes, which may not run it again"
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
    full: bool = False
    """Whether every byte that a repetition saves is compared."""
    is_agreed: bool = False
    """Whether all processes recompute the same blocks: else no repetition may wait for another process, which would
    take what it gets for the answer to something else."""
    changed: str | None = None
    """Why it was found out in a repetition that the block had better be kept."""
    unwritten: set[tuple[int, int]] = field(default_factory=set)
    """Saved integers that differ without meaning, and are no indices: what the call saved, and which of it."""

    def refuse(self, module: nn.Module, reason: str) -> RecomputeError:
        """From now on it is kept. Returns the error to raise."""
        self.changed = reason
        return RecomputeError(
            f"block {self.name!r} ({type(module).__name__}) was to run again in backward as it ran in forward, and "
            f"cannot: {reason}. No gradient of it was used, and from now on it is kept: call zero_grad() and repeat "
            "the step. To keep such blocks from the start, name the classes of others in "
            "OffloadPolicy.recompute_modules, or leave it empty with activations='auto'"
        )


def recompute(
    module: nn.Module,
    run: Callable[..., Any],
    inputs: CallInputs,
    first: tuple[tuple[Any, ...], dict[str, Any]],
    block: Recomputable,
    state: CallState,
    told: Callable[[Iterable[int]], None] = lambda sizes: None,
) -> Any:
    """Call ``run`` with the arguments ``first``, and again whenever backward needs what it computed.

    Saved-tensor hooks around it see its tensor inputs, those in keyword arguments and in lists too, and nothing else.

    Args:
        module: whose forward ``run`` is; its weights and state are looked after.
        run: what to call.
        inputs: made of ``first``; not ``opaque``.
        first: arguments and keyword arguments, as the caller gave them.
        block: is told if a repetition turns out not to be exact.
        state: of the module and of modules among the arguments; not ``opaque``.
        told: gets the sizes of the storages that the first repetition has saved: not those of weights and inputs.

    Raises:
        ConfigError: the call has edited one of its inputs, which is needed again as it was, or another tensor.
    """
    tensors = list(inputs.tensors)
    device = device_of(module)
    if device.type != "cpu" and all(tensor.device != device for tensor in tensors):
        # checkpoint looks after the random numbers of the devices of its inputs, and of no others.
        tensors.append(torch.empty(0, device=device))
    call = _Call(module, run, inputs, first, block, state, told)
    with call.inputs_watched(inputs):
        result = checkpoint(call, *tensors, use_reentrant=False, preserve_rng_state=True)
    if call.edits is not None:
        raise ConfigError(
            f"a {type(module).__name__} edits {call.edits} in place, so that it cannot be recomputed; let it edit a "
            "copy (or a buffer), or name classes of other blocks in OffloadPolicy.recompute_modules"
        )
    if call.has_met and not block.is_agreed:
        raise ConfigError(
            f"a {type(module).__name__} was to run again in backward, and {_MEETS}; use activations='recompute', with "
            "which all processes recompute the same blocks (in a loop of your own: Offloader(agree=...)), or name "
            "classes of other blocks in OffloadPolicy.recompute_modules"
        )
    return result


class Watched:
    """Evidence of a call that was kept on whether it may be recomputed.

    Attributes:
        reason: why it had better not be; ``None``: nothing speaks against it, as far as is known. What others have
            edited is known once backward has reached the call, as a repetition would have met it.
    """

    def __init__(self, inputs: CallInputs) -> None:
        self.reason: str | None = None
        self._inputs = [VersionProbe(tensor) for tensor in inputs.tensors if is_plain(tensor)]
        self._others: list[tuple[str, weakref.ref[torch.Tensor], int]] = []

    def settle(self, state: CallState, *, has_met: bool) -> None:
        """The call is over. ``has_met``: other processes."""
        edits = state.settle()
        if any(probe.version != probe.saved for probe in self._inputs):
            edits = "an input"
        self.reason = state.opaque if edits is None else f"{edits} is edited in place by it"
        if has_met:
            self.reason = self.reason or _MEETS
        self._others = state.probes()

    def look(self) -> None:
        """Has anything been edited by now? The first time counts."""
        if any(probe.version != probe.saved for probe in self._inputs):
            self.reason = self.reason or "an input of it is edited in place"
        for label, reference, version in self._others:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                self.reason = self.reason or f"{label} is edited in place before backward"
        self._inputs.clear()
        self._others.clear()


def watch(
    module: nn.Module,
    run: Callable[..., Any],
    inputs: CallInputs,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: Recomputable,
) -> tuple[Any, Watched]:
    """``run(*args, **kwargs)``, kept, and what it shows of whether it may be recomputed."""
    state = CallState([module, *inputs.modules])
    watched = Watched(inputs)
    pack, unpack = _top_hooks(True) or (_as_it_is, _as_it_is)

    def look(packed: Any) -> Any:
        watched.look()
        return unpack(packed)

    meetings = MeetingCount()
    with saved_tensors_hooks(pack, look) if pack is not _as_it_is else nullcontext():
        result = run(*args, **kwargs)
    watched.settle(state, has_met=not block.is_agreed and meetings.has_grown)
    return result, watched


def device_of(module: nn.Module) -> torch.device:
    """Where its first parameter is."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


class _Call:
    """Runs a module as it was called, and again from the tensors that were saved of that call.

    The first run gets the caller's own lists and dicts, which it may fill; those of later runs are ours.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        inputs: CallInputs,
        first: tuple[Any, Any],
        block: Recomputable,
        state: CallState,
        told: Callable[[Iterable[int]], None],
    ) -> None:
        self.edits: str | None = None
        """After the first run: what it has edited in place that cannot be put back."""
        self.has_met = False
        """After the first run: whether it has waited for other processes."""
        self._module = module
        self._run = run
        self._pattern = inputs.pattern
        self._devices = {device_of(module), *(tensor.device for tensor in inputs.tensors)}
        self._versions = [(tensor, tensor._version) for tensor in inputs.tensors]
        self._inner = [weakref.ref(tensor) for tensor in inputs.tensors if tensor.grad_fn is not None]
        self._first: tuple[Any, Any] | None = first
        self._block = block
        self._state = state
        self._saved = Fingerprint(full=block.full, weights=self._state.addresses)
        self._output: Fingerprint | None = None
        self._told: Callable[[Iterable[int]], None] | None = told
        self._asks_for_gradients = False

    @contextmanager
    def inputs_watched(self, inputs: CallInputs) -> Iterator[None]:
        """Around the checkpoint: its inputs are what is saved of it."""
        probes = [VersionProbe(tensor) for tensor in inputs.tensors if is_plain(tensor)]
        pack, unpack = _top_hooks(True) or (_as_it_is, _as_it_is)

        def checked(packed: Any) -> Any:
            if any(probe.version != probe.saved for probe in probes):
                raise self._block.refuse(self._module, "an input of it was modified by an inplace operation")
            return unpack(packed)

        with saved_tensors_hooks(pack, checked):
            yield

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._first is None:
            self._run_again(tensors)
            return None
        (args, kwargs), self._first = self._first, None
        seen = _seen_by(self._saved, set(), wrap=_Saved)
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
        # The first run needs what it has saved so far, and has not ended.
        self._asks_for_gradients = self._asks_for_gradients or not self._saved.is_closed
        reason = self._state.change()
        if reason is not None:
            raise self._block.refuse(self._module, reason)
        hooks = contents_of(tensors)  # of inputs that are not apart; a frozen one is the user's own
        # Where it asks for gradients, a repetition does so again, and they would be added once more.
        found = [tensor for reference in self._inner if (tensor := reference()) is not None]
        retained = [(tensor, tensor.grad) for tensor in found if tensor.retains_grad]

        def undo() -> None:
            restore(hooks)
            for tensor, gradient in retained:
                tensor.grad = gradient

        restoring(lambda: self._repeat(tensors), undo)

    def _repeat(self, tensors: tuple[torch.Tensor, ...]) -> None:
        args, kwargs = self._arguments(tensors)
        numbers = RandomStates(default_sources(self._devices) if self._saved.has_integers else ())
        again = Fingerprint(full=self._block.full, frontier=self._saved.frontier)
        stops: set[int] = set()
        sizes: dict[int, int] = {}
        seen = _seen_by(again, stops, sizes=sizes)
        try:
            with seen:
                self._state.as_before(self._run, *args, **kwargs)
        except BaseException as error:
            # Most often that of the checkpoint, which needs no more.
            if id(error) not in stops or not isinstance(error, Exception):
                again.drop()
                if not isinstance(error, Exception) or _is_ours(error):
                    raise
                reason = f"its forward raised {type(error).__name__}: {error}"
                raise self._block.refuse(self._module, reason) from error
            again.close()
            self._compare(again, tensors, numbers)
            self._tell(sizes, tensors)
            raise
        finally:
            seen.gen.close()  # here, and not by the end of the frame of an interrupt inside of contextlib
        again.close()
        self._compare(again, tensors, numbers)
        self._tell(sizes, tensors)

    def _arguments(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the arguments of a repetition, as tensors with hooks of their own.

        A hook that the repetition registers would be there a second time else.
        Not where forward asks for gradients: maybe of what its inputs were computed from.
        """
        return fill(self._pattern, tensors if self._asks_for_gradients else [apart(tensor) for tensor in tensors])

    def _tell(self, sizes: dict[int, int], inputs: tuple[torch.Tensor, ...]) -> None:
        """Say once how much was saved again: inputs were never gone, and weights are no activations."""
        told, self._told = self._told, None
        if told is not None:
            given = {tensor.untyped_storage()._cdata for tensor in inputs if is_plain(tensor)}
            told([n for key, n in sizes.items() if key not in given and key not in self._state.addresses])

    def _compare(self, again: Fingerprint, tensors: tuple[torch.Tensor, ...], numbers: RandomStates) -> None:
        if any(tensor.retains_grad for tensor in tensors):  # which took it from the one that the model holds
            raise self._block.refuse(
                self._module, "it calls retain_grad() of an input, and asks for gradients in its forward"
            )
        edited = self._state.changed_twice
        if edited is not None:
            raise self._block.refuse(self._module, f"it edits {edited}, a buffer, by a second reference to it")
        reason = self._saved.difference(again)
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
                self._module,
                f"{reason}: it depends on something that has changed and is not put back, or does not repeat its bits",
            )

    def _has_same_output(self, tensors: tuple[torch.Tensor, ...], numbers: RandomStates) -> bool:
        """Run once more, to the end."""
        numbers.restore()
        args, kwargs = self._arguments(tensors)
        with saved_tensors_hooks(_nothing, _nothing):
            output = _fingerprint_of(self._state.as_before(self._run, *args, **kwargs))
        if self._output is None or self._state.changed_twice is not None:
            return False
        return self._output.difference(output) is None


class _Saved:
    """Stands for a tensor that a call has saved, to be made again.

    It is checked and kept as autograd does without hooks.
    A checkpoint does neither: what is edited in place after it was saved would give a gradient where PyTorch raises,
    and a backward that asks twice for ``ctx.saved_tensors`` would raise where PyTorch gives them.
    """

    __slots__ = ("_description", "_given", "_origin", "_packed", "_probe")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self._packed = packed
        self._probe = VersionProbe(tensor) if is_plain(tensor) and not tensor._is_zerotensor() else None
        self._description = tensor.dtype, tensor.device, tensor.shape
        self._origin = None if self._probe is None else Origin.of(tensor)
        self._given: torch.Tensor | None = None

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        probe = self._probe
        if probe is not None and probe.version != probe.saved:
            raise inplace_error(self._description, self._origin, version=probe.version, expected=probe.saved)
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
    stops: set[int],
    *,
    wrap: Callable[[torch.Tensor, Any], Any] | None = None,
    sizes: dict[int, int] | None = None,
) -> Iterator[None]:
    """Report what is saved meanwhile, and let it go where it would have gone. What that raises is noted; the bytes of
    each storage are in ``sizes``.
    """
    hooks = _top_hooks(True)
    if hooks is None:
        raise AssertionError("what a recomputed call computes is never saved")
    pack, unpack = hooks

    def tell(tensor: torch.Tensor) -> Any:
        fingerprint.add(tensor)
        if sizes is not None and is_plain(tensor):
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        try:
            packed = pack(tensor)
        except BaseException as error:
            stops.add(id(error))  # not itself: nodes hold this hook, and no garbage collector sees what they hold
            raise
        return packed if wrap is None else wrap(tensor, packed)

    with saved_tensors_hooks(tell, unpack if wrap is None else lambda saved: saved.unpack(unpack)):
        yield


def _fingerprint_of(result: Any) -> Fingerprint:
    fingerprint = Fingerprint(full=True)
    for tensor in CallInputs((result,), {}).tensors:
        fingerprint.add(tensor)
    fingerprint.close()
    return fingerprint


def _is_ours(error: Exception) -> bool:
    """Whether it tells of something else than of a forward that is not what it was."""
    ran_out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
    return ran_out or isinstance(error, OffloadError)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _nothing(_: Any) -> Any:
    return None
