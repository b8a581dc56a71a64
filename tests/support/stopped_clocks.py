"""Time that stands still until a test lets it pass."""

from types import SimpleNamespace


def stopped_clock(patch, module):
    """Replace the time of a module, and return what lets seconds pass."""
    now_s = [1000.0]
    patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def wait(seconds):
        now_s[0] += seconds

    return wait
