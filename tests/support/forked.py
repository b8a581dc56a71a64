"""Starts processes as forks of one that has done their imports: milliseconds instead of seconds for each.

A fork has memory, descriptors and an exit status of its own, and ends as an interpreter does; to itself it looks as if
``python`` had been the command below, so that processes that it starts with ``sys.executable`` are forks as well. That
command runs :func:`_run`, which hands its standard streams to the server, waits, and ends as the fork does. What has to
begin with the interpreter, or be killed by its own process id, is no case for it.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parents[2]
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_COMMAND = """#!/bin/sh
case "$1" in
-m | -c) exec "{python}" -I -S "{client}" "{path}" "$@" ;;
*) exec "{python}" "$@" ;;
esac
"""


@contextlib.contextmanager
def forks_of(directory, *modules):
    """A server that has imported ``modules``; gives the command before ``-m MODULE`` or ``-c CODE``."""
    path, python = directory / "forks", directory / "python"
    python.write_text(_COMMAND.format(python=sys.executable, client=__file__, path=path))
    python.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked", str(listening.fileno()), str(python), *modules],
            pass_fds=[listening.fileno()],
            cwd=_ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))},
            stdin=subprocess.PIPE,
        )
    try:
        yield [str(python)]
    finally:
        server.communicate()  # the end of its standard input is the end of the server


def _serve(listening, python, modules):
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for forks
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            sys.executable = python
            _watch(connection)
        connection.close()


def _watch(connection):
    """Fork, pass on the signals that its caller gets, and say how it ended; if nobody listens any more, end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    # A group for it and the processes that it starts, so that Ctrl-C reaches all of them. Whoever comes first makes it.
    with contextlib.suppress(PermissionError):
        os.setpgid(child, child)
    if child == 0:
        connection.close()
        _become(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while ended not in select.select([ended, connection], [], [])[0]:
        told = connection.recv(1)
        with contextlib.suppress(ProcessLookupError):  # it has ended just now
            os.killpg(child, told[0] if told else signal.SIGKILL)
        if not told:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(code).encode())
    os._exit(0)


def _become(asked, streams):
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    kind, what, *arguments = asked["arguments"]
    sys.argv = [what, *arguments]
    # As in any interpreter, what runs is a module that lives until all else is torn down.
    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        if kind == "-m":
            sys.modules.pop(what, None)
            runpy._run_module_as_main(what)
        else:
            exec(what, main.__dict__)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit()


def _run(path, arguments):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = {"arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        for stream in (0, 1, 2):
            os.close(stream)  # or whoever reads from the fork would not see that it has ended
        code = int(connection.recv(16) or b"1")
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:])
    else:
        os._exit(_run(sys.argv[1], sys.argv[2:]))
