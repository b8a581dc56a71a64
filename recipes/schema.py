"""Refuses mistyped keys and options, which Hydra partly accepts: ``+offload.min_tensor_byte=4`` adds a key that
nobody reads, and a file of a group with a wrong key does the same.

The schema needs no file of its own. It is what is there already: group names and options are the directories and files
of ``conf``, and below a ``_target_`` the allowed keys are the parameters of what it names.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import netrc
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from recipes.mistakes import OWNERS, ConfigMistake, say_as_keys

__all__ = ["SCHEMA", "ConfigMistake", "Schema"]

_TARGET = "_target_"
_HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
# The user is free to name the entries of these; each entry is a target.
_FREE_NAMES = ("callbacks", "logger")
# An offload option may have no settings.
_NEEDED = ("seed", "output_dir", "model", "data", "trainer", "hardware", *_FREE_NAMES)
# The only group whose default is none of its options.
_OPTIONAL_GROUPS = ("experiment",)
# Without these, a setting alone would be refused because it has no effect.
_COMPANIONS: dict[str, dict[str, Any]] = {
    "master_weights": {"optimizer_states": "offload"},
    "per_parameter_optimizers": {"optimizer_states": "offload"},
    "gradients": {"optimizer_states": "offload", "parameters": "offload"},
}

Tree = Mapping[str, Any]
KeyPath = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Schema:
    """What may be written in a configuration and on its command line."""

    config_dir: Path
    """Directory with the primary file and one directory per group."""
    config_name: str
    """The primary file, without suffix."""

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """Group names and their options."""
        folders = sorted(path for path in self.config_dir.iterdir() if path.is_dir())
        return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}

    @cached_property
    def top_keys(self) -> list[str]:
        """What may stand at the top level."""
        primary = OmegaConf.load(self.config_dir / f"{self.config_name}.yaml")
        return sorted({*map(str, primary), *self.groups} - {"defaults", "hydra"})

    def check_config(self, config: DictConfig) -> None:
        """Check a composed configuration, wherever it was written.

        Raises:
            ConfigMistake: for the first wrong one.
        """
        tree = _plain(config)
        self._check_needed(tree)
        for path, node in _nodes(tree, ()):
            for key in node:
                self._check_key(tree, (*path, str(key)))
            for key, choices in _choices(node).items():
                _check_choice(".".join((*path, key)), node.get(key, choices[0]), choices)
        for name in _FREE_NAMES:
            for key, entry in (tree.get(name) or {}).items():
                if not (isinstance(entry, Mapping) and _TARGET in entry):
                    raise ConfigMistake(
                        f"{name}.{key}={entry!r} names nothing to build; give it a _target_ and arguments"
                    )
        for path, node in _nodes(_resolved(config), ()):
            for key, value in node.items():
                _check_value(".".join((*path, str(key))), value)

    def _check_needed(self, tree: Tree) -> None:
        for key in _NEEDED:
            if key not in tree or (key in self.groups and not isinstance(tree[key], Mapping)):
                options = f"{key}=OPTION, of {_listed(self.groups[key])}" if key in self.groups else f"{key}=VALUE"
                raise ConfigMistake(f"{key} is missing: every run needs it. Allowed: {options}")

    def check_overrides(self, overrides: Sequence[str], *, sweeps: bool = True) -> None:
        """Check the overrides of a command line, sweeps included, before any job starts.

        Args:
            overrides: as given, such as ``model=gpt,bert`` or ``+trainer.gradient_clip_val=1``.
            sweeps: whether several values for one key are several runs.

        Raises:
            ConfigMistake: for the first wrong one.
        """
        # Hydra's own settings and repackaged groups (model@other) are checked by Hydra.
        parsed = [
            override
            for override in map(_parsed, overrides)
            if override.key_or_group.split(".")[0].split("/")[0] != "hydra" and override.package is None
        ]
        for override in parsed:
            if not sweeps and override.is_sweep_override():
                raise ConfigMistake(
                    f"{override.input_line}: several values; add -m to run each of them, or write a list: "
                    f"{override.key_or_group}=[first,second]"
                )
        groups = [override for override in parsed if override.key_or_group in self.groups]
        for override in groups:
            if override.is_delete() and override.key_or_group in _NEEDED:
                raise ConfigMistake(
                    f"{override.input_line}: every run needs it. Allowed: {override.key_or_group}=OPTION, of "
                    f"{_listed(self.groups[override.key_or_group])}"
                )
            if override.is_add():
                raise ConfigMistake(
                    f"{override.input_line}: every run has a {override.key_or_group}; write it without the plus sign"
                )
            for option in _values(override):
                self._check_option(override.key_or_group, option)
        keys = [override for override in parsed if override.key_or_group not in self.groups]
        for tree in self._trees(groups) if keys else ():
            for override in keys:
                self._check_override(tree, override)

    def compose(self, overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
        """Check overrides and compose them outside of a Hydra application.

        There is no output directory then: give ``output_dir`` among the overrides.

        Returns:
            The configuration, and the name of the chosen option per group.

        Raises:
            ConfigMistake: for the first wrong override.
        """
        self.check_overrides(overrides, sweeps=False)
        with initialize_config_dir(str(self.config_dir), version_base="1.3"):
            config = compose(self.config_name, overrides=list(overrides), return_hydra_config=True)
        choices = {group: str(option) for group, option in config.hydra.runtime.choices.items()}
        OmegaConf.set_readonly(config, False)
        with open_dict(config):
            del config.hydra
        return config, choices

    def _check_override(self, tree: Tree, override: Override) -> None:
        path = tuple(override.key_or_group.split("."))
        if len(path) > 1 and path[0] in self.groups and path[0] not in tree:
            raise ConfigMistake(
                f"{override.key_or_group}: there are no {path[0]} settings here (in the override "
                f"{override.input_line!r}). Choose a {path[0]} that has them.\n"
                f"Allowed for {path[0]}: {_listed(self.groups[path[0]])}"
            )
        self._check_key(tree, path, written=override.input_line)
        if override.is_add() and not override.is_force_add() and _descend(tree, path) is not None:
            raise ConfigMistake(f"{override.input_line}: there is such a key already; write it without the plus sign")
        parent = _descend(tree, path[:-1])
        choices = _choices(parent).get(path[-1]) if isinstance(parent, Mapping) else None
        for value in _values(override):
            if choices:
                _check_choice(override.key_or_group, value, choices)
            _check_value(override.key_or_group, value)

    def _check_key(self, tree: Tree, path: KeyPath, *, written: str | None = None) -> None:
        """Walk down ``path`` and refuse the first part that the node above it does not know."""
        node: Any = tree
        for depth, part in enumerate(path):
            allowed = self.top_keys if depth == 0 else _parameters(node, path[:depth])
            if allowed is not None and part not in allowed:
                raise ConfigMistake(_unknown_key(tree, path, depth, allowed, written))
            node = node.get(part)
            if not isinstance(node, Mapping):
                if node is not None and path[depth + 1 :]:
                    raise ConfigMistake(_key_below_a_value(tree, path, depth, node))
                return

    def _check_option(self, group: str, option: Any) -> None:
        allowed = self.groups[group]
        for name in option if isinstance(option, list) else [option]:
            if name not in allowed and not (name is None and group in _OPTIONAL_GROUPS):
                hint = _hint(str(name), allowed, f"{group}=")
                raise ConfigMistake(
                    f"{group}={'null' if name is None else name}: there is no such option.{hint}\n"
                    f"Allowed for {group}: {_listed(allowed)}"
                )

    def _trees(self, overrides: Sequence[Override]) -> Iterator[Tree]:
        """The configuration for the first choice of every group, then with each further choice of one group."""
        choices = {override.key_or_group: _values(override) or [None] for override in overrides}
        first = {group: options[0] for group, options in choices.items()}
        others = ({**first, group: option} for group, options in choices.items() for option in options[1:])
        for combination in (first, *others):
            words = (f"{group}={_text(option)}" for group, option in combination.items())
            yield _composed(self.config_dir, self.config_name, tuple(words))


@cache
def _composed(config_dir: Path, config_name: str, words: tuple[str, ...]) -> Tree:
    """Which keys there are, for some choices of groups. Composing takes a while, and files are read once, as above."""
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        return _plain(compose(config_name, overrides=list(words)))


def _parsed(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigMistake(
            f"{override!r}: expected KEY=VALUE, GROUP=OPTION or ~KEY, without spaces around the equals sign. A value "
            "with spaces, commas, brackets or letters beyond ASCII needs quotes of its own within those of the shell: "
            "'data.path=\"my text.txt\"'"
        ) from error


def _unknown_key(tree: Tree, path: KeyPath, depth: int, allowed: Sequence[str], written: str | None) -> str:
    """``path[depth]`` is the first part that nobody knows."""
    full, above = ".".join(path[: depth + 1]), ".".join(path[:depth])
    near = "" if path[depth + 1 :] else _hint(path[depth], allowed, f"{above}." if above else "")
    hint = near or _elsewhere(tree, path) or _hint(path[depth], allowed, f"{above}." if above else "")
    origin = f" (in the override {written!r})" if written else ""
    where = f"below {above}" if above else "at the top"
    return f"{full}: there is no such key{origin}.{hint}\nAllowed {where}: {_listed(allowed)}"


def _key_below_a_value(tree: Tree, path: KeyPath, depth: int, value: Any) -> str:
    above, full = ".".join(path[: depth + 1]), ".".join(path)
    return f"{full}: there is no such key, since {above}={value} is one value.{_elsewhere(tree, path)}"


def _elsewhere(tree: Tree, path: KeyPath) -> str:
    """Where the last part of what was written is a key; the same group comes first."""
    found = [(*where, key) for where, node in _nodes(tree, ()) for key in node if key == path[-1]]
    found.sort(key=lambda other: other[0] != path[0])
    return f" Did you mean {'.'.join(found[0])}?" if found else ""


def _check_value(key: str, value: Any) -> None:
    """Have lightning_ssd check its own settings. All other values are checked by what takes them."""
    group, _, name = key.partition(".")
    if group not in OWNERS or _is_interpolation(value):
        return
    import lightning_ssd  # takes seconds, which other mistakes need not wait for

    owner = getattr(lightning_ssd, OWNERS[group])
    try:
        if name in owner.__dataclass_fields__:
            owner(**{**_COMPANIONS.get(name, {}), name: value})
    except ValueError as error:
        raise ConfigMistake(say_as_keys(str(error))) from None


def _is_interpolation(value: Any) -> bool:
    """Whether a value is that of another key, and checked where it is written."""
    return isinstance(value, str) and value.startswith("${")


def _resolved(config: DictConfig) -> Tree:
    try:
        return typing.cast(Tree, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except MissingMandatoryValue as error:
        raise ConfigMistake(f"{error.full_key} is missing: give {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        said = str(error).splitlines()[0]
        raise ConfigMistake(
            f"{error.full_key or 'the configuration'}: {said}; allowed: ${{KEY}} of a key that is there"
        ) from error


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices and not _is_interpolation(value):
        raise ConfigMistake(
            f"{name}={value}: there is no such choice.{_hint(str(value), choices, f'{name}=')}\n"
            f"Allowed for {name}: {_listed(choices)}"
        )


def _hint(word: str, allowed: Iterable[Any], prefix: str) -> str:
    near = difflib.get_close_matches(word, [str(name) for name in allowed], n=1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(str(name) for name in names if name not in _HYDRA_KEYS)


def _parameters(node: Tree, path: KeyPath) -> list[str] | None:
    """Names that a node's target takes, sorted; ``None`` where any name will do."""
    if _TARGET not in node:
        return None
    try:
        target = get_object(node[_TARGET])
    except Exception as error:  # Hydra lets through whatever the import of the named module raises
        raise ConfigMistake(f"{'.'.join((*path, _TARGET))}={node[_TARGET]}: cannot be imported ({error})") from error
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None  # the target takes whatever it is given, and complains itself
    return sorted({*(parameter.name for parameter in parameters), *_HYDRA_KEYS})


