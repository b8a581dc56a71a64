"""The budget that an error names, as the user would write it."""

import re

from lightning_ssd.common.validation import parse_size

__all__ = ["named_budget"]


def named_budget(error, words="the smallest that works is"):
    """Return the size in bytes that follows ``words``."""
    found = re.search(rf'{words} "?(\w+)', str(error))
    assert found is not None, str(error)
    return parse_size(found[1])
