"""Several threads that meet in tests."""

import threading


def at_once(*works):
    """Run in threads that begin together; raise the first error."""
    raised = []
    barrier = threading.Barrier(len(works))

    def run(work):
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
