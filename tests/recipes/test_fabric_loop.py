"""The Fabric recipe: its real entry point in tiny form."""

from pathlib import Path

import pytest

from recipes import fabric_loop, plain_loop
from tests.support.leftovers import open_files

TINY = ["experiment=smoke", "trainer.max_steps=2", "data.batch_size=2"]


def test_the_fabric_loop_gives_the_weights_of_the_plain_loop(spill_dir, capsys):
    plain = plain_loop.main([*TINY, "offload=none", f"output_dir={spill_dir}"])
    for mode, more in (("none", []), ("ssd", ["offload.optimizer_states=offload", "offload.min_tensor_bytes=64KiB"])):
        output = spill_dir / mode
        ours = fabric_loop.main([*TINY, f"offload={mode}", *more, f"output_dir={output}"])
        assert ours.losses == plain.losses
        assert ours.weights_digest == plain.weights_digest
        assert ours.counted == (mode == "ssd")
        first, *rows = (output / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
        assert len(rows) == 2
        assert ("memory/activations_resident_peak_gib" in first) == (mode == "ssd")
        assert open_files(output) == [], "it was not closed"
    assert ours.written_bytes_per_step > 0
    assert str(spill_dir / "ssd") in ours.backend
    printed = capsys.readouterr().out
    assert printed.count("step 2: loss") == 3
    assert "model=gpt offload=ssd" in printed


def test_mistakes_and_unsuitable_directories_are_one_clear_line(tmp_path):
    with pytest.raises(SystemExit, match=r"Did you mean offload\.min_tensor_bytes"):
        fabric_loop.main(["+offload.min_tensor_byte=4"])
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here to be refused")
    with pytest.raises(SystemExit, match="tmpfs"):
        fabric_loop.main([*TINY, "offload=ssd", "hardware.paths=[/dev/shm]", f"output_dir={tmp_path}"])
