"""Offloaders by their settings alone."""

from dataclasses import fields

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy


def offloader_in(paths, **settings):
    """Make one that is not open yet, with files in a directory or in several, also where they lie in memory.

    It allows unsuitable paths, which nothing then refuses or warns of. Tests of that make their offloader themselves.

    Args:
        paths: the directories.
        settings: of the policy, of the hardware, and of the offloader itself.
    """
    settings = {"paths": paths, "allow_unsuitable_paths": True} | settings

    def of(kind):
        return kind(**{one.name: settings.pop(one.name) for one in fields(kind) if one.name in settings})

    return Offloader(policy=of(OffloadPolicy), hardware=of(HardwareProfile), **settings)
