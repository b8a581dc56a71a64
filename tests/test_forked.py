"""Forks that stand for fresh interpreters behave as these."""

import signal
import subprocess

import pytest

from tests.support.forked import forks_of
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    with forks_of(tmp_path_factory.mktemp("forks"), "json.tool") as command:
        yield command


def run(*command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **more)


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('told')", 1, "told\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        (
            "import sys\nclass A:\n def __del__(self): sys.stderr.write('late ')\na = A()\nsys.stderr.write('end ')",
            0,
            "end late ",
        ),
        ("import atexit, sys; atexit.register(lambda: print('at exit', file=sys.stderr))", 0, "at exit\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_it_ends_as_a_process_of_its_own(fork, code, status, text):
    done = run(*fork, "-c", code)
    assert done.returncode == status
    assert text in done.stderr


def test_processes_that_it_starts_are_forks_too(fork):
    """But for those with options of the interpreter."""
    code = "import sys; print('json.tool' in sys.modules)"
    start = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    assert run(*fork, "-c", start, "-c", code).stdout == "True\n"
    assert run(*fork, "-c", start, "-W", "error", "-c", code).stdout == "False\n"


WAITS = """
import os, subprocess, sys, time
others = [subprocess.Popen([sys.executable, "-c", sys.argv.pop()])] if sys.argv[1:] else []
try:
    os.write(1, b"waits\\n")  # both write to one pipe: print may write the end of the line by itself
    time.sleep(600)
except KeyboardInterrupt:
    os.write(1, b"told\\n")
for other in others:
    other.wait()
"""


def test_an_interrupt_reaches_it_and_what_it_has_started(fork):
    caller = subprocess.Popen([*fork, "-c", WAITS, WAITS], stdout=subprocess.PIPE, text=True)
    assert [caller.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
    caller.send_signal(signal.SIGINT)
    assert caller.communicate(timeout=PATIENCE_S)[0] == "told\n" * 2
    assert caller.returncode == 0
