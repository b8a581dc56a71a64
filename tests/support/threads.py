"""Several threads that meet in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(*works: Callable[[], object]) -> None:
    """Run in threads that begin together; raise the first error."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
