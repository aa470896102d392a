"""Memory of jobs that have ended."""

import gc
import time
import weakref

from adapters.fair_threads import FairThreads

TIMEOUT = 60


class Body:
    """A body of megabytes."""


def test_no_job_and_no_result_stays_in_memory():
    """A cycle of the job and its future kept both until a garbage collection."""
    body, made = Body(), []
    given = weakref.ref(body)

    def work(body: Body = body) -> Body:
        result = Body()
        made.append(weakref.ref(result))
        return result

    threads = FairThreads(1, "test", max_pending=9, max_pending_per_tenant=9)
    gc.collect()
    gc.disable()
    try:
        threads.submit("a", work).result(TIMEOUT)
        del body, work
        deadline = time.monotonic() + TIMEOUT
        # The thread may still be about to forget its job.
        while given() is not None or made[0]() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        gc.enable()
        threads.close()
