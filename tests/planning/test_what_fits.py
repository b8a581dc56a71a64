from pathlib import Path

import pytest

from lightning_ssd.planning.plan import TierRates
from lightning_ssd.planning.update_memory import subgroup_bytes
from lightning_ssd.planning.what_fits import ModelSize, UnitSize, fit
from recipes import what_fits
from recipes.what_fits import even_model


def test_the_bytes_of_a_step_are_those_of_the_documented_formula():
    """docs/parameters.md: (2k + 1) w P + k g P + s P read, k g P + w P + s P written; 24 and 16 bytes for AdamW."""
    once = fit(even_model(num_parameters=1e9, num_blocks=32, weight_bytes=4), gradients="offload")
    assert (once.read_bytes, once.written_bytes) == (24e9, 16e9)
    assert once.io_s(TierRates(read_bytes_per_s=7e9, write_bytes_per_s=5e9)) == pytest.approx(6.63, abs=0.01)
    twice = fit(even_model(num_parameters=1e9, num_blocks=32, weight_bytes=4, num_backwards=2), gradients="offload")
    assert (twice.read_bytes, twice.written_bytes) == (36e9, 20e9)


def test_frozen_weights_cost_reads_alone():
    frozen = fit(even_model(num_parameters=70e9, num_blocks=80, trained_share=0.0), gradients="keep")
    assert (frozen.read_bytes, frozen.written_bytes) == (280e9, 0)
    assert frozen.device_bytes == 2 * 140e9 / 80
    assert frozen.plain_bytes == frozen.waiting_bytes == 140e9


def test_gradients_that_wait_cost_a_write_and_no_room():
    size = even_model(num_parameters=7e9, num_blocks=32)
    keep, offload = fit(size, gradients="keep"), fit(size, gradients="offload")
    assert keep.plain_bytes == offload.plain_bytes == 56e9
    in_update = 4 * 14e9 / 32 + 4 * (256 << 20)
    assert keep.device_bytes == 14e9 + in_update
    assert offload.device_bytes == in_update + 2 * 14e9 / 32
    assert offload.waiting_bytes - keep.waiting_bytes == 14e9
    assert offload.written_bytes - keep.written_bytes == 14e9


def test_blocks_count_with_their_own_sizes():
    """An embedding, two blocks of which one is frozen, and what is too small to wait."""
    sizes = ((500, 500), (100, 100), (200, 0))
    units = tuple(UnitSize(weight_bytes=w * 1e6, trained_bytes=t * 1e6) for w, t in sizes)
    staying = UnitSize(weight_bytes=3e6, trained_bytes=1e6)
    size = ModelSize(units=units, staying=staying, state_bytes=2 * 601e6, num_backwards=2)
    kept = fit(size, parameters="keep", gradients="keep", optimizer_states="keep")
    assert kept.device_bytes == kept.plain_bytes == 803e6 + 601e6 + 1202e6
    assert kept.waiting_bytes == kept.read_bytes == kept.written_bytes == 0
    frozen = fit(size, parameters="offload", gradients="keep", optimizer_states="keep")
    assert (frozen.waiting_bytes, frozen.read_bytes, frozen.written_bytes) == (200e6, 2 * 2 * 200e6, 0)
    assert frozen.device_bytes == kept.device_bytes, "the only block that waits is in memory when it is used"
    states = fit(size, parameters="keep", gradients="keep")
    assert (states.waiting_bytes, states.read_bytes, states.written_bytes) == (1202e6, 1202e6, 1202e6)
    assert states.device_bytes == 803e6 + 601e6 + 4 * subgroup_bytes(1202 * 10**6, 1), "of 64 subgroups, four"
    everything = fit(size)
    assert everything.waiting_bytes == 800e6 + 600e6 + 1202e6
    assert everything.read_bytes == 4 * 800e6 + 600e6 + 2 * 600e6 + 1202e6
    assert everything.written_bytes == 2 * 600e6 + 600e6 + 1202e6
    assert everything.device_bytes == max(700e6, 600e6 + 1202e6 / 16) + 3e6 + 1e6 + 600e6


@pytest.mark.parametrize("num_directories", [1, 2, 8])
@pytest.mark.parametrize("state_bytes", [10**6, 10**8, 10**9, 10**12])
def test_states_in_an_update_are_four_subgroups_per_directory(state_bytes, num_directories):
    nothing = UnitSize(weight_bytes=0, trained_bytes=0)
    found = fit(ModelSize(units=(), staying=nothing, state_bytes=state_bytes), num_directories=num_directories)
    slots = 4 * num_directories * subgroup_bytes(state_bytes, num_directories)
    assert found.device_bytes == min(slots, state_bytes)


def test_the_page_shows_what_the_command_prints(capsys):
    what_fits.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 8
    assert printed in (Path(__file__).parents[2] / "docs" / "what_fits.md").read_text()
