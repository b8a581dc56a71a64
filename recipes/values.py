"""What each value of the configuration may be, so that a wrong one is refused by its own key before anything is built.

Keys that somebody adds (``+trainer.max_time=...``) have no rule here: what takes them checks them. The settings of
``offload`` and ``hardware`` are checked by their own classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recipes.mistakes import OWNERS, say_as_keys

__all__ = ["BY_THEIR_TARGET", "Rule", "is_interpolation", "mistake_in", "rule_of"]

_LARGEST = 2**63 - 1
# Without these, a setting alone would be refused because it has no effect.
_COMPANIONS: dict[str, dict[str, Any]] = {
    "master_weights": {"optimizer_states": "offload"},
    "per_parameter_optimizers": {"optimizer_states": "offload"},
    "gradients": {"optimizer_states": "offload", "parameters": "offload"},
}
_TIME = re.compile(r"\d+:\d\d:\d\d:\d\d")


@dataclass(frozen=True)
class Rule:
    """One kind of value."""

    expected: str
    accepts: Callable[[Any], bool]
    example: str

    def or_one_of(self, *others: Any) -> Rule:
        """The same, with some values besides."""
        named = ", ".join("null" if other is None else str(other) for other in others)
        accepts = self.accepts
        return Rule(
            f"{self.expected}, or {named}", lambda value: _is_one_of(value, others) or accepts(value), self.example
        )


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Without taking true for 1."""
    return any(type(value) is type(other) and value == other for other in allowed)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _whole(low: int, high: int = _LARGEST) -> Rule:
    bounds = f"of at least {low}" if high == _LARGEST else f"from {low} to {high}"
    return Rule(f"a whole number {bounds}", lambda value: _is_whole(value) and low <= value <= high, str(max(low, 1)))


def _number(low: float, high: float = math.inf) -> Rule:
    bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    return Rule(f"a number {bounds}", lambda value: _is_number(value) and low <= value <= high, "0.1")


def _batches(low: int) -> Rule:
    """So many, or a share of all."""
    return Rule(
        f"a whole number of at least {low} (so many batches) or a share of them above 0, up to 1.0",
        lambda value: value >= low if _is_whole(value) else isinstance(value, float) and 0 < value <= 1,
        "10",
    )


_POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and value > 0, "1.5")
_SWITCH = Rule("true or false", lambda value: isinstance(value, bool), "true")
_TEXT = Rule("text", lambda value: isinstance(value, str), "mine")
_PATH = Rule("a path", lambda value: isinstance(value, str) and value.strip() != "" and "\0" not in value, "./mine")
_SEED = _whole(0, 2**32 - 1)
_DEVICES = Rule(
    "a number of devices of at least 1, or a list of their numbers",
    lambda value: (_is_whole(value) and value >= 1) or (isinstance(value, list) and all(map(_is_whole, value))),
    "1",
)
_TIME_OR_BATCHES = Rule(
    f"{_batches(1).expected}, or a time as DD:HH:MM:SS",
    lambda value: bool(_TIME.fullmatch(value)) if isinstance(value, str) else _batches(1).accepts(value),
    "10",
)

