"""``python -m lightning_ssd``: the same as the command ``lightning-ssd``."""

from __future__ import annotations

from lightning_ssd.cli.main import app

__all__ = ["app"]

if __name__ == "__main__":
    app(prog_name="lightning-ssd")
