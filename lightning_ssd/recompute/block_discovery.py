"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from lightning_ssd.errors import ConfigError

__all__ = ["belongs_to_compiler", "compiled_modules", "find_blocks"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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
    if belongs_to_compiler(root):
        return
    yield root
    if not stop(root):
        for child in root.children():
            yield from _walk(child, stop)


def belongs_to_compiler(module: nn.Module) -> bool:
    """Whether the forward of a module is compiled or scripted code, into which nothing of ours is put."""
    # Asked for where it would be, because importing the compiler takes seconds.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return (
        isinstance(module, torch.jit.ScriptModule)
        or (eval_frame is not None and isinstance(module, eval_frame.OptimizedModule))
        or getattr(module, "_compiled_call_impl", None) is not None
        or getattr(module, "_compiler_ctx", None) is not None  # Lightning unwraps what torch.compile() made
    )


def compiled_modules(root: nn.Module) -> str:
    """Return how many modules of which classes belong to the compiler, such as "2 Block"; "": none does."""
    compiled = (getattr(module, "_orig_mod", module) for module in root.modules() if belongs_to_compiler(module))
    counts = Counter(getattr(module, "original_name", type(module).__name__) for module in dict.fromkeys(compiled))
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _repeated(root: nn.Module) -> set[nn.Module]:
    if belongs_to_compiler(root):
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
        return {block for block in chosen if not belongs_to_compiler(block)}
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
        if child not in taken and not belongs_to_compiler(child):
            _choose(child, in_lists, chosen)
