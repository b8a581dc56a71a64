"""The randomised soak in short form, and that it would notice what it looks for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_ssd import OffloadPolicy
from tests.faults import soak as module_under_test
from tests.faults.models import Runner, random_task
from tests.faults.soak import Drive, Soak

pytestmark = pytest.mark.filterwarnings("ignore")  # that writes fail is the purpose
WATCHDOG_S = 100.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread, and lose much where it has to wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sixty_random_steps_have_the_bits_of_the_plain_twin(spill_dir: Path) -> None:
    soak = Soak(spill_dir, seed=1, watchdog_s=WATCHDOG_S)
    soak.run(60)
    assert soak.wrong == []
    assert soak.left == []
    assert soak.steps == 60
    assert soak.moved_bytes > 0, "nothing was offloaded"
    assert soak.faults > 0, "no fault was injected"


def test_a_wrong_bit_is_noticed(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that lies, and nobody who checks."""
    monkeypatch.setattr(Drive, "TEMPERS", ("lying",))
    policy = OffloadPolicy(activations="offload", min_tensor_bytes=0, verify="off")
    monkeypatch.setattr(Soak, "_policy", lambda self, temper: policy)
    soak = Soak(spill_dir, seed=2, watchdog_s=WATCHDOG_S)
    for steps in range(5, 80, 5):  # an episode may read next to nothing
        soak.run(steps)
        if soak.wrong:
            break
    assert soak.wrong
    assert "lying drive" in soak.wrong[0]
    assert not soak.faultless


def test_what_is_left_is_noticed(spill_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_GONE_WITHIN_S", 0.0)
    soak = Soak(spill_dir, seed=3, watchdog_s=WATCHDOG_S)
    (spill_dir / "forgotten").touch()
    soak._settle()
    assert soak.left == ["forgotten after episode 0"]
    assert not soak.faultless


@pytest.mark.parametrize("kind", ["perceptron", "convolution", "attention", "recurrent"])
def test_a_step_made_anew_has_the_same_bits(kind: str) -> None:
    """What lets the soak go on after an error: nothing of the failed try is left in the model."""
    task = random_task(random.Random(5), kinds=(kind,))
    stumbling, steady = Runner(task), Runner(task)

    def fail() -> None:
        raise KeyError("injected")

    stumbling.before_backward = fail
    with pytest.raises(KeyError):
        stumbling.gradients(0)
    stumbling.before_backward = lambda: None
    for got, expected in (
        (stumbling.gradients(0), steady.gradients(0)),
        (list(stumbling.model.buffers()), list(steady.model.buffers())),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
