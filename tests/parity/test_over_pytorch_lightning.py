"""Features of Lightning, one by one, with a Trainer of ``pytorch_lightning``."""

import pytest

from tests.support.second_package import again_over_pytorch_lightning

for name in ("features", "checkpoints"):
    globals().update(again_over_pytorch_lightning(f"tests.parity.test_lightning_{name}"))
# The default tests train over both packages in tests/strategies/test_over_pytorch_lightning.py.
pytestmark = [*globals()["pytestmark"], pytest.mark.exhaustive]
