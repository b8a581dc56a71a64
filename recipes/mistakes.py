"""What the user has written wrong, in one sentence and without a traceback."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["OWNERS", "ConfigMistake", "make_directory", "refusal", "say_as_keys"]

OWNERS = {"offload": "OffloadPolicy", "hardware": "HardwareProfile"}
"""Groups whose settings are those of a class of lightning_ssd, which checks them."""


class ConfigMistake(ValueError):
    """A key or option that does not exist, or a value that its key does not take. The message has the full name, the
    nearest match and what is allowed.
    """


def make_directory(key: str, path: Path) -> None:
    """Make a directory that a setting names, with its parents.

    Raises:
        ConfigMistake: it cannot be made, or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigMistake(f"{key}={path}: cannot be made ({error.strerror}); give a directory of yours") from error
    if not os.access(path, os.W_OK):
        raise ConfigMistake(f"{key}={path}: cannot be written to; give a directory of yours")


def refusal(error: Exception) -> str:
    """Say what a target has against its settings: the cause of Hydra's ``InstantiationException`` and the key.

    Raises:
        Exception: the given one, where it is no refusal but a fault, or ``$HYDRA_FULL_ERROR`` asks for it.
    """
    cause, key = error.__cause__, re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    # What Lightning raises for settings is a plain Exception by inheritance.
    is_refusal = isinstance(cause, ValueError | TypeError | OSError | ImportError) or "Misconf" in type(cause).__name__
    if not is_refusal or os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    said = say_as_keys(str(cause))
    names_its_key = said.startswith(tuple(f"{group}." for group in (*OWNERS, *([] if key is None else [key[1]]))))
    return said if key is None or names_its_key else f"{key[1]}: {said}"


def say_as_keys(message: str) -> str:
    """Name settings by the keys that were written, not by the classes that refuse them."""
    for group, owner in OWNERS.items():
        message = message.replace(f"{owner}.", f"{group}.")
    return message
