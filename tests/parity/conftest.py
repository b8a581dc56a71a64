import gc
import sys

import pytest

from tests.parity import lightning_pairs
from tests.support.trainers import one_thread


@pytest.fixture(params=["states", pytest.param("everything", marks=pytest.mark.exhaustive)])
def what_is_away(request, monkeypatch):
    """Trainings of ``lightning_pairs`` run with optimizer states in files, and with weights and gradients as well."""
    for name, module in list(sys.modules.items()):
        if name.endswith("tests.parity.lightning_pairs"):  # over either package of Lightning
            monkeypatch.setattr(module, "away", lightning_pairs.AWAY[request.param])
    return str(request.param)


@pytest.fixture
def many_subgroups(small_subgroups):
    """Large parameters are cut, and sums are made in one order."""
    with one_thread():
        yield


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()
