"""The table of ``docs/what_fits.md``: which model fits on which card. Arithmetic, nothing is measured.

python -m recipes.what_fits
"""

from __future__ import annotations

from typing import Literal

from lightning_ssd.planning.plan import TierRates
from lightning_ssd.planning.what_fits import NUM_STATES, ModelSize, UnitSize, fit

__all__ = ["even_model", "main"]

_GB = 1e9
_CARDS_GB = (24, 48, 80, 141)
_ROOM = 0.9
"""Of a card; the rest is for its context and what allocators waste."""
_MODELS = {"7 B": (7e9, 32), "13 B": (13e9, 40), "70 B": (70e9, 80)}
"""Parameters and blocks."""
_GRADIENTS: tuple[Literal["keep", "offload"], ...] = ("keep", "offload")
_LORA_SHARE = 0.005
_DRIVES = TierRates(read_bytes_per_s=7e9, write_bytes_per_s=5e9)
"""Bytes per second of one drive."""
_FLOPS = 0.4 * 312e12
"""Per second: 40 % of an A100's in bfloat16, by its data sheet."""
_TOKENS = 8_192
"""Of a step."""


def main() -> None:
    """Print the table."""
    print(
        "| model | trained | type | gradients | plain, GB | on the card, GB | smallest card | waits, GB "
        "| read, GB | written, GB | moving, s | computing, s |"
    )
    print("|---" * 12 + "|")
    for model, (num_parameters, num_blocks) in _MODELS.items():
        for trained, share in (("all", 1.0), ("LoRA", _LORA_SHARE)):
            for dtype, nbytes in (("bfloat16", 2), ("float32", 4)):
                size = even_model(
                    num_parameters=num_parameters, num_blocks=num_blocks, trained_share=share, weight_bytes=nbytes
                )
                for gradients in _GRADIENTS if trained == "all" else _GRADIENTS[:1]:
                    # Forward 2, backward 4 (2 where weights are frozen), per parameter and token.
                    numbers = _numbers(size, gradients, flops=(4 + 2 * share) * num_parameters * _TOKENS)
                    print(f"| {model} | {trained} | {dtype} | {gradients} {numbers} |")


def even_model(
    *, num_parameters: float, num_blocks: int, trained_share: float = 1.0, weight_bytes: int = 2, num_backwards: int = 1
) -> ModelSize:
    """A model of equal blocks and nothing else.

    Args:
        num_parameters: adapters counted in.
        num_blocks: at least 1.
        trained_share: of the parameters; small for LoRA.
        weight_bytes: per parameter: 2 in bfloat16, 4 in float32; a gradient takes as much.
        num_backwards: per update.
    """
    block_bytes = weight_bytes * num_parameters / num_blocks
    block = UnitSize(weight_bytes=block_bytes, trained_bytes=trained_share * block_bytes)
    return ModelSize(
        units=(block,) * num_blocks,
        staying=UnitSize(weight_bytes=0, trained_bytes=0),
        state_bytes=NUM_STATES * num_blocks * block.trained_bytes,
        num_backwards=num_backwards,
    )


def _numbers(size: ModelSize, gradients: Literal["keep", "offload"], *, flops: float) -> str:
    found = fit(size, gradients=gradients)
    card = next((f"{card} GB" for card in _CARDS_GB if found.device_bytes <= _ROOM * card * _GB), "none")
    moving_s = found.io_s(_DRIVES)
    gigabytes = [f"{nbytes / _GB:.1f}" for nbytes in (found.plain_bytes, found.device_bytes)]
    rest = [f"{nbytes / _GB:.1f}" for nbytes in (found.waiting_bytes, found.read_bytes, found.written_bytes)]
    return "| " + " | ".join([*gigabytes, card, *rest, f"{moving_s:.1f}", f"{flops / _FLOPS:.1f}"])


if __name__ == "__main__":
    main()
