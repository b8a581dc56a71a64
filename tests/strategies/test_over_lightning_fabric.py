"""The tests of the strategy for Fabrics, with a Fabric of ``lightning_fabric``."""

from tests.support.second_package import again_over_pytorch_lightning

globals().update(again_over_pytorch_lightning("tests.strategies.test_fabric"))
