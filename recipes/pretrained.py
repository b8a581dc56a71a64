"""Fine-tunes a model that lies in a folder, as `transformers` saves it.

Nothing is downloaded, and no code in the folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from recipes.determinism import settle_first_calls
from recipes.lora import LoRA, add_adapters
from recipes.mistakes import ConfigMistake
from recipes.models import LanguageModel

__all__ = ["PretrainedModel"]

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
_MAKER = "save_pretrained of transformers"


class PretrainedModel(LanguageModel):
    """A pretrained causal language model (GPT-2, Llama), with adapters that are trained, or trained as a whole.

    Its weights are memory that shows the files, until they are converted to another type, trained or moved to a device:
    so `transformers` loads them. What the strategy lets wait on a drive is written there one by one, from the files or
    as it is converted. The model is never whole in memory.

    Args:
        path: folder with ``config.json`` and ``*.safetensors``.
        lora: the adapters; ``None``: all weights are trained.
        dtype: of the weights in the folder while they are used; "auto": as they are there.
        learning_rate: of AdamW.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        *,
        path: str,
        lora: LoRA | None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        learning_rate: float = 1e-4,
        weight_decay: float = 0.01,
    ) -> None:
        folder = Path(path).expanduser()
        super().__init__(
            config=_read_config(folder), objective="causal", learning_rate=learning_rate, weight_decay=weight_decay
        )
        self.folder = folder
        self.lora = lora
        self.dtype_of_weights = dtype

    def make_network(self) -> nn.Module:
        """Read the weights; freeze them and add adapters, where there shall be any."""
        settle_first_calls()
        network = _read_weights(self.folder)
        network.requires_grad_(self.lora is None)
        if self.dtype_of_weights != "auto":
            _convert(network, getattr(torch, self.dtype_of_weights))
        if self.lora is not None:
            add_adapters(network, self.lora)
        network.train()  # it comes in evaluation mode
        return network


def _read_config(folder: Path) -> PreTrainedConfig:
    """Find out early what is wrong with the folder: the weights are read much later."""
    if not folder.is_dir():
        raise ConfigMistake(f"model.path={folder}: is no folder; give one that {_MAKER} has made")
    needed = {"config.json": "config.json", "*.safetensors": "weights (*.safetensors)"}
    for pattern, what in needed.items():
        if not any(folder.glob(pattern)):
            raise ConfigMistake(f"model.path={folder}: has no {what}; give a folder that {_MAKER} has made")
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(folder, **_LOCAL))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigMistake(f"model.path={folder}: config.json cannot be used: {_first_line(error)}") from error


def _read_weights(folder: Path) -> PreTrainedModel:
    """Of the type that they have in the files: `transformers` would convert them all at once, in several threads."""
    read = cast(Any, AutoModelForCausalLM).from_pretrained
    network: PreTrainedModel
    try:
        network, found = read(folder, dtype="auto", use_safetensors=True, output_loading_info=True, **_LOCAL)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigMistake(f"model.path={folder}: the weights cannot be read: {_first_line(error)}") from error
    missing = sorted(found["missing_keys"])
    if missing:  # transformers makes them up, and only warns
        raise ConfigMistake(
            f"model.path={folder}: {len(missing)} weights of {type(network).__name__} are not there, the first is "
            f"{missing[0]}; give the folder of a whole causal language model"
        )
    return network


def _convert(network: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights one by one out of the files, which `transformers` only maps into memory.

    Setting the parameter again lets a strategy that takes over weights as they are made take this one over before the
    next one is converted.
    """
    seen: set[int] = set()
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:  # two layers may share it
                seen.add(id(parameter))
                parameter.data = parameter.data.to(dtype)
            setattr(module, name, parameter)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
