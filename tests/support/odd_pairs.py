"""An offloaded optimizer and its plain twin, of parameters that the test makes."""

import torch

from tests.support.optimizer_pairs import Pair, assert_same_states, equal


class OddPair(Pair):
    """A pair of parameters of any kind.

    Args:
        make: gets parameters, and makes an optimizer.
        parameters: makes them, the same ones each time.
    """

    def __init__(self, make, parameters):
        self.mine, self.plain = parameters(), parameters()
        self.inner, self.twin = make(self.mine), make(self.plain)
        self._generator = torch.Generator().manual_seed(100)

    def check(self, optimizer=None):
        """Halves may become no numbers, in both."""
        assert all(map(equal, self.mine, self.plain))
        if optimizer is not None:
            assert_same_states(optimizer.state_dict(), self.twin.state_dict())
