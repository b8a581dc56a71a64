"""Offloaders with weights, gradients and optimizer states in files, of a host and of a device."""

from contextlib import contextmanager

from lightning_ssd import HardwareProfile, Offloader, OffloadPolicy
from tests.support.late import late_copies

EVERYTHING = {"parameters": "offload", "gradients": "offload", "optimizer_states": "offload"}
MIN_TENSOR_BYTES = 4096


@contextmanager
def all_away(directory, **policy):
    """An open offloader with everything in files."""
    chosen = EVERYTHING | {"activations": "keep", "min_tensor_bytes": MIN_TENSOR_BYTES} | policy
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True)
    with Offloader(policy=OffloadPolicy(**chosen), hardware=hardware) as offloader:
        yield offloader


@contextmanager
def away_from_device(directory, **policy):
    """An open offloader for a device whose copies end late, with weights and states away from it."""
    chosen = {"parameters": "offload", "optimizer_states": "offload", "min_tensor_bytes": MIN_TENSOR_BYTES} | policy
    hardware = HardwareProfile(paths=[directory], allow_unsuitable_paths=True, host_memory="256KiB")
    with (
        late_copies(max_delay_s=0.0005) as copies,
        Offloader(policy=OffloadPolicy(**chosen), hardware=hardware, _copies=copies) as offloader,
    ):
        yield offloader


def large(model, *, trained=None):
    """The parameters that may wait; only those that are trained, or are not, if asked."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.nbytes >= MIN_TENSOR_BYTES and trained in (None, parameter.requires_grad)
    ]


def storage_bytes(parameters):
    """Tied ones count once."""
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())
