"""Features of Lightning, one by one, with a Trainer of ``pytorch_lightning``."""

import pytest

from tests.support.second_package import again_over_pytorch_lightning

globals().update(again_over_pytorch_lightning("tests.parity.test_lightning_features"))
# The default tests train over both packages in tests/strategies/test_over_pytorch_lightning.py.
pytestmark = pytest.mark.exhaustive
