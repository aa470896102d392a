"""Health of an engine, and texts for the reasons of its faults."""

import errno
from enum import StrEnum

from aiohttp import ClientConnectorDNSError, ClientConnectorError, ClientSSLError, ServerDisconnectedError


class Health(StrEnum):
    """State of an engine as its probes show it. Only an engine that is UP gets new requests."""

    # No probe has been answered yet.
    UNKNOWN = "unknown"
    UP = "up"
    # It does not answer although its connections stay open, for example in a long step or while it is stopped.
    SILENT = "silent"
    DOWN = "down"
    # It finishes its requests and takes no new ones.
    DRAINING = "draining"
    # It answers, but its model, version, secret or receipts rule it out until the operator acts.
    MISCONFIGURED = "misconfigured"


def network_reason(error: BaseException) -> str:
    """Return the reason for a failed connection or call, without the engine's address."""
    if isinstance(error, ClientConnectorDNSError):
        return "its host name cannot be resolved"
    if isinstance(error, ClientSSLError):
        return "the TLS handshake failed"
    if isinstance(error, ClientConnectorError):
        cause = error.os_error
        if cause.errno == errno.ECONNREFUSED:
            return "connection refused; no process listens at this address"
        return f"it cannot be reached: {cause.strerror or type(cause).__name__}"
    if isinstance(error, ServerDisconnectedError | ConnectionError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return type(error).__name__
