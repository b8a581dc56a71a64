"""A child process on a terminal of its own, and what can be read on its screen at the end."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from tests.support.patience import PATIENCE_S

__all__ = ["run_on_terminal", "screen"]

_NUM_COLUMNS = 200
_TOKENS = re.compile(r"\x1b\[\??([0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def run_on_terminal(source, env=None, begin=(sys.executable, "-W", "ignore")):
    """Run Python source with standard output and error on a terminal, and return all that was written to it.

    Args:
        source: of the program.
        env: variables besides those of the tests.
        begin: the command before ``-c``.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, _NUM_COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", **(env or {})}
    with subprocess.Popen([*begin, "-c", source], stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as child:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the last one has closed it
                break
            if not part:
                break
            written += part
        os.close(ours)
        text = written.decode()
        assert child.wait(PATIENCE_S) == 0, text
    return text


def screen(written):
    """The lines that somebody sees when all of it has been written, without empty ones."""
    lines = {}
    row = column = 0
    for argument, code, is_return, is_newline, text in _TOKENS.findall(written):
        line = lines.setdefault(row, [])
        if is_return:
            column = 0
        elif is_newline:
            row += 1
        elif text:
            line.extend(" " * (column - len(line)))
            line[column : column + len(text)] = text
            column += len(text)
        elif code == "A":
            row -= int(argument or 1)
        elif code == "B":
            row += int(argument or 1)
        elif code == "K":
            del line[0 if argument == "2" else column :]
    return [text for _, line in sorted(lines.items()) if (text := "".join(line).rstrip())]
