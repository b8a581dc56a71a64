"""Names of the ways to train that the benchmarks compare, and what they say.

``KIND``, ``budget=SIZE`` or ``budget=SHARE%``, then ``@RATE`` for a throttled drive: for example ``keep``,
``budget=40%``, ``auto@50MB/s``. A name is the key of a mode in every table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_ssd.common.validation import parse_size
from recipes.benchmarks.harness.throttle import parse_rate

__all__ = [
    "AGAIN",
    "AS_IT_COMES",
    "BASELINE",
    "CARD_MODES",
    "DEFAULT_MODES",
    "MODES",
    "ModeSpec",
    "parse_mode",
    "parse_modes",
]

BASELINE = "keep"
AGAIN = "keep_again"
AS_IT_COMES = "keep_as_it_comes"
MODES = {
    "keep": "plain PyTorch",
    "ssd": "lightning_ssd, all that is large enough is moved",
    "auto": "lightning_ssd, planned: as much as costs 5 % at most",
    "budget": "lightning_ssd, planned under a budget: budget=1.5GiB, or budget=40% of what keep holds",
    "ours_recompute": "lightning_ssd, each block recomputed",
    "recompute_offload": "lightning_ssd, each block recomputed, its inputs moved",
    "recompute": "torch.utils.checkpoint per block",
    "naive": "the tutorial's saved-tensor hooks: torch.save to one file each",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu",
    "keep_again": "plain PyTorch in a second process: how far it repeats its own bits and times here",
    "keep_as_it_comes": "plain PyTorch without THP_MEM_ALLOC_ENABLE=1, which all others have",
}
DEFAULT_MODES = ("keep", "ssd", "recompute", "naive", "save_on_cpu")
CARD_MODES = ("keep", "keep_again", "ssd", "budget=40%", "recompute")
"""By default on a CUDA card. Without "naive", which writes every saved tensor as often as it is saved: more than the
drives of many such machines have room for. Without "save_on_cpu", whose pinned memory is rounded up to powers of two.
"""

_POLICIES = {
    "ssd": "offload",
    "auto": "auto",
    "budget": "auto",
    "ours_recompute": "recompute",
    "recompute_offload": "recompute_offload",
}
_NAME = re.compile(r"(?P<kind>[a-z_]+)(=(?P<budget>[^@]+))?(@(?P<throttle>.+))?")


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """What a name says."""

    kind: str
    budget: str | None = None
    """A size, or a share of what keep holds such as "40%"."""
    throttle: str | None = None
    """Rate of the drive, such as "50MB/s"."""

    @property
    def activations(self) -> str | None:
        """The policy's setting; ``None`` for a mode that is not ours."""
        return _POLICIES.get(self.kind)

    @property
    def is_planned(self) -> bool:
        """Whether the first steps are profiled, so that they say nothing about the others."""
        return self.activations == "auto"

    @property
    def is_relative(self) -> bool:
        """Whether the budget is a share, so that what keep holds must be known."""
        return self.budget is not None and self.budget.endswith("%")

    def budget_bytes(self, held_bytes: int | None) -> int | None:
        """The budget.

        Args:
            held_bytes: what keep holds at its worst moment.

        Raises:
            ValueError: for a share of something unknown.
        """
        if self.budget is None:
            return None
        if not self.is_relative:
            return parse_size(self.budget, name="budget")
        if held_bytes is None:
            raise ValueError(f"budget={self.budget} is a share of what keep holds, which is not known")
        return round(held_bytes * float(self.budget.removesuffix("%")) / 100)

    def disk_bytes(self, held_bytes: int) -> int:
        """What lies on the drive at the worst moment, about; of naive, which writes a storage for each use, at least.

        Args:
            held_bytes: what keep holds at its worst moment.
        """
        if self.kind == "naive" or self.activations == "offload":
            return held_bytes
        if self.is_planned:
            return max(0, held_bytes - (self.budget_bytes(held_bytes) or 0))
        return 0


def parse_mode(name: str) -> ModeSpec:
    """Read a name.

    Raises:
        ValueError: there is no such mode, or its budget or rate cannot be read.
    """
    match = _NAME.fullmatch(name)
    if match is None or match["kind"] not in MODES:
        raise ValueError(f"{name}; allowed: {', '.join(MODES)}, with or without @RATE (ours only)")
    spec = ModeSpec(kind=match["kind"], budget=match["budget"], throttle=match["throttle"])
    if (spec.kind == "budget") != (spec.budget is not None):
        raise ValueError(f"{name}; allowed: budget=SIZE, budget=SHARE%, and no budget for the other modes")
    if spec.is_relative:
        share = spec.budget.removesuffix("%") if spec.budget else ""
        if not re.fullmatch(r"\d+(\.\d+)?", share) or not 0 < float(share) <= 100:
            raise ValueError(f"{name}; allowed: a share above 0 % and up to 100 %, such as budget=40%")
    elif spec.budget_bytes(None) == 0:
        raise ValueError(f"{name}; allowed: a budget above 0")
    if spec.throttle is not None:
        if spec.activations is None:
            raise ValueError(f"{name}; allowed: @RATE for modes that use the drive through us, so not {spec.kind}")
        parse_rate(spec.throttle)
    return spec


def parse_modes(text: str) -> list[str]:
    """The names in a list separated by commas, each checked.

    Raises:
        ValueError: as :func:`parse_mode`; or there is none, or one stands there twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"nothing; allowed: {', '.join(MODES)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text}; allowed: each mode once")
    for name in names:
        parse_mode(name)
    return names
