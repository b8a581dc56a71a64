"""Features of Lightning, one by one, with a Trainer of ``pytorch_lightning``."""

from tests.support.second_package import again_over_pytorch_lightning

globals().update(again_over_pytorch_lightning("tests.parity.test_lightning_features"))
