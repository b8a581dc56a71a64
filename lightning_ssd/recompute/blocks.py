"""The repeated blocks of a model at work: an observer is told when they run.

Where the observer wants it, a call of a block is recomputed in backward, see ``checkpointed_call.py``. The hooks of
the block run once all the same, because only its ``forward`` is repeated. Those of the modules inside of it run again,
as in every checkpoint.

A block that ``torch.compile`` compiles, alone or with what is around it, runs as if it had no stand-in. Whether it is
compiled is asked in each call, because users compile after they have registered a model.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lightning_ssd.common.compiler import compiler_is_at_work
from lightning_ssd.common.dtensor import has_groups_within
from lightning_ssd.common.method_patch import MethodPatch
from lightning_ssd.recompute.block_discovery import belongs_to_compiler
from lightning_ssd.recompute.call_inputs import CallInputs
from lightning_ssd.recompute.call_state import CallState
from lightning_ssd.recompute.checkpointed_call import (
    Called,
    Recomputable,
    Watched,
    device_of,
    recompute,
    recompute_blocker,
    watch,
)

__all__ = ["BlockObserver", "Blocks"]


class BlockObserver(Protocol):
    """Observes the blocks of one pass, in the thread that runs its forward.

    Per call: ``block_enters``, ``block_inputs`` if it is wanted, ``block_leaves`` also after an error. A block that
    is called by another block belongs to that one and is not told of. Nothing is told while gradients are off.
    """

    @property
    def wants_inputs(self) -> bool:
        """Whether to be told of inputs, and to learn which blocks cannot be recomputed. Costs some microseconds."""
        ...

    @property
    def recomputes_all(self) -> bool:
        """Whether every call of a block is to be recomputed, whatever a plan says."""
        ...

    def block_enters(self, name: str) -> bool:
        """A block is about to run. Returns whether this call shall be recomputed in backward."""
        ...

    def block_is_kept(self) -> None:
        """The block that entered shall be recomputed, and cannot be."""
        ...

    def block_leaves(self) -> None:
        """The block that entered has run, or has failed."""
        ...

    def block_recomputed(self, sizes: Iterable[int]) -> None:
        """Backward has run a block again, for the first time, which has saved storages of these sizes."""
        ...

    def block_tried(self, begin_s: float, end_s: float) -> None:
        """Backward has run a block again on trial, as no other pass does, between these readings of the clock."""
        ...

    def block_inputs(self, nbytes: int) -> None:
        """Bytes of the storages under the tensors that the block was given, each storage once, without parameters."""
        ...


class _Active(threading.local):
    """Who watches, in this thread."""

    observer: BlockObserver | None = None


_NOBODY = _Active()  # its observer is never set, so that it does nothing


class _Kinds(NamedTuple):
    """Holds what blocks of one class have in common."""

    warned: set[str]
    trials: dict[type, Watched]
    """The call of each class that was run again, or is to be in this pass."""


class Blocks:
    """Stands in for the ``forward`` of each block, as long as it is installed.

    A context manager; so is :meth:`observe`, which is entered around one forward. Modules are held weakly. Copies of
    a model are copies without us, see :class:`MethodPatch`. The replicas of ``nn.DataParallel`` still call the module
    that they were made of, as with every ``forward`` that is set on an instance.

    Args:
        modules: the blocks by name, as :func:`~lightning_ssd.recompute.block_discovery.find_blocks` gives them.
        full: compare every byte that a repetition saves, see ``fingerprint.py``.
        is_agreed: all processes of the run have these blocks, and an observer that recomputes all of them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, full: bool = False, is_agreed: bool = False) -> None:
        self._active = _Active()
        self._wrappers: list[_Wrapper] = []
        self._kinds = _Kinds(set(), {})
        self._has_warned = False
        taken: set[nn.Module] = set()
        for name, module in modules.items():
            if module not in taken:
                taken.add(module)
                block = Recomputable(name=name, kind=type(module).__name__, full=full, is_agreed=is_agreed)
                self._wrappers.append(_stand_in(block, module, self._active, self._kinds))

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __contains__(self, module: object) -> bool:
        """Whether we stand in for this module."""
        return any(wrapper.module is module for wrapper in self._wrappers)

    @property
    def refused(self) -> dict[str, str]:
        """Blocks that cannot be recomputed exactly -> why, as far as calls have shown whose inputs were wanted.

        They run as they are even if an observer wants them recomputed. Ask after backward: the caller of a block may
        edit its input until then.
        """
        reasons = {wrapper.name: wrapper.why_not() for wrapper in self._wrappers}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @contextmanager
    def observe(self, observer: BlockObserver) -> Iterator[None]:
        """Around a forward: tell ``observer`` of the blocks that run in this thread. An inner one takes over."""
        before = self._active.observer
        if before is None and observer.wants_inputs:
            for kind in [kind for kind, trial in self._kinds.trials.items() if not trial.is_tried]:
                del self._kinds.trials[kind]  # backward has not come there
            for wrapper in self._wrappers:
                wrapper.begin_measuring()
        looks_for_bypassed = before is None and observer.recomputes_all and not self._has_warned
        if looks_for_bypassed:
            for wrapper in self._wrappers:
                wrapper.is_reached = False
        try:
            self._active.observer = observer
            yield
        finally:
            self._active.observer = before
        if looks_for_bypassed:
            self._warn_of_bypassed()

    def _warn_of_bypassed(self) -> None:
        """Warn that blocks were compiled, or given a forward that does not call theirs, after they were registered."""
        bypassed = [(wrapper.name, reason) for wrapper in self._wrappers if (reason := wrapper.is_bypassed())]
        if bypassed:
            self._has_warned = True
            name, reason = bypassed[0]
            warnings.warn(
                f"{len(bypassed)} of {len(self._wrappers)} blocks are not recomputed since they were registered "
                f"(block {name!r}: {reason}); what they save is offloaded or kept instead",
                stacklevel=3,
            )

    def remove(self) -> None:
        """Give every block its forward back. Idempotent.

        Where the program has replaced ``forward`` since, theirs stays, and what it calls of ours does nothing more.
        """
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers.clear()


