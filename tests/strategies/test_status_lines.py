"""Lines about what takes long, beside the progress bars of Lightning."""

import pytest

from tests.support.terminal import run_on_terminal, screen

TRAINING = """
import warnings
from functools import partialmethod
from pathlib import Path
from lightning.pytorch.callbacks import ModelCheckpoint, {bar}
from lightning_ssd import HardwareProfile, OffloadMonitor, OffloadPolicy, SSDOffloadStrategy
from lightning_ssd.common import status_line, task
from tests.support.trainers import Net, make_trainer

warnings.simplefilter("ignore")
task.DELAY_S = 0.0
status_line.StatusLine.__init__.__kwdefaults__["delay_s"] = 0.0  # all work takes long
status_line._Line.__init__ = partialmethod(status_line._Line.__init__, mininterval=0.0)
directory = Path({directory!r})
strategy = SSDOffloadStrategy(
    policy=OffloadPolicy(min_tensor_bytes=4096, optimizer_states="offload"),
    hardware=HardwareProfile(paths=[directory], allow_unsuitable_paths=True),
)
callbacks = [{bar}(leave=True), OffloadMonitor(verdict=False), ModelCheckpoint(directory, filename="kept")]
trainer = make_trainer(
    strategy, directory, callbacks=callbacks, enable_progress_bar=True, enable_checkpointing=True, max_epochs=2
)
trainer.fit(Net())
"""
IN_SETUP = ("Opening spill files ...", "Opening and trying the files of optimizer states ...", "Reserving ")
IN_TRAINING = ("Laying out optimizer states, in the first step: ", "Saving kept.ckpt: ")
NUMBERS = ("saved%",)


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_bars_stay_as_they_are(bar, tmp_path, forks):
    written = run_on_terminal(TRAINING.format(bar=bar, directory=str(tmp_path)), begin=forks)
    assert all(doing in written for doing in IN_SETUP)
    # A live display of rich would keep what is written beside it.
    assert all((doing in written) == (bar == "TQDMProgressBar") for doing in IN_TRAINING)
    seen = screen(written)
    assert not [line for line in seen if any(doing in line for doing in (*IN_SETUP, *IN_TRAINING))]
    last = next(line for line in seen if line.startswith("Epoch 1"))
    assert "6/6" in last
    assert all(number in " ".join(seen) for number in NUMBERS)
