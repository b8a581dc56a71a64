"""Runs any tests on a pretended device: ``pytest -p tests.support.pretended_plugin --pretended-seed 0 tests/...``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pretended_training import everything_there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pretended-seed", type=int, default=0, help="of the order in which its streams get on")


@pytest.fixture(autouse=True)
def on_a_pretended_device(request: pytest.FixtureRequest) -> Iterator[None]:
    with everything_there(seed=request.config.getoption("--pretended-seed")):
        yield
