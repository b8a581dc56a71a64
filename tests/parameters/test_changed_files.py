"""Frozen weights that wait in the file that they were mapped from, while that changes, or gives back other bytes."""

import gc
import os
import shutil
import time
import weakref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_ssd.errors import CorruptionError, StorageError
from lightning_ssd.parameters.files import source_files
from lightning_ssd.parameters.files.file_slices import private_mapping
from tests.parameters.test_paged_weights import policy  # noqa: F401  # that of ``opened``
from tests.parameters.test_weights_in_place import loaded, saved
from tests.support.weight_loops import built, frozen, same, train


def _overwritten(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x00" * 5000)


def _saved_again(path):
    state = {name: value * 2 for name, value in built().state_dict().items() if name != "head.weight"}
    path.write_bytes(b"")
    save_file(state, path.with_suffix(".new"))
    path.write_bytes(path.with_suffix(".new").read_bytes())


def _with_its_old_time(path):
    before = path.stat()
    _overwritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_overwritten, _saved_again, _with_its_old_time])
def test_a_file_that_changes_ends_training_in_the_same_step(change, opened, folder):
    (path,) = saved(folder)
    model = loaded([path])
    offloader = opened(model)
    updates = []

    def edit(model, step):
        updates.append(step)
        if step == 1:
            change(path)

    with pytest.raises(StorageError, match=r"model-00001-of-00001\.safetensors was changed while frozen weights wait"):
        train(model, offloader, between=edit)
    assert updates == [0, 1], "no update was made with other weights"
    with pytest.raises(StorageError, match="was changed"):
        offloader.close()


def test_a_change_right_after_the_taking_over_is_seen(opened, folder):
    """A clock that is coarse could give both the same time."""
    (path,) = saved(folder)
    model = loaded([path])
    os.utime(path)
    offloader = opened(model)
    os.utime(path)
    with pytest.raises(StorageError, match="was changed"):
        train(model, offloader)
    with pytest.raises(StorageError, match="was changed"):
        offloader.close()


@pytest.mark.parametrize("change", ["link", "unlink", "replace"])
def test_other_names_of_the_file_do_no_harm(change, opened, folder):
    (path,) = saved(folder)
    plain, model = loaded([path]), loaded([path])
    expected = train(plain)
    offloader = opened(model)
    if change == "link":
        os.link(path, path.with_suffix(".backup"))
    elif change == "unlink":
        path.unlink()
    else:
        shutil.copy(path, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
    time.sleep(0.05)
    assert same(train(model, offloader), expected)


def _flip_a_bit(path):
    """Of a weight of the second block, as a drive would: nothing tells of it."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 10_000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("verify", ["off", "full"])
def test_a_flipped_bit_is_noticed_with_full_verification(verify, monkeypatch, opened, folder):
    """What is patched stays so until the offloader has been closed."""
    paths = saved(folder)
    plain, model = loaded(paths), loaded(paths)
    expected = train(plain)
    monkeypatch.setattr(source_files.SourceFile, "look", lambda self: None)
    offloader = opened(model, verify=verify)
    half = train(model, offloader, steps=2)
    assert same(half, expected[: len(half)])
    _flip_a_bit(paths[0])
    if verify == "full":
        with pytest.raises(CorruptionError, match="has given back other bytes"):
            train(model, offloader, steps=2)
    else:
        train(model, offloader, steps=2)


def test_a_file_that_no_weight_waits_in_any_more_may_change(opened, folder):
    (path,) = saved(folder)
    model, other = loaded([path]), frozen(built())
    offloader = opened(model)
    offloader.register_module(other)
    train(model, offloader, steps=1)
    del model
    gc.collect()
    offloader.send_out_weights()
    path.write_bytes(bytes(path.stat().st_size))
    train(other, offloader, steps=1)
    offloader.close()


def test_a_weight_that_was_copied_from_a_changed_file_is_noticed(opened, folder):
    (path,) = saved(folder)
    model = loaded([path])
    offloader = opened(model)
    train(model, offloader, steps=1)
    os.utime(path)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    met = []

    def step():
        batch = torch.zeros(3)
        met.append(weakref.ref(batch))
        train(model, offloader, steps=1)

    for _ in range(2):
        with pytest.raises(StorageError, match="was changed while frozen weights wait in it"):
            step()
    gc.collect()
    assert [batch() for batch in met] == [None, None], "what a file's error is kept with holds no frame of a step"
    with pytest.raises(StorageError, match="was changed while frozen weights wait in it"):
        offloader.close()


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_weight_may_go_while_its_bytes_are_verified(is_edited, opened, folder, monkeypatch):
    model = loaded(saved(folder))
    offloader = opened(model, verify="full")
    pager = offloader._parts.parameters.pager
    weight = pager.find(model.blocks[0].up.weight.untyped_storage())
    if is_edited:
        model.blocks[0].up.weight.data.view(-1)[0] += 1
    look, are_mapped = source_files.checksum, []

    def drop_then_look(region):
        up = model.blocks[0].up
        up.weight = nn.Parameter(up.weight.detach().clone(), requires_grad=False)
        pager.border()
        are_mapped.append(private_mapping(region.address) is not None)
        return look(region) if are_mapped[-1] else 0

    monkeypatch.setattr(source_files, "checksum", drop_then_look)
    weight.memory.bring_in()
    assert are_mapped == [True]
