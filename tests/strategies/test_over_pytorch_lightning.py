"""The tests of the strategy for Trainers, with a Trainer of ``pytorch_lightning``."""

from tests.support.second_package import again_over_pytorch_lightning

globals().update(again_over_pytorch_lightning("tests.strategies.test_ssd_offload", but=("test_interactive_sessions",)))
