"""Runs tests of a file once more, in a process that finds a stand-in for a library of NVIDIA's."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

COMPILER = shutil.which("cc") or shutil.which("gcc")


def run_over_standin(test_file, directory, *, source, library, select, at_least):
    """Compile a stand-in, and run tests over it, of which none may be skipped.

    Args:
        test_file: has the tests.
        directory: gets the library.
        source: C file beside the tests.
        library: its name.
        select: the tests, as for ``-k``.
        at_least: so many and one more pass.
    """
    folder = Path(test_file).parent
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", directory / library, folder / source], check=True)
    search = os.pathsep.join(filter(None, [str(directory), os.environ.get("LD_LIBRARY_PATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select, test_file],
        env=os.environ | {"LD_LIBRARY_PATH": search},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"(\d+) passed", done.stdout)
    assert int(ran[1]) > at_least, done.stdout
    assert "skipped" not in done.stdout, done.stdout
