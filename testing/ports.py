"""Ports for servers that tests start in other processes."""

import itertools
import os
import re
import socket

# Below Linux's ephemeral range (32768 to 60999), so no outgoing connection and no `bind` to port 0 takes one of them.
FIRST, LAST = 18_000, 32_000
WORKERS = 8

_SHARE = (LAST - FIRST) // WORKERS
_worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0) % WORKERS
# Two runs on one machine start at different ports. A process does not return a port twice within `_SHARE` calls.
_next = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """Return a port that nothing on this machine listens on, from this worker's own share."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for _ in range(_SHARE):
        first = FIRST + _worker * _SHARE + next(_next) % (_SHARE - count)
        for _ in range(count - 1):
            next(_next)
        if all(_is_free(first + number) for number in range(count)):
            return first
    raise OSError(f"no {count} free ports in a row between {FIRST} and {LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
