"""The arithmetic of ``recipes.benchmarks.parameters``, and a run of one step in a turn."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from recipes.benchmarks.parameters import bound_bytes, expected_bytes, main, summarise

FACTS = {"parameter_bytes": 110, "small_bytes": 10, "trained_bytes": 110, "largest_unit_bytes": 20}


def test_all_that_is_trained_is_moved_with_its_gradient_and_states() -> None:
    assert expected_bytes(FACTS, "away") == (3 * 100 + 100 + 220, 100 + 100 + 220)


def test_what_is_allowed_in_memory() -> None:
    adapters = FACTS | {"trained_bytes": 7}
    gradients_and_states = 7 + 2 * 7
    assert bound_bytes(adapters, {"slots_bytes": 0}, 30, "frozen_away") == round(
        1.1 * (2 * 20 + 10 + gradients_and_states + 30)
    )
    assert bound_bytes(FACTS, {"slots_bytes": 40}, 30, "away") == round(1.1 * (4 * 20 + 40 + 20 + 30))


def test_steps_are_compared_with_keeps_of_the_same_turn() -> None:
    turns = [
        {"mode": mode, "turn": turn, "step_s": seconds, "stall_s": 0.0, "peak_bytes": 9, "drive_s": 3.0}
        for turn, keep_s in enumerate((2.0, 4.0))
        for mode, seconds in (("keep", keep_s), ("away", 6.0))
    ]
    fact = FACTS | {"empty_bytes": 4, "slots_bytes": 0, "activation_bytes": 0, "losses": ["a"], "weights": "w"}
    keep, away = summarise(turns, {"keep": fact, "away": fact | {"losses": ["b"]}})
    assert (keep["of_keep"], keep["equal"]) == (1.0, True)
    assert (away["of_keep"], away["of_bound"], away["peak_bytes"], away["equal"]) == (2.25, 1.75, 5, False)


@pytest.mark.exhaustive
def test_a_toy_run_has_the_bits_of_keeping(tmp_path: Path) -> None:
    arguments = ["--tiny", "--part", "compute", "--turns", "1", "--warmup", "1", "--threads", "1"]
    assert main([*arguments, "--dir", str(tmp_path / "drive"), "--json", str(tmp_path / "out.json")]) == 0
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [row["mode"] for row in parts["compute, full"]["summary"]] == ["keep", "states", "away", "keep_again"]
    # No weight is written. Reading a file may change its access time: without a journal, ext4 counts the inode's page
    # as written by the reader. A block of weights that waits has three thousand such pages.
    frozen = parts["compute, lora"]["summary"][1]
    assert frozen["mode"] == "frozen_away"
    assert frozen["process_written_bytes"] <= 4 * resource.getpagesize()
