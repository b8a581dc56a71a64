"""Starts processes as forks of one that has done their imports: milliseconds instead of seconds for each.

A fork has memory, descriptors and an exit status of its own, as a process that begins with the interpreter has; its
command line runs :func:`_run`, which hands its standard streams to the server, waits, and ends as the fork does.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def forks_of(directory: Path, *modules: str) -> Iterator[list[str]]:
    """A server that has imported ``modules``; gives the command before ``-m MODULE`` or ``-c CODE``."""
    path = directory / "forks"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.fspath(path))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(listening.fileno()), *modules],
            pass_fds=[listening.fileno()],
            cwd=_ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))},
            stdin=subprocess.PIPE,
        )
    try:
        yield [sys.executable, "-I", "-S", __file__, str(path)]
    finally:
        server.communicate()  # the end of its standard input is the end of the server


def _serve(listening: socket.socket, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
        del sys.modules[module]  # it runs as __main__, once for each fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for forks
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Fork, and say how the fork ended; if nobody listens any more, end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.send(str(code).encode())
    os._exit(0)


def _become(asked: dict[str, object], streams: Sequence[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(str(asked["cwd"]))
    os.environ.clear()
    os.environ.update(asked["environ"])  # type: ignore[call-overload]
    kind, what, *arguments = asked["arguments"]  # type: ignore[misc]
    sys.argv = [what, *arguments]
    code: object = 0
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(path: str, arguments: Sequence[str]) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        asked = {"arguments": arguments, "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        for stream in (0, 1, 2):
            os.close(stream)  # or whoever reads from the fork would not see that it has ended
        code = int(connection.recv(16) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    else:
        os._exit(_run(sys.argv[1], sys.argv[2:]))