def _stand_in(block: Recomputable, module: nn.Module, active: _Active, kinds: _Kinds) -> _Wrapper:
    """Return the stand-in that a module had before, anew, or its first one.

    Dynamo guards on its identity: another one each time is compiled for again, until it gives up and compiles nothing.
    """
    for key in [key for key, stand_in in _stand_ins.items() if stand_in.module is None]:
        del _stand_ins[key]  # no callback of a weak reference does so: it would swallow an interrupt
    before = _stand_ins.get(id(module))
    if before is not None and before.is_free:
        before.__init__(block, module, active, kinds)  # type: ignore[misc]
        return before
    _stand_ins[id(module)] = stand_in = _Wrapper(block, module, active, kinds)
    return stand_in


class _Wrapper(MethodPatch):
    """The ``forward`` of one block."""

    # With a ``__dict__``, on which Dynamo puts a guard. It stays empty.
    __slots__ = (
        "__dict__",
        "_active",
        "_block",
        "_kinds",
        "_refusal",
        "_watched",
        "is_reached",
        "name",
    )

    def __init__(self, block: Recomputable, module: nn.Module, active: _Active, kinds: _Kinds) -> None:
        self.name = block.name
        self.is_reached = False
        self._block = block
        self._active = active
        self._kinds = kinds
        self._refusal: str | None = None
        self._watched: list[Watched] = []
        super().__init__(module, label=f"block {block.name!r}")

    def remove(self) -> None:
        self._active = _NOBODY
        self._watched.clear()
        super().remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # traced, so that it names no function of ours
            if self._earlier is not None:
                return self._earlier(*args, **kwargs)
            module = self._module()
            return type(module).forward(module, *args, **kwargs)  # type: ignore[union-attr]
        if self._active.observer is None or not torch.is_grad_enabled() or compiler_is_at_work():
            return self.__wrapped__(*args, **kwargs)
        return self._observed(args, kwargs)

    @property
    def is_free(self) -> bool:
        """Whether it was removed, and nothing holds on to it as the forward of its module."""
        module = self._module()
        return self._is_removed and module is not None and module.__dict__.get("forward") is not self

    def is_bypassed(self) -> str | None:
        """Return why calls of the module no longer come here; ``None``: they do, as far as is seen."""
        module = self._module()
        if module is None or self.is_reached:
            return None
        if belongs_to_compiler(module):
            return "it is compiled"
        forward = module.__dict__.get("forward")
        while forward is not self and isinstance(forward, MethodPatch):
            forward = forward._earlier
        return None if forward is self else "its forward was replaced"

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_reached = True
        active, observer = self._active, self._active.observer
        module = self._module()
        if observer is None or module is None or torch._C._current_autograd_node() is not None:
            # The last: a checkpoint of the model's own repeats what we belong to, in a backward inside of the pass.
            return self.__wrapped__(*args, **kwargs)
        active.observer = None  # a block that this one calls belongs to it
        try:
            wants_recompute = observer.block_enters(self.name)
            try:
                if not wants_recompute and not observer.wants_inputs:
                    return self.__wrapped__(*args, **kwargs)
                inputs = CallInputs(args, kwargs)
                if observer.wants_inputs:
                    observer.block_inputs(inputs.nbytes_on(device_of(module)))
                state = self._state_to_repeat(module, inputs, wanted=wants_recompute)
                if state is None:
                    if wants_recompute:
                        observer.block_is_kept()
                    del inputs
                    return self.__wrapped__(*args, **kwargs)
                called = Called(module, self.__wrapped__, inputs, (args, kwargs), self._block, state)
                if wants_recompute:
                    return recompute(called, observer.block_recomputed)
                has_trial = type(module) in self._kinds.trials
                result, watched = watch(called, None if has_trial else observer.block_tried)
                if watched.is_on_trial:
                    self._kinds.trials[type(module)] = watched
                self._watched.append(watched)
                return result
            finally:
                observer.block_leaves()
        finally:
            active.observer = observer

    def _state_to_repeat(self, module: nn.Module, inputs: CallInputs, *, wanted: bool) -> CallState | None:
        """Return what the call depends on, if it can be repeated; warn where that is ``wanted``, and it cannot."""
        blocker, state = recompute_blocker(), None
        refusal = inputs.opaque or blocker
        reason = refusal or self.why_not()
        if reason is None and has_groups_within(module):
            reason = refusal = "FSDP2 gathers parts of it on their own; give fully_shard the block as a whole"
        if reason is None:
            state = CallState([module, *inputs.modules])
            if state.is_unmade:
                return None  # without a word: later ones are
            reason = refusal = state.opaque
        self._refusal = self._refusal or refusal
        kind = type(module).__name__
        # A block that checkpoints by itself has what it wants.
        is_told = blocker is not None or reason == self._block.changed  # by an error
        if wanted and reason is not None and not is_told and kind not in self._kinds.warned:
            self._kinds.warned.add(kind)
            warnings.warn(f"block {self.name!r} ({kind}) is not recomputed: {reason}", stacklevel=4)
        return state if reason is None else None

    def begin_measuring(self) -> None:
        """Learn of arguments anew; what was found to be edited stays."""
        self._watched = [watched for watched in self._watched if watched.reason is not None]
        self._refusal = None

    def why_not(self) -> str | None:
        """Why a call cannot be recomputed, as far as is known."""
        trial = self._kinds.trials.get(type(self._module()))
        verdict = trial.reason if trial is not None and trial.is_tried else None
        edited = next((watched.reason for watched in self._watched if watched.reason is not None), None)
        return self._refusal or edited or self._block.changed or verdict


_stand_ins: dict[int, _Wrapper] = {}
"""By the address of their modules, which they hold weakly."""
