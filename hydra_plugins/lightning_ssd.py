"""Lets every Hydra application find our options, as ``lightning_ssd/offload=ssd``.

Hydra imports this file at the start of each of its applications, so that it imports nothing of ours.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["LightningSSDSearchPath"]


class LightningSSDSearchPath(SearchPathPlugin):
    """Appends the directory ``conf`` of the package, behind the application's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra."""
        package = find_spec("lightning_ssd")  # of the top level: this runs nothing of it
        if package is not None and package.submodule_search_locations:
            conf = Path(package.submodule_search_locations[0]).resolve() / "conf"
            search_path.append(provider="lightning_ssd", path=f"file://{conf}")
