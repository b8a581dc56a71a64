from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ssd.planning.what_fits import TrainingSize, fit
from recipes import what_fits


def test_the_bytes_of_a_step_are_those_of_the_documented_formula() -> None:
    """docs/parameters.md: (2k + 1) w P + k g P + s P read, k g P + w P + s P written; 24 and 16 bytes for AdamW."""
    once = fit(TrainingSize(num_parameters=1e9, num_blocks=32, weight_bytes=4), gradients="offload")
    assert (once.read_bytes, once.written_bytes) == (24e9, 16e9)
    assert once.io_s(read_bytes_per_s=7e9, write_bytes_per_s=5e9) == pytest.approx(6.63, abs=0.01)
    twice = fit(TrainingSize(num_parameters=1e9, num_blocks=32, weight_bytes=4, num_backwards=2), gradients="offload")
    assert (twice.read_bytes, twice.written_bytes) == (36e9, 20e9)


def test_frozen_weights_cost_reads_alone() -> None:
    frozen = fit(TrainingSize(num_parameters=70e9, num_blocks=80, trained_share=0.0), gradients="keep")
    assert (frozen.read_bytes, frozen.written_bytes) == (280e9, 0)
    assert frozen.device_bytes == 2 * 140e9 / 80
    assert frozen.plain_bytes == frozen.waiting_bytes == 140e9


def test_gradients_that_wait_cost_a_write_and_no_room() -> None:
    size = TrainingSize(num_parameters=7e9, num_blocks=32)
    keep, offload = fit(size, gradients="keep"), fit(size, gradients="offload")
    assert keep.plain_bytes == offload.plain_bytes == 56e9
    assert keep.device_bytes == 14e9 + 4 * (14e9 + 28e9) / 32
    assert offload.device_bytes == (4 * (14e9 + 28e9) + 2 * 14e9) / 32
    assert offload.waiting_bytes - keep.waiting_bytes == 14e9
    assert offload.written_bytes - keep.written_bytes == 14e9


@pytest.mark.parametrize("gradients", ["keep", "offload"])
def test_what_waits_never_takes_more_of_the_device_with_more_blocks(gradients: str) -> None:
    held = [
        fit(TrainingSize(num_parameters=1e9, num_blocks=blocks), gradients=gradients).device_bytes  # type: ignore[arg-type]
        for blocks in (8, 16, 32, 64)
    ]
    assert held == sorted(held, reverse=True)


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    what_fits.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 8
    assert printed in (Path(__file__).parents[2] / "docs" / "what_fits.md").read_text()
