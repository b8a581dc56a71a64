import gc

import pytest

from tests.support.trainers import one_thread


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture
def collected():
    """A Fabric is a cycle: what it holds goes before the next test."""
    yield
    gc.collect()
