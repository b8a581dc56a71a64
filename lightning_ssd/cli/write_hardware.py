"""A hardware profile as the text of a Hydra option of the group ``hardware``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import cast

from lightning_ssd.config import HardwareProfile
from lightning_ssd.planning.machine_profile import MachineProfile

__all__ = ["hardware_yaml"]


def hardware_yaml(name: str, hardware: HardwareProfile, machine: MachineProfile, *, comment: Iterable[str]) -> str:
    """The text of ``conf/hardware/NAME.yaml``, with every setting, so that each can be overridden on a command line.

    Args:
        name: of the option.
        hardware: for training.
        machine: for ``lightning-ssd plan``.
        comment: lines on where the numbers are from.
    """
    settings = dataclasses.asdict(hardware)
    settings["paths"] = [os.fspath(path) for path in cast(Sequence[str], hardware.paths)]
    return "\n".join(
        [
            "# @package _global_",
            *(f"# {line}" for line in comment),
            f"#   python -m recipes.train hardware={name}",
            "hardware:",
            "  _target_: lightning_ssd.HardwareProfile",
            *_lines(settings),
            "machine:",
            "  _target_: lightning_ssd.planning.machine_profile.MachineProfile",
            *_lines(dataclasses.asdict(machine)),
            "",
        ]
    )


def _lines(settings: dict[str, object]) -> list[str]:
    # YAML reads JSON, whatever is in a name.
    return [f"  {key}: {json.dumps(value)}" for key, value in settings.items()]
