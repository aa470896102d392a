"""Check of the address that a program shall listen on. Imports nothing large: every program's start needs it."""

import socket
from contextlib import closing


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
