"""Read options of ``conf``: models to build, hardware to plan for. The only file that imports Hydra and OmegaConf."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from yaml import YAMLError  # type: ignore[import-untyped]

from lightning_ssd.cli.output import CommandError
from lightning_ssd.common.formatting import escape_control
from lightning_ssd.config import HardwareProfile, from_section
from lightning_ssd.errors import ConfigError
from lightning_ssd.planning.machine_profile import MachineProfile

__all__ = ["Described", "batch_maker", "load_hardware", "model_builder"]

_PRIMARY = "train.yaml"
_PACKAGED = Path(__file__).resolve().parents[1] / "conf"
"""Options of hardware (and of offload, for Hydra) that are installed with the package."""


@dataclass(frozen=True, slots=True)
class Described:
    """An option of hardware."""

    name: str
    hardware: HardwareProfile
    machine: MachineProfile


def load_hardware(name: str) -> Described:
    """Read an option of ``conf/hardware``, or a file of the same form."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _option("hardware", name)
    if not path.is_file():
        raise CommandError("a hardware profile", f"{escape_control(path)} does not exist", "name a file that exists")
    try:
        content: Any = OmegaConf.load(path)
        if "defaults" in content:
            content = OmegaConf.merge(OmegaConf.load(_PACKAGED / "_lightning_ssd_hardware.yaml"), content)
        plain: Any = OmegaConf.to_container(content, resolve=True)
        others = ", ".join(map(str, set(plain) - {"defaults", "hardware", "machine"}))
        if others or "hardware" not in plain:  # a mistyped one would be ignored
            raise ConfigError(f"it has {others or 'no hardware:'}")
        sections = {name: plain.get(name) or {} for name in ("hardware", "machine")}
        for section in sections.values():
            section.pop("_target_", None)
        return Described(
            name=path.stem,
            hardware=from_section(HardwareProfile, sections["hardware"], "hardware"),
            machine=from_section(MachineProfile, sections["machine"], "machine"),
        )
    except (OmegaConfBaseException, YAMLError, ConfigError, TypeError, AttributeError) as error:
        got = f"{escape_control(path)}: {error}"
        raise CommandError("a hardware profile with hardware: and machine: alone", got, "see conf/hardware") from error


def model_builder(name: str, sequence: int) -> Callable[[], nn.Module]:
    """Return a function that builds a model.

    Args:
        name: an option of ``conf/model``, ``package.module:name`` to call without arguments, or the path of a
            ``config.json`` of Hugging Face.
        sequence: length of a window of tokens, which some options are built for.
    """
    if name.endswith(".json"):
        return _of_hugging_face(Path(name))
    if ":" in name:
        return _module_maker(name)
    path = _option("model", name)
    data: Any = OmegaConf.load(_folder("data") / "text.yaml")
    data.sequence_length = sequence
    config: Any = OmegaConf.create({"model": OmegaConf.load(path), "data": data, "seed": 0})
    checkout = str(_folder("model").parents[1])
    if checkout not in sys.path:
        sys.path.insert(0, checkout)  # here are the classes that options name

    def build() -> nn.Module:
        try:
            model: nn.Module = instantiate(config.model, _convert_="all")
        except HydraException as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # Hydra names only the class that it could not make
                cause = cause.__cause__
            got = f"{escape_control(path)}: {type(cause).__name__}: {cause}"
            advice = "pip install -c constraints.txt '.[recipes]', if a module is missing"
            raise CommandError("a model that can be built", got, advice) from error
        return model

    return build


def _of_hugging_face(path: Path) -> Callable[[], nn.Module]:
    """Build the class that a configuration names, with random weights; nothing is downloaded."""
    try:
        import transformers
    except ImportError as error:
        raise CommandError(
            "transformers, for a config.json", str(error), "pip install -c constraints.txt '.[recipes]' in the checkout"
        ) from None
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path.resolve(strict=True))
        (architecture,) = config.architectures or ("AutoModelForCausalLM",)
        kind: Any = getattr(transformers, architecture)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        got = f"{escape_control(path)}: {str(error).strip().partition(chr(10))[0]}"
        advice = "name a config.json with model_type and architectures that this transformers has"
        raise CommandError("a configuration of Hugging Face", got, advice) from error
    config.use_cache = False

    def build() -> nn.Module:
        model: nn.Module = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
        return model

    return build


def batch_maker(name: str) -> Callable[[int, int], Any]:
    """Return a function that makes batches of given numbers of sequences and tokens, like a DataModule's first batch.

    It resizes first dimensions of the batch's size, and second dimensions of the size of integer tensors' second one.
    """
    found = _imported(name)
    try:
        data: Any = found() if callable(found) else found
        data.prepare_data()
        data.setup("fit")
        first: Any = next(iter(data.train_dataloader()))
    except Exception as error:  # whatever the user's own code raises
        got = f"{name}: {type(error).__name__}: {error}"
        raise CommandError("a DataModule whose first batch can be loaded", got, "try it with Trainer.fit") from error
    first = dict(first) if isinstance(first, Mapping) else first
    tensors = [leaf for leaf in tree_leaves(first) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        got = f"a {type(first).__name__} without one from {name}"
        raise CommandError("a batch of tensors", got, "return tuples, lists or dictionaries of tensors")
    tokens = [t.shape[1] for t in tensors if t.dim() > 1 and not t.is_floating_point()]

    def make(batch: int, sequence: int) -> Any:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            shape[:1] = [batch if size == len(tensors[0]) else size for size in shape[:1]]
            shape[1:2] = [sequence if size in tokens else size for size in shape[1:2]]
            return torch.ones(shape, dtype=tensor.dtype)

        return tree_map_only(torch.Tensor, resized, first)

    return make


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        got = f"{name}: {error}"
        raise CommandError("a class or function that can be imported", got, "write package.module:name") from error
    finally:
        sys.path.remove(str(Path.cwd()))


def _module_maker(name: str) -> Callable[[], nn.Module]:
    found = _imported(name)
    if not callable(found):
        raise CommandError("a class or function", f"{name} is a {type(found).__name__}", "name what returns the model")

    def build() -> nn.Module:
        model = found()
        if not isinstance(model, nn.Module):
            got = f"{name}() returned a {type(model).__name__}"
            raise CommandError("a torch.nn.Module", got, "name what returns the model")
        return model

    return build


def _folder(group: str) -> Path:
    """Return options of ``conf`` in the current directory, else beside the package; of hardware also installed ones."""
    for conf in (Path.cwd() / "conf", Path(__file__).resolve().parents[2] / "conf"):
        if (conf / _PRIMARY).is_file():
            return conf / group
    if group == "hardware":
        return _PACKAGED / "lightning_ssd" / group
    got = f"no conf/{_PRIMARY} here or beside the package"
    advice = "name your model by its import path, package.module:name, or run this in a checkout of lightning_ssd"
    raise CommandError("the directory conf, for an option of it", got, advice)


def _option(group: str, name: str) -> Path:
    folder = _folder(group)
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(option.stem for option in folder.glob("*.yaml")))
        other = "a file that ends in .yaml" if group == "hardware" else "an import path such as package.module:name"
        got = escape_control(name)
        raise CommandError(f"an option of conf/{group} ({known}) or {other}", got, "take one of them")
    return path
