"""Decoding of request bodies by several threads."""

import subprocess
import sys

# Each class is new to msgspec, as every kind of body is in a process that has just started.
FIRST_USES = """
import sys
from threading import Barrier, Thread

from wire.decoding import decode
from wire.requests import CompletionRequest

sys.setswitchinterval(1e-6)
for _ in range(40):

    class Request(CompletionRequest):
        pass

    together, prompts = Barrier(6), []

    def work():
        together.wait()
        prompts.append(decode(Request, b'{"model": "a", "prompt": "x"}').prompt)

    threads = [Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert prompts == ["x"] * 6
"""


def test_threads_may_decode_the_first_bodies_of_a_kind_together() -> None:
    """Run it in a process of its own, because the fault is a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
