"""The tests of the strategy for Fabrics, with a Fabric of ``lightning_fabric``."""

from tests.support.second_package import again_over_pytorch_lightning

globals().update(
    again_over_pytorch_lightning(
        "tests.strategies.test_fabric",
        by_default=("test_by_name_with_all_defaults", "test_checkpoints_go_from_and_to_plain_fabric"),
    )
)
