"""The script ``lightning-ssd``. Its commands make no Trainer, so that it loads the package without Lightning.

``lightning_ssd/__init__.py`` looks for this module's name.
"""

from __future__ import annotations

from lightning_ssd.cli.main import app

__all__ = ["app"]
