"""Check whether an address can be bound, and choose free ports.

It imports nothing large, because every program imports it at its start.
"""

import itertools
import random
import socket
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

# Linux' file with the range of ephemeral ports, which outgoing connections and servers that bind port 0 get, and the
# range for systems without the file.
EPHEMERAL, DEFAULT_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range"), (32_768, 65_535)
# Lowest port that is chosen. Well-known services use many of the lower ones.
LOWEST = 10_000
# A separate generator, because the shared generator's state belongs to the program.
CHOICE = random.Random()


class UpError(Exception):
    """The service cannot be started; the one-line message states the reason."""


def check_port(host: str, port: int) -> None:
    """Raise UpError if the address cannot be bound; called before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # Servers set this too, so a connection of the last run in TIME_WAIT does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UpError(f"cannot listen on {host} port {port}: {reason}; choose another with --port") from error


def free_ports(host: str, count: int, besides: Collection[int] = ()) -> list[int]:
    """Return different free ports for programs that listen later, and again after a restart. Raises UpError.

    The system gives none of them to an outgoing connection, or to a server that asks for any port, meanwhile; unless
    it may use all ports for that. besides: ports that are not chosen.
    """
    low, high = _ephemeral()
    candidates = [port for port in range(LOWEST, 65_536) if port not in besides]
    CHOICE.shuffle(candidates)
    candidates.sort(key=lambda port: low <= port <= high)
    found = list(itertools.islice((port for port in candidates if is_free(host, port)), count))
    if len(found) < count:
        raise UpError(f"{host} has no {count} free ports from {LOWEST} on")
    return found


def _ephemeral() -> Sequence[int]:
    """Return the first and the last port of the range for outgoing connections."""
    try:
        low, high = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL
    return low, high


def is_free(host: str, port: int) -> bool:
    """Return whether nothing uses a port of an IPv4 address. Connections of a process that has ended do not count."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()  # fails beside a listener, unlike the bind with this option
        except OSError:
            return False
        return True
