"""One line about work that takes long: on a terminal only, and gone when the work is over."""

import errno
import io
import sys
import time
from types import SimpleNamespace

import pytest

from lightning_ssd.common.status_line import StatusLine
from tests.support.terminal import run_on_terminal, screen

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stand_in(monkeypatch, own, *others):
    """For the standard error of the process, and for what somebody has put in its place; return what is not theirs."""
    streams = SimpleNamespace(__stderr__=own, stderr=others[0] if others else own)
    monkeypatch.setattr("lightning_ssd.common.status_line.sys", streams)  # pytest exchanges the true ones
    return [stream for stream in (own, *others) if stream is not None]


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    stand_in(monkeypatch, made)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return made


def work():
    with StatusLine("Working", delay_s=0) as line:
        time.sleep(0.11)  # two lines are never drawn closer to each other than 0.1 s
        line.update(GIB, 4 * GIB)


def test_it_tells_how_much_is_done_and_goes(terminal):
    work()
    assert "Working ..." in terminal.getvalue()
    assert "Working: 1.00 GiB of 4.00 GiB" in terminal.getvalue()
    assert screen(terminal.getvalue()) == []


def test_short_work_is_not_shown(terminal):
    with StatusLine("Working") as line:
        line.update()
    assert terminal.getvalue() == ""


def test_a_name_cannot_tell_the_terminal_what_to_do(terminal):
    with StatusLine("Probing /a\x1b[2J\n", delay_s=0):
        pass
    assert r"Probing /a\x1b[2J\n ..." in terminal.getvalue()


def another_of_a_group(patch, terminal):
    patch.setattr("torch.distributed.is_initialized", lambda: True)
    patch.setattr("torch.distributed.get_rank", lambda: 1)
    patch.setenv("LOCAL_RANK", "0")  # the first one of another machine


def fails(error):
    def refuse(*args):
        raise error

    def patched(patch, terminal):
        for name in ("write", "flush"):
            patch.setattr(terminal, name, refuse)

    return patched


def with_variables(**values):
    return lambda patch, terminal: [patch.setenv(name, value) for name, value in values.items()] and None


SILENT = {
    "another rank": with_variables(RANK="1"),
    "another local rank": with_variables(LOCAL_RANK="3"),
    "a rank of another machine": with_variables(RANK="4", LOCAL_RANK="0"),
    "another of a group": another_of_a_group,
    "a dumb terminal": with_variables(TERM="dumb"),
    "a log file": lambda patch, terminal: stand_in(patch, io.StringIO()),
    "no standard error": lambda patch, terminal: stand_in(patch, None),
    "standard error that is taken": lambda patch, terminal: stand_in(patch, terminal, Terminal()),
    "a terminal that has hung up": fails(OSError(errno.EIO, "input/output error")),
    "a terminal that is busy": fails(BlockingIOError(errno.EAGAIN, "try again")),
    "a terminal without these letters": fails(UnicodeEncodeError("ascii", "", 0, 1, "")),
    "a closed terminal": lambda patch, terminal: patch.setattr(Terminal, "closed", True),
}


@pytest.mark.parametrize("name", SILENT)
def test_where_it_is_not_shown_it_costs_nothing(name, terminal, monkeypatch):
    streams = SILENT[name](monkeypatch, terminal) or []
    work()
    assert [stream.getvalue() for stream in (terminal, *streams)] == [""] * (1 + len(streams))


ON_TERMINAL = """
import os, signal, time
from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.task import Task
with StatusLine("Laying out", delay_s=0):
    pass
task = Task(lambda: time.sleep(1), "lightning_ssd-test")
task.start()
task.wait("Planning")
try:
    with StatusLine("Saving", delay_s=0):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_on_a_terminal(forks):
    written = run_on_terminal(ON_TERMINAL, {"RANK": "0"}, forks)
    assert all(f"{doing} ..." in written for doing in ("Laying out", "Planning", "Saving"))
    assert screen(written) == ["interrupted"]


def test_no_python_runs_when_a_line_dies():
    """Ctrl-C that falls into a destructor is swallowed."""
    calls = []
    with StatusLine("Working") as line:
        pass
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    del line
    sys.setprofile(None)
    assert calls == []
