"""What a strategy takes and refuses."""

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_ssd.errors import ConfigError
from lightning_ssd.strategies.ssd_offload import SSDOffloadStrategy
from tests.support.trainers import LIGHTNING_NOISE, Net, fit, offload_strategy

pytestmark = [pytest.mark.filterwarnings(noise) for noise in LIGHTNING_NOISE]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "offload"}, r'policy=\'offload\' is a str\. Pass .*OffloadPolicy\(activations="offload"\)'),
        ({"policy": {"activations": "offload"}}, r"is a dict\. Pass .* type OffloadPolicy"),
        ({"hardware": "/mnt/nvme"}, r"hardware='/mnt/nvme' is a str\. Pass .* type HardwareProfile"),
        (
            {"start_method": "thread"},
            r"start_method='thread' is unknown\. Write one of 'popen', 'spawn', 'fork', 'forkserver'",
        ),
        ({"ddp_comm_state": PostLocalSGDState(None, None, 2)}, r"is a PostLocalSGDState.* or Lightning's DDPStrategy"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SSDOffloadStrategy(**arguments)


def test_before_a_trainer_took_it():
    strategy = SSDOffloadStrategy()
    assert not strategy.is_distributed
    assert strategy.launcher is None
    with pytest.raises(RuntimeError, match="it gets one from the Trainer"):
        _ = strategy.root_device
    with pytest.raises(RuntimeError, match=r"call Trainer\.fit"):
        strategy.training_step()


def test_restore_happens_before_setup():
    assert not SSDOffloadStrategy().restore_checkpoint_after_setup


def test_subclasses_keep_their_overrides(tmp_path):
    class Counting(SSDOffloadStrategy):
        steps = 0

        def training_step(self, *args, **kwargs):
            self.steps += 1
            return super().training_step(*args, **kwargs)

    trainer, _ = fit(Net, offload_strategy(tmp_path, Counting), tmp_path)
    assert trainer.strategy.steps == 6
