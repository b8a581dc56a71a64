"""Offloaders for models on a CPU, or on a device whose copies end late."""

from contextlib import contextmanager, nullcontext

from lightning_ssd import HardwareProfile, Offloader
from tests.support.late import late_copies


@contextmanager
def offloaders(directory, policy, *, is_late=False):
    """Makes open ones with these modules and options of the policy; they are closed at the end.

    Args:
        directory: of their files; or a list of several.
        policy: makes it of options.
        is_late: they are for a device whose copies end late, with ``host_memory`` 0 unless it is told.
    """
    made = []
    with late_copies(max_delay_s=0.0005) if is_late else nullcontext() as copies:

        def make(*modules, **options):
            named = {name: options.pop(name) for name in ("_wrap_backend", "agree") if name in options}
            memory = {"host_memory": options.pop("host_memory", 0)} if is_late else {}
            if is_late:
                named["_copies"] = copies
            paths = directory if isinstance(directory, list) else [directory]
            hardware = HardwareProfile(paths=paths, **memory)
            made.append(Offloader(policy=policy(**options), hardware=hardware, **named))
            return made[-1].open(*modules)

        yield make
        for offloader in made:
            offloader.close()
