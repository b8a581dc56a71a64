"""Features of Lightning, one by one, with a Trainer of ``pytorch_lightning``."""

from tests.support.second_package import again_over_pytorch_lightning

for name, default in (
    ("features", "test_an_optimizer_that_is_wrapped_already"),
    ("checkpoints", "test_save_after_fit_has_ended"),
):
    globals().update(again_over_pytorch_lightning(f"tests.parity.test_lightning_{name}", by_default=(default,)))