_RULES: dict[str, Rule] = {
    "seed": _SEED,
    "output_dir": _PATH,
    "data.num_batches": _whole(1),
    "data.vocab_size": _whole(4, 2**31 - 1),  # three special tokens, and one to learn
    "data.sequence_length": _whole(2),  # seq2seq takes the half of it
    "data.batch_size": _whole(1),
    "data.num_val_batches": _whole(0),
    "data.seed": _SEED,
    "data.path": _PATH.or_one_of(None),
    "data.tokenizer": _PATH.or_one_of(None),
    "data.max_text_bytes": _whole(1),
    "data.cache_dir": _PATH.or_one_of(None),
    "model.learning_rate": _number(0),
    "model.weight_decay": _number(0),
    "model.path": _PATH,
    "model.lora": Rule("null, or the settings of the adapters", lambda v: v is None or isinstance(v, dict), "null"),
    "model.lora.rank": _whole(1),
    "model.lora.alpha": _POSITIVE,
    "model.lora.target_modules": Rule(
        "a list of names", lambda v: isinstance(v, list) and bool(v) and all(map(_TEXT.accepts, v)), "[q_proj,v_proj]"
    ).or_one_of(None),
    "trainer.max_epochs": _whole(1).or_one_of(-1, None),
    "trainer.max_steps": _whole(1).or_one_of(-1),
    "trainer.limit_train_batches": _batches(1).or_one_of(None),
    "trainer.limit_val_batches": _batches(0).or_one_of(0.0, None),
    "trainer.val_check_interval": _TIME_OR_BATCHES.or_one_of(None),
    "trainer.check_val_every_n_epoch": _whole(1).or_one_of(None),
    "trainer.num_sanity_val_steps": _whole(0).or_one_of(-1, None),
    "trainer.log_every_n_steps": _whole(0).or_one_of(None),
    "trainer.accumulate_grad_batches": _whole(1),
    "trainer.gradient_clip_val": _number(0).or_one_of(None),
    "trainer.enable_checkpointing": _SWITCH.or_one_of(None),
    "trainer.enable_model_summary": _SWITCH.or_one_of(None),
    "trainer.enable_progress_bar": _SWITCH.or_one_of(None),
    "trainer.default_root_dir": _PATH.or_one_of(None),
    "trainer.devices": _DEVICES.or_one_of("auto", -1),
    "callbacks.offload_monitor.report_dir": _PATH.or_one_of(None),
    "machine": Rule(
        "null, or its facts as in hardware", lambda value: value is None or isinstance(value, dict), "null"
    ),
    "machine.accelerator": _TEXT,
    "machine.precision": _TEXT,
    "machine.num_devices": _whole(1),
    "machine.num_drives": _whole(1),
    "machine.compute_efficiency": Rule("above 0, up to 1", lambda v: _is_number(v) and 0 < v <= 1, "0.4"),
    **{
        f"machine.{name}": _POSITIVE.or_one_of(None)
        for name in (
            *("device_memory_gb", "device_peak_tflops", "link_gb_per_s", "host_memory_gb"),
            *("drive_write_gb_per_s", "drive_read_gb_per_s", "drive_capacity_tb"),
        )
    },
    "logger.csv.save_dir": _PATH,
    "logger.csv.name": _TEXT,
    "logger.csv.version": Rule("text or a number", lambda value: isinstance(value, str) or _is_whole(value), "mine"),
    "logger.wandb.project": _TEXT,
    "logger.wandb.name": _TEXT.or_one_of(None),
    "logger.wandb.group": _TEXT.or_one_of(None),
    "logger.wandb.job_type": _TEXT.or_one_of(None),
    "logger.wandb.save_dir": _PATH,
    "logger.wandb.offline": _SWITCH,
}

BY_THEIR_TARGET = frozenset(
    {"trainer.accelerator", "trainer.precision", "trainer.strategy", "model.objective", "model.config", "model.dtype"}
)
"""Keys without a rule: their targets list what they take, which depends on versions and machines."""

_ARCHITECTURE = "model.config."


def rule_of(key: str) -> Rule | None:
    """Return what a key takes; ``None`` where its target knows better."""
    if key.startswith(_ARCHITECTURE):
        name = key.removeprefix(_ARCHITECTURE)
        if re.search(r"drop(out)?(_|$)", name):
            return _number(0, 1)
        if name.endswith("_token_id"):
            return _whole(0).or_one_of(None)
        return _whole(1) if name in _ARCHITECTURE_SIZES else None
    return _RULES.get(key)


_ARCHITECTURE_SIZES = frozenset(
    (
        *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "max_position_embeddings", "hidden_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
        *("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    )
)


def is_interpolation(value: Any) -> bool:
    """Whether a value is somebody else's, which is checked where it is written."""
    return isinstance(value, str) and value.startswith("${")


def mistake_in(key: str, value: Any) -> str | None:
    """Return what is wrong with a value: what was expected, what was got; ``None``: nothing."""
    if is_interpolation(value):
        return None
    group, _, name = key.partition(".")
    if group in OWNERS and name:
        return _refused_setting(group, name, value)
    rule = rule_of(key)
    if rule is None or rule.accepts(value):
        return None
    return f"{key}={_written(value)}: expected {rule.expected}, got {_kind(value)}; for example {key}={rule.example}"


def _refused_setting(group: str, name: str, value: Any) -> str | None:
    import lightning_ssd  # takes seconds, which other mistakes need not wait for

    owner = getattr(lightning_ssd, OWNERS[group])
    if name not in owner.__dataclass_fields__:
        return None
    try:
        owner(**{**_COMPANIONS.get(name, {}), name: value})
    except ValueError as error:
        return say_as_keys(str(error))
    return None


def _written(value: Any) -> str:
    """As on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _written(value)
    if isinstance(value, str):
        return f"the text {value!r}"
    return f"{value!r}" if isinstance(value, int | float) else f"a {type(value).__name__}"
