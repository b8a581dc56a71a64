"""A fork knows that it is one, also where Ctrl-C comes in its first moment."""

from tests.support.processes import BARE_PACKAGE, run_python

PROGRAM = """
import ctypes, functools, os, signal
# In C, before the package's own: the signal waits for the first line of Python that the fork runs.
os.register_at_fork(after_in_child=functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT)))
from lightning_ssd.common.forks import OwnProcess
process = OwnProcess()
assert process.is_here
try:
    pid = os.fork()
except KeyboardInterrupt:
    pid = 0
if pid == 0:
    inner = OwnProcess()
    os._exit(0 if inner.is_here and not process.is_here else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert process.is_here
print("told")
"""


def test_an_interrupt_at_the_fork_does_not_hide_it():
    assert run_python(BARE_PACKAGE + PROGRAM) == "told\n"
