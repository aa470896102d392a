"""All threads of a process share one heap of glibc's, so that bodies that they handle fragment one heap only."""

import subprocess
import sys
from pathlib import Path

import pytest

# Counts the heaps after eight threads, all alive at once, have each allocated a buffer.
COUNT = """
import ctypes, re, sys, threading
from gateway.process.memory import return_freed_memory
if sys.argv[1] == "one":
    return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.fclose.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(65536)
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(("setting", "is_one"), [("one", True), ("default", False)])
def test_threads_share_one_heap(tmp_path: Path, setting: str, *, is_one: bool) -> None:
    """The default shows that the count sees several heaps."""
    place = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", COUNT, setting, str(place)], check=True, timeout=60)
    assert (place.read_text().count("<heap nr=") == 1) == is_one