def _choices(node: Tree) -> dict[str, tuple[Any, ...]]:
    """Parameters of a node's target that take a closed set of values, for the targets of this repository."""
    name = str(node.get(_TARGET, ""))
    if not name.startswith(("lightning_ssd.", "recipes.")):
        return {}
    target = get_object(name)
    # The annotations of a strategy may name types that only a type checker imports; ours are plain.
    if not (dataclasses.is_dataclass(target) or name.startswith("recipes.")):
        return {}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def _values(override: Override) -> list[Any]:
    """All values that an override gives, one after the other in a sweep; ranges and the like give none."""
    if override.is_delete():
        return []
    if override.is_choice_sweep():
        elements = override.sweep_iterator(transformer=lambda element: element)
        return [element.text if isinstance(element, QuotedString) else element for element in elements]
    return [] if override.is_sweep_override() else [override.value()]


def _text(option: Any) -> str:
    if isinstance(option, list):
        return f"[{','.join(map(str, option))}]"
    return "null" if option is None else str(option)


def _plain(config: DictConfig) -> Tree:
    return typing.cast(Tree, OmegaConf.to_container(config, resolve=False))


def _descend(tree: Tree, path: Iterable[str]) -> Any:
    node: Any = tree
    for part in path:
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _nodes(node: Tree, path: KeyPath) -> Iterator[tuple[KeyPath, Tree]]:
    """Every mapping in the tree with its path."""
    yield path, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _nodes(value, (*path, str(key)))


def _wandb_key_missing() -> bool:
    """Whether W&B could only be used offline. Asking W&B itself would fix its mode before its logger could set it."""
    if os.environ.get("WANDB_API_KEY"):
        return False
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is None
    except FileNotFoundError:
        return True


SCHEMA = Schema(config_dir=Path(__file__).resolve().parent.parent / "conf", config_name="train")
"""That of this repository."""

OmegaConf.register_new_resolver("wandb_key_missing", _wandb_key_missing, replace=True)
