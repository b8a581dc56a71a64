"""One line about work that takes long: on a terminal only, and gone when the work is over."""

from __future__ import annotations

import errno
import io
import threading
import time
from types import SimpleNamespace

import pytest

from lightning_ssd.common.status_line import StatusLine
from lightning_ssd.common.task import Task
from tests.support.terminal import run_on_terminal, screen

GIB = 1 << 30


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stand_in(monkeypatch: pytest.MonkeyPatch, own: io.StringIO | None, *others: io.StringIO) -> None:
    """For the standard error of the process, and for what somebody has put in its place."""
    streams = SimpleNamespace(__stderr__=own, stderr=others[0] if others else own)
    monkeypatch.setattr("lightning_ssd.common.status_line.sys", streams)  # pytest exchanges the true ones


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    stand_in(monkeypatch, made)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return made


def work() -> None:
    with StatusLine("Working", delay_s=0) as line:
        time.sleep(0.11)  # two lines are never drawn closer to each other than 0.1 s
        line.update(GIB, 4 * GIB)


def test_it_tells_how_much_is_done_and_goes(terminal: Terminal) -> None:
    work()
    assert "Working ..." in terminal.getvalue()
    assert "Working: 1.00 GiB of 4.00 GiB" in terminal.getvalue()
    assert screen(terminal.getvalue()) == []


def test_short_work_is_not_shown(terminal: Terminal) -> None:
    with StatusLine("Working") as line:
        line.update()
    assert terminal.getvalue() == ""


def test_long_work_is_shown_now_and_then(terminal: Terminal) -> None:
    with StatusLine("Working", delay_s=0.01) as line:
        time.sleep(0.02)
        for _ in range(100):
            line.update(GIB)
    assert terminal.getvalue().count("Working: 1.00 GiB") < 10


def test_parts_of_the_work_are_counted(terminal: Terminal) -> None:
    with StatusLine("Working", delay_s=0) as line:
        for part in line.over([1, 2, 1], lambda part: part * GIB):
            time.sleep(0.11 * part)
    for done in ("1.00", "3.00"):
        assert f"Working: {done} GiB of 4.00 GiB" in terminal.getvalue()


def test_an_exception_clears_it(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), StatusLine("Working", delay_s=0):
        raise KeyboardInterrupt
    assert "Working" in terminal.getvalue()
    assert screen(terminal.getvalue()) == []


def test_a_name_cannot_tell_the_terminal_what_to_do(terminal: Terminal) -> None:
    with StatusLine("Probing /a\x1b[2J\n", delay_s=0):
        pass
    assert r"Probing /a\x1b[2J\n ..." in terminal.getvalue()


@pytest.mark.parametrize(
    "variables", [{"RANK": "1"}, {"LOCAL_RANK": "3"}, {"RANK": "4", "LOCAL_RANK": "0"}, {"TERM": "dumb"}]
)
def test_other_processes_and_dumb_terminals_see_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    work()
    assert terminal.getvalue() == ""


def test_other_processes_of_a_group_see_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first one of another machine
    work()
    assert terminal.getvalue() == ""


def test_other_threads_see_nothing(terminal: Terminal) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_log_files_stay_quiet(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    stand_in(monkeypatch, stream)
    work()
    assert stream is None or stream.getvalue() == ""


def test_it_gives_way_to_who_has_taken_standard_error(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Terminal()
    stand_in(monkeypatch, terminal, taken)
    work()
    assert terminal.getvalue() + taken.getvalue() == ""


def test_a_terminal_that_has_gone_costs_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> int:
        raise OSError(errno.EIO, "the terminal has hung up")

    monkeypatch.setattr(terminal, "write", refuse)
    work()


def test_a_terminal_that_is_closed_costs_nothing(terminal: Terminal) -> None:
    terminal.close()
    work()


def test_waiting_is_shown_when_it_takes_long(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ssd.common.task.DELAY_S", 0.05)
    task = Task(lambda: time.sleep(0.3), "lightning_ssd-test")
    task.wait("Planning")  # not begun
    task.start()
    task.wait("Planning")
    assert task.is_done
    assert "Planning ..." in terminal.getvalue()
    assert screen(terminal.getvalue()) == []


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


def test_on_a_terminal() -> None:
    written = run_on_terminal(ON_TERMINAL, {"RANK": "0"})
    assert all(f"{doing} ..." in written for doing in ("Laying out", "Planning", "Saving"))
    assert screen(written) == ["interrupted"]
