"""Graphs used in every way that autograd allows: several times, in other orders, from other threads, half, never."""

import pytest
import torch

from tests.parity.graph_programs import PROGRAMS, network
from tests.parity.models import floats
from tests.support.helpers import (
    DRAINED,
    SETUPS,
    Session,
    assert_identical,
    assert_released,
    assert_same,
    open_offloader,
    outcome,
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_exact(name, tmp_path):
    raises = name == "backward_twice_without_retaining"
    assert_same(PROGRAMS[name], tmp_path, setups=SETUPS, raises=raises)


def test_all_programs_through_one_offloader(tmp_path):
    """Twice over, so that each runs with what the others taught the prefetcher and left behind."""
    expected = {name: outcome(program, Session()) for name, program in PROGRAMS.items()}
    with open_offloader(tmp_path) as offloader:
        for drained in (False, True):
            for name, program in PROGRAMS.items():
                assert_identical(outcome(program, Session(offloader, drained=drained)), expected[name], name)
        assert_released(offloader)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_costs_nothing(mode, tmp_path):
    with open_offloader(tmp_path, DRAINED) as offloader:
        session = Session(offloader, drained=True)
        model = network(session)
        before = offloader.stats
        with session.saved(), mode():
            model(floats(0, 60, 40)).square().mean()
        session.drain()
        session.end()
        assert offloader.stats == before
