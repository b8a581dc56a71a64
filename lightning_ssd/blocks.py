"""The repeated blocks of a model: which they are, and who is told when they run.

Where the one who is told wants it, a call of a block is recomputed in backward, see ``recompute.py``. The hooks of
the block run once all the same, because only its ``forward`` is repeated. Those of the modules inside of it run again,
as in every checkpoint.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from lightning_ssd.call_inputs import CallInputs
from lightning_ssd.call_state import CallState
from lightning_ssd.errors import ConfigError
from lightning_ssd.put_back import put_back_all
from lightning_ssd.recompute import Recomputable, Watched, device_of, recompute, watch, who_else_decides
from lightning_ssd.stand_in import StandIn

__all__ = ["BlockObserver", "Blocks", "find_blocks"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


# -- which modules are blocks ----------------------------------------------------------------------------------------


def find_blocks(module: nn.Module, class_names: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks of a model, by qualified name, in the order of ``modules()``.

    Without names: the repeated children of its lists (``ModuleList``, ``Sequential``, ``ModuleDict``) that have
    children and parameters of their own, the outermost first. A list of stages is no list of blocks, but its stages
    are looked into. Where a model has no such list, the repeated attributes of one class are taken.

    Compiled and scripted modules, and what is inside of them, are left out: their forward belongs to the compiler.

    Args:
        module: the model.
        class_names: classes whose outermost instances, also of derived classes, are the blocks.

    Raises:
        ConfigError: no module is of a class of these names.
    """
    if isinstance(class_names, str):
        class_names = (class_names,)
    chosen = _instances(module, frozenset(class_names)) if class_names else _repeated(module)
    return {name: block for name, block in module.named_modules() if block in chosen}


def _instances(root: nn.Module, names: frozenset[str]) -> set[nn.Module]:
    def is_named(module: nn.Module) -> bool:
        return any(base.__name__ in names for base in type(module).__mro__)

    if not any(is_named(module) for module in root.modules()):
        known = sorted({type(module).__name__ for module in root.modules()})
        raise ConfigError(
            f"OffloadPolicy.recompute_modules={sorted(names)}: the model has no module of such a class; "
            f"it has {', '.join(known)}"
        )
    return {module for module in _walk(root, stop=is_named) if is_named(module)}


def _walk(root: nn.Module, stop: Callable[[nn.Module], bool] = lambda _: False) -> Iterator[nn.Module]:
    """Modules from the outside in, not into compiled ones, nor below one at which to stop."""
    if _belongs_to_compiler(root):
        return
    yield root
    if not stop(root):
        for child in root.children():
            yield from _walk(child, stop)


def _belongs_to_compiler(module: nn.Module) -> bool:
    # Asked for where it would be, because importing the compiler takes seconds.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return (
        isinstance(module, torch.jit.ScriptModule)
        or (eval_frame is not None and isinstance(module, eval_frame.OptimizedModule))
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning unwraps what torch.compile() made
    )


def _repeated(root: nn.Module) -> set[nn.Module]:
    if _belongs_to_compiler(root):
        return set()
    modules = list(_walk(root))
    in_lists = Counter(
        type(child)
        for parent in dict.fromkeys(modules)  # a list in two places is still one list
        if isinstance(parent, _LISTS)
        for child in _candidates(parent)
    )
    chosen: set[nn.Module] = set()
    _choose(root, in_lists, chosen)
    if chosen:
        return {block for block in chosen if not _belongs_to_compiler(block)}
    blocks: set[nn.Module] = set()
    for parent in modules:
        if not isinstance(parent, _LISTS) and parent not in blocks:
            attributes = [child for child in _candidates(parent) if not isinstance(child, _LISTS)]
            counts = Counter(map(type, attributes))
            blocks.update(child for child in attributes if counts[type(child)] > 1)
    return {block for block in _walk(root, stop=blocks.__contains__) if block in blocks}


def _candidates(parent: nn.Module) -> list[nn.Module]:
    """Children that could be blocks, as often as they stand there."""
    return [
        child
        for child in parent._modules.values()
        if child is not None
        and any(True for _ in child.children())
        and any(True for _ in child.parameters())
        and getattr(type(child), "forward", None) is not nn.Module.forward  # lists cannot be called
    ]


def _groups(parent: nn.Module, in_lists: Mapping[type, int]) -> list[list[nn.Module]]:
    """The repeated children of a list, by class.

    Once is enough in a list if the class stands in other lists too, as in the stages of a network. ``Sequential``
    says nothing of what it is, so that it has to be repeated in this very list.
    """
    groups: dict[type, list[nn.Module]] = {}
    for child in _candidates(parent):
        groups.setdefault(type(child), []).append(child)
    return [
        group for kind, group in groups.items() if len(group) > 1 or (in_lists[kind] > 1 and kind is not nn.Sequential)
    ]


def _is_stage(module: nn.Module, in_lists: Mapping[type, int]) -> bool:
    """Whether a module is little but a list of blocks. A block that has a list somewhere (experts, heads) is none."""
    if isinstance(module, _LISTS):
        return bool(_groups(module, in_lists))
    lists = [
        child
        for child in module.children()
        if isinstance(child, _LISTS) and len(set(map(type, child.children()))) == 1 and _groups(child, in_lists)
    ]
    return 2 * sum(map(_size, lists)) > _size(module)


def _size(module: nn.Module) -> int:
    """Elements of its parameters, as far as these are made."""
    return sum(p.numel() for p in module.parameters() if not isinstance(p, nn.UninitializedParameter))


