"""The one place that talks to W&B's server, and only where the user asks."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_ssd.errors import ConfigError

__all__ = ["has_key", "save"]


def has_key() -> bool:
    """Whether W&B knows who we are: a key in the environment or in its own file. Asks no server."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # the way of older ones


def save(workspace: Any) -> str:
    """Send a workspace of wandb-workspaces, and return where it is.

    Raises:
        ConfigError: W&B does not take it.
    """
    import wandb

    try:
        if not workspace.entity:
            workspace.entity = wandb.Api().default_entity
        return str(workspace.save_as_new_view().url)
    except Exception as error:  # of many kinds: network, key, project, and what the server says
        raise ConfigError(
            f"expected W&B to take the workspace for {workspace.entity}/{workspace.project}, and got: {error}; name "
            "--entity and an existing --project, or give --offline"
        ) from error
