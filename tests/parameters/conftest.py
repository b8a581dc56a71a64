"""Offloaders of models whose weights and gradients may wait, and places with as much memory as a test wants."""

import pytest

from tests.support.offloaders import offloaders
from tests.support.residency import opened_place


@pytest.fixture
def folder(spill_dir):
    """A place for the files of a model, which are none of the offloader's."""
    place = spill_dir / "model"
    place.mkdir()
    return place


@pytest.fixture
def opened(request, spill_dir):
    """Open offloaders by the module's ``policy``; where it says ``IS_LATE``, for a device whose copies end late."""
    with offloaders(spill_dir, request.module.policy, is_late=getattr(request.module, "IS_LATE", False)) as make:
        yield make


@pytest.fixture
def many_parts(monkeypatch):
    """Update these models in many parts, of which some are slices of a weight or of a gradient."""
    monkeypatch.setattr("lightning_ssd.planning.update_memory._MIN_SUBGROUP_BYTES", 1 << 17)


def _place(kind):
    @pytest.fixture
    def opens(spill_dir, monkeypatch):
        with opened_place(kind, spill_dir, monkeypatch) as made:
            yield made

    return opens


host, card = map(_place, ("host", "device"))


@pytest.fixture(params=["host", "device"])
def place(request, spill_dir, monkeypatch):
    with opened_place(request.param, spill_dir, monkeypatch) as made:
        yield made
