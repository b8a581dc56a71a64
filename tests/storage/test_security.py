"""What other users of the machine can see, and what they can put in our way. SECURITY.md says what is promised."""

import ast
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lightning_ssd
from lightning_ssd.storage import spill_file as arena_module
from lightning_ssd.strategies import checkpoint_io as checkpoint_module
from lightning_ssd.strategies.checkpoint_io import StreamedCheckpointIO
from tests.support.opened import offloader_in
from tests.support.patience import PATIENCE_S

STRANGER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to play another user")


@pytest.fixture
def world():
    """A directory that everybody may write to, as /tmp is, reached through directories that everybody may enter."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def open_offloader(directory):
    return offloader_in(directory, activations="offload", min_tensor_bytes=0).open()


def arena_of(offloader):
    tier = offloader._parts.tiers.ssd
    return tier._arenas[0]


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# -- what others see -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_files_are_private_whatever_the_umask(has_tmpfile, world, monkeypatch):
    if not has_tmpfile:
        monkeypatch.setattr(arena_module, "_O_TMPFILE", 0)
    names = []
    open_file = os.open

    def recording(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            names.append(str(path))
        return open_file(path, flags, *args, **kwargs)

    monkeypatch.setattr(arena_module.os, "open", recording)
    before = os.umask(0)
    try:
        offloader = open_offloader(world)
    finally:
        os.umask(before)
    with offloader:
        assert os.listdir(world) == [], "there is nothing to be seen"
        facts = os.fstat(arena_of(offloader).fd)
        assert (facts.st_nlink, stat.S_IMODE(facts.st_mode), facts.st_uid) == (0, 0o600, os.geteuid())
        assert not os.get_inheritable(arena_of(offloader).fd)
        assert (len(names) > 1) is not has_tmpfile
        assert len(set(names)) == len(names), "a name came twice"
        assert all(len(name) >= 32 for name in names)
    assert os.listdir(world) == []


STRANGER_LOOKS = """
import os, sys
os.setgroups([]); os.setgid({stranger}); os.setuid({stranger})
for path in sys.argv[1:]:
    try:
        os.listdir(path) if os.path.isdir(path) else os.close(os.open(path, os.O_RDONLY))
        print("saw")
    except OSError as error:
        print(type(error).__name__)
"""


@needs_root
def test_another_user_sees_nothing(world):
    with open_offloader(world) as offloader:
        leaf = torch.rand(50_000, requires_grad=True)
        with offloader.saved_tensors():
            loss = leaf.exp().sum()
        offloader.flush()
        spilled = f"/proc/{os.getpid()}/fd/{arena_of(offloader).fd}"
        assert Path(spilled).stat().st_size > 0
        paths = [world, spilled]
        found = subprocess.run(
            [sys.executable, "-S", "-c", STRANGER_LOOKS.format(stranger=STRANGER), *map(str, paths)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert found.stdout.split() == ["saw", "PermissionError"]
        loss.backward()
        offloader.end_backward()


@contextmanager
def as_another_user():
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


@needs_root
def test_two_users_train_in_one_directory(world):
    with open_offloader(world) as mine, as_another_user(), open_offloader(world) as other:
        for offloader in (mine, other):
            leaf = torch.rand(50_000, requires_grad=True)
            with offloader.saved_tensors():
                loss = leaf.exp().sum()
            loss.backward()
            assert torch.equal(leaf.grad, leaf.detach().exp())
    assert os.listdir(world) == []


# -- what others put in our way ------------------------------------------------------------------------------------


def test_parents_are_made_as_the_user_is_wont(world):
    """Directories that the user names are not ours: those that are missing get the modes of the umask."""
    before = os.umask(0o022)
    try:
        open_offloader(world / "data").close()
    finally:
        os.umask(before)
    assert mode_of(world / "data") == 0o755


def test_a_checkpoint_changes_the_mode_of_no_other_file(tmp_path, monkeypatch):
    """Who may write to the directory can put a link where the unfinished file was."""
    victim = tmp_path / "key"
    victim.write_text("secret")
    victim.chmod(0o600)
    save = torch.save

    def swapping(checkpoint, stream):
        save(checkpoint, stream)
        (unfinished,) = (tmp_path / "checkpoints").iterdir()
        assert mode_of(unfinished) == 0o600, "readable before it is complete"
        unfinished.unlink()
        unfinished.symlink_to(victim)

    monkeypatch.setattr(checkpoint_module.torch, "save", swapping)
    StreamedCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "checkpoints" / "last.ckpt")
    assert mode_of(victim) == 0o600
    assert victim.read_text() == "secret"


# -- what is read, and what is shown -------------------------------------------------------------------------------

ROOT = Path(lightning_ssd.__file__).parent.parent
UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def dangers(source):
    """Ways of running what a file says, and names that others can foresee."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unsafe = words.get("weights_only") == "False" or words.get("allow_pickle") == "True"
            if unsafe or name in ("eval", "exec", "tempfile.mktemp", "yaml.load", "os.tmpnam"):
                found.append(ast.unparse(node))
    return found


OWN_PIPES = "lightning_ssd/scheduling/planner_process.py"
"""Unpickles what comes out of a pipe that only it and the process that it has started hold."""


def test_nothing_that_was_read_is_run():
    folders = ("lightning_ssd", "recipes")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 50
    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: dangers for path, dangers in found.items() if dangers} == {OWN_PIPES: ["pickle"]}


def test_the_search_for_dangers_can_fail():
    for source in (
        "def f():\n    from pickle import loads",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
    ):
        assert len(dangers(source)) == 1


def test_a_name_cannot_command_the_terminal(world):
    """The description goes to the log, to the verdict and to loggers' dashboards."""
    directory = world / "drive\x1b[2J\n\u202e<b>"
    with open_offloader(directory) as offloader:
        assert offloader.description.isprintable()
        assert r"drive\x1b[2J\n\u202e<b>" in offloader.description
