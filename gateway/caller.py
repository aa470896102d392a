"""Caller of one HTTP request, for its access log line, audit entries and trace.

`access/auth.py` records the key, by its id only.
"""

import ipaddress
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache


@dataclass(slots=True)
class Caller:
    """Sender of the running request.

    address: the client's. key_id: the verified key's id, or the subject of a session. tenant_name,
    tenant_id: None for an admin. session_id: id of a browser's session. is_https: whether the client's own connection
    is encrypted. is_refused: whether the key is revoked or expired, or its tenant suspended.
    """

    address: str
    request_id: str
    key_id: str | None = None
    tenant_name: str | None = None
    tenant_id: str | None = None
    session_id: str | None = None
    is_https: bool = False
    is_refused: bool = False

    @property
    def is_operator(self) -> bool:
        """Return whether a valid admin key or an admin's session made the request."""
        return self.key_id is not None and self.tenant_id is None and not self.is_refused


# Prefix length of the network that an IPv6 customer gets as a whole, and that throttles count as one client.
IPV6_PREFIX = 64
# Prefix of a key's id in the rows of an operator's requests for a tenant.
OPERATOR_KEY = "operator:"

# Caller of the request that the running task answers; None outside of requests.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def note_key(
    key_id: str,
    tenant_name: str | None,
    tenant_id: str | None = None,
    session_id: str | None = None,
    *,
    is_refused: bool = False,
) -> None:
    """Record the verified key or session of the running request."""
    caller = CALLER.get()
    if caller is not None:
        caller.key_id, caller.tenant_name, caller.tenant_id = key_id, tenant_name, tenant_id
        caller.session_id, caller.is_refused = session_id, is_refused


def is_https(
    request_is_secure: bool,
    peer: str | None,
    forwarded: str | None,
    trusted: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network],
) -> bool:
    """Return whether the client uses HTTPS: directly, or according to a trusted proxy's X-Forwarded-Proto."""
    address = parse_address(peer or "")
    if address is None or not any(address in network for network in trusted):
        return request_is_secure
    return (forwarded or "").partition(",")[0].strip().lower() == "https" or request_is_secure


def find_address(
    peer: str | None, forwarded: Sequence[str], trusted: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> str:
    """Return the client's address: the connection's peer or, behind trusted proxies only, the last address in
    X-Forwarded-For that is not a trusted proxy. Addresses that the client itself wrote stand further left and are never
    read.
    """
    address = parse_address(peer or "")
    if forwarded:
        hops = [hop.strip() for line in forwarded for hop in line.split(",")]
        while address is not None and hops and any(address in network for network in trusted):
            further = parse_address(hops.pop())
            if further is None:
                break
            address = further
    # A Unix socket's peer has no address.
    return str(address or "local")


@lru_cache(4096)
def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the parsed address, an IPv4-mapped one as IPv4; None if the text is not an address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def client_network(address: str) -> str:
    """Return the part of an address that counts as one client: an IPv4 address, or the network of an IPv6 address."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX), strict=False))
    return address
