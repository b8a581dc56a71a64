"""Determinism of the recipes' processes. The settings are the process', CUDA or not, so that a CPU shows them."""

import os

import pytest
import torch
from transformers import GPT2Config

from recipes.benchmarks.harness.shapes import Shape
from recipes.determinism import make_deterministic, settle_first_calls
from recipes.models import build_network

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch):
    """As a new process has them; they are put back by what every test gets."""
    monkeypatch.delenv(VARIABLE, raising=False)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def settings():
    return (
        os.environ.get(VARIABLE),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def scattered():
    """An operation without a deterministic version, on a CPU as well."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_on_cuda_all_three_are_set(device):
    """Not to warn: fused attention would stay as it is."""
    assert make_deterministic(device) == "deterministic operations only"
    assert settings() == (":4096:8", True, False, False)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        scattered()


def test_on_a_cpu_nothing_is_set_or_tried():
    before = settings()
    assert make_deterministic("cpu", lambda: pytest.fail("tried")) == ""
    assert settings() == before == (None, False, False, True)


def test_an_operation_without_a_deterministic_version_is_told_and_goes_on():
    told = make_deterministic("cuda", scattered)
    assert told.startswith("NOT deterministic: put_")
    assert settings() == (":4096:8", True, True, False)
    with pytest.warns(UserWarning, match="put_"):
        scattered()


# -- first calls: the race itself shows in one process of twenty or fewer, so each call is shown to come before it -----


def test_every_recipe_that_trains_makes_them():
    """Otherwise plain training could differ from itself, and from ours."""
    settle_first_calls.cache_clear()
    build_network(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2), "causal")
    assert settle_first_calls.cache_info().currsize == 1
    settle_first_calls.cache_clear()
    Shape(layers=1, width=8, heads=2, sequence=4, vocabulary=8).model()
    assert settle_first_calls.cache_info().currsize == 1


def test_random_numbers_and_modes_stay_as_they_were():
    before = torch.get_rng_state()
    settle_first_calls.cache_clear()
    with torch.device("meta"):
        settle_first_calls()
    assert torch.equal(torch.get_rng_state(), before)