def _choose(module: nn.Module, in_lists: Mapping[type, int], chosen: set[nn.Module]) -> None:
    taken: set[nn.Module] = set()
    if isinstance(module, _LISTS):
        for group in _groups(module, in_lists):
            if not any(_is_stage(block, in_lists) for block in group):
                taken.update(group)
    chosen |= taken
    for child in module.children():
        if child not in taken and not _belongs_to_compiler(child):
            _choose(child, in_lists, chosen)


# -- watching them run -----------------------------------------------------------------------------------------------


class BlockObserver(Protocol):
    """What one pass wants to know of the blocks, in the thread that runs its forward.

    Per call: ``block_enters``, ``block_inputs`` if it is wanted, ``block_leaves`` also after an error. A block that
    is called by another block belongs to that one and is not told of. Nothing is told while gradients are off.
    """

    @property
    def wants_inputs(self) -> bool:
        """Whether to be told of inputs, and to learn which blocks cannot be recomputed. Costs some microseconds."""
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

    def block_inputs(self, nbytes: int) -> None:
        """Bytes of the storages under the tensors that the block was given, each storage once, without parameters."""
        ...


class _Active(threading.local):
    """Who watches, in this thread."""

    observer: BlockObserver | None = None


_NOBODY = _Active()  # nobody sets its observer, so that whoever has it does nothing


class Blocks:
    """Stands in for the ``forward`` of each block, as long as it is installed.

    A context manager; so is :meth:`observe`, which is entered around one forward. Modules are held weakly. Copies of
    a model are copies without us, see :class:`StandIn`. The replicas of ``nn.DataParallel`` still call the module that
    they were made of, as with every ``forward`` that is set on an instance.

    Args:
        modules: the blocks by name, as :func:`find_blocks` gives them.
        full: compare every byte that a repetition saves, see ``fingerprint.py``.
        may_recompute: ``False``: only what they are given is wanted, and how long they take.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, full: bool = False, may_recompute: bool = True) -> None:
        self._active = _Active()
        self._wrappers: list[_Wrapper] = []
        self._warned: set[str] = set()
        taken: set[nn.Module] = set()
        for name, module in modules.items():
            if module not in taken:
                taken.add(module)
                block = Recomputable(name=name, full=full)
                self._wrappers.append(_Wrapper(block, module, self._active, self._warned, may_recompute))

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks that we stand in for."""
        return tuple(wrapper.name for wrapper in self._wrappers)

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
        put_back_all()
        before = self._active.observer
        if before is None and observer.wants_inputs:
            for wrapper in self._wrappers:
                wrapper.begin_measuring()
        try:
            self._active.observer = observer
            yield
        finally:
            self._active.observer = before

    def remove(self) -> None:
        """Give every block its forward back. Idempotent.

        Where somebody else has replaced ``forward`` since, theirs stays, and what it calls of ours does nothing more.
        """
        for wrapper in self._wrappers:
            wrapper.remove()
        self._wrappers.clear()


class _Wrapper(StandIn):
    """The ``forward`` of one block."""

    def __init__(
        self, block: Recomputable, module: nn.Module, active: _Active, warned: set[str], may_recompute: bool
    ) -> None:
        self.name = block.name
        self._block = block
        self._active = active
        self._warned = warned
        self._is_allowed = may_recompute
        self._refusal: str | None = None
        self._edits: str | None = None
        self._watched: list[Watched] = []
        super().__init__(module, label=f"block {block.name!r}")

    def remove(self) -> None:
        self._active = _NOBODY
        self._watched.clear()
        super().remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._active.observer is None or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        return self._observed(args, kwargs)

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
                if state is not None:
                    return recompute(module, self.__wrapped__, inputs, (args, kwargs), self._block, state)
                if wants_recompute:
                    observer.block_is_kept()
                if observer.wants_inputs and self._is_allowed and self._refusal is None:
                    result, watched = watch(module, self.__wrapped__, inputs, args, kwargs)
                    self._watched.append(watched)
                    return result
                del inputs
                return self.__wrapped__(*args, **kwargs)
            finally:
                observer.block_leaves()
        finally:
            active.observer = observer

    def _state_to_repeat(self, module: nn.Module, inputs: CallInputs, *, wanted: bool) -> CallState | None:
        """What the call depends on, if it is to be recomputed and can be."""
        checkpointed, state = who_else_decides(), None
        refusal = inputs.opaque or checkpointed
        reason = refusal or self.why_not()
        if wanted and reason is None:
            state = CallState([module, *inputs.modules], inputs.functions)
            if state.is_unmade:
                return None  # without a word: later ones are
            reason = refusal = state.opaque
        self._refusal = self._refusal or refusal
        kind = type(self._module()).__name__
        # Whoever checkpoints by himself has what he wants.
        is_told = checkpointed is not None or reason == self._block.changed  # by an error
        if wanted and reason is not None and not is_told and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"block {self.name!r} ({kind}) is not recomputed: {reason}", stacklevel=4)
        return state if reason is None else None

    def begin_measuring(self) -> None:
        """What was learnt of arguments is learnt anew."""
        self._edits = self._why_edited()
        self._watched.clear()
        self._refusal = None

    def why_not(self) -> str | None:
        """Why a call cannot be recomputed, as far as is known."""
        return self._refusal or self._why_edited() or self._block.changed

    def _why_edited(self) -> str | None:
        return self._edits or next((watched.reason for watched in self._watched if watched.reason is not None), None)
