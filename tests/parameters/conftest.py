"""Places for models in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(spill_dir: Path) -> Path:
    """Not among the files of the offloader."""
    place = spill_dir / "model"
    place.mkdir()
    return place
