"""The tests of the strategy for Trainers, with a Trainer of ``pytorch_lightning``."""

from tests.support.second_package import again_over_pytorch_lightning

globals().update(
    again_over_pytorch_lightning(
        "tests.strategies.test_ssd_offload",
        by_default=("test_by_name_with_all_defaults", "test_plans_are_followed_and_a_budget_is_kept"),
        but=("test_interactive_sessions",),
    )
)
