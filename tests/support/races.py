"""Trainings on a pretended device whose streams run in any order, and whose races are faults."""

from tests.support.opened import offloader_in
from tests.support.pretended_training import on, pretended_device
from tests.support.pretended_weights import weights_of
from tests.support.weight_loops import same


def assert_no_race(train, directory, *, seed=0, lag_s=0.001, **settings):
    """Compare a training with the plain one on that device.

    Args:
        train: gets an offloader or ``None``, and the device, and gives tensors.
        directory: of the files.
        seed: of the order in which streams run.
        lag_s: how late they are.
        settings: of the offloader.
    """
    with pretended_device(seed=seed, lag_s=lag_s) as device, weights_of(device):
        expected = train(None, device)
        with offloader_in(directory, **settings, **on(device)) as offloader:
            found = train(offloader, device)
        assert same(found, expected)
    assert not device.faults, set(device.faults)
    assert device.num_copies > 0
