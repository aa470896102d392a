"""Who asks, as far as it is known: a note that belongs to one HTTP request, for its line in the access log, the audit
and its trace. The key is noted by `admission/auth.py`, by its id only."""

import ipaddress
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from gateway.settings import Network


@dataclass(slots=True)
class Caller:
    """address: the client's. key_id: of a key that was proved to be theirs. tenant: by name; None for an admin."""

    address: str
    request_id: str
    key_id: str | None = None
    tenant: str | None = None


# Of the request that the running task answers; None where there is none.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def note_key(key_id: str, tenant: str | None) -> None:
    """The running request's key."""
    caller = CALLER.get()
    if caller is not None:
        caller.key_id, caller.tenant = key_id, tenant


def find_address(peer: str | None, forwarded: Sequence[str], trusted: Sequence[Network]) -> str:
    """The client's: the connection's other end or, behind trusted proxies only, the last of X-Forwarded-For that is
    none of them. What a client wrote there itself stands further left and is never read."""
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
    """None for what is no address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
