"""Addresses to which events may be sent: checks of webhooks' URLs, and of the hosts that tenants' webhooks reach."""

import ipaddress
import re
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from gateway.errors import BadRequest

MAX_URL_CHARS = 1024
MAIL = re.compile(r"mailto:[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){0,8}")
# Last part of a host that is an address (the URL standard's "ends in a number").
NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
EXPECTED = "expected an https:// URL without a user name, or mailto: with one address"
# IPv6 networks that `ipaddress` calls global in some versions of Python. Addresses of the first line stand for IPv4
# addresses, which may be private; the second line is reserved (IANA's registry of special-purpose addresses).
NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
        *("100::/64", "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
)


def check_url(url: str, http_hosts: Collection[str], *, has_mail: bool, is_tenants: bool) -> None:
    """Raise BadRequest for a URL to which no event may be sent.

    http_hosts: hosts to which operators' webhooks may go without TLS.
    """
    if url.startswith("mailto:"):
        if not MAIL.fullmatch(url):
            raise BadRequest(f"url: {EXPECTED}.", param="url")
        if not has_mail:
            raise BadRequest("url: mail needs the setting LORAPLEX_SMTP_URL.", param="url")
        return
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    is_printable = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    if host is None or not is_printable or "@" in parts.netloc or parts.scheme not in ("https", "http"):
        raise BadRequest(f"url: {EXPECTED}.", param="url")
    if parts.scheme == "http" and (is_tenants or host not in http_hosts):
        raise BadRequest(
            "url: expected https://. LORAPLEX_WEBHOOK_HTTP_HOSTS lists the hosts that operators' webhooks may reach "
            "without TLS.",
            param="url",
        )
    if is_tenants and is_private_literal(host):
        raise BadRequest("url: a tenant's webhook needs a public address.", param="url")


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if any(parsed in network for network in NOT_PUBLIC):
            return False
    return parsed.is_global and not parsed.is_multicast


def is_private_literal(host: str) -> bool:
    """Return whether a host is written as an IP address that is not public, or in another form of an address.

    Systems read `127.1`, `0x7f000001` and `127.0.0.1.` as addresses, and a client may then ask no resolver.
    """
    try:
        return not is_public(host)
    except ValueError:
        return NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None


class PublicResolver(AbstractResolver):
    """Resolver that returns public addresses only. The client connects to what it returns, so a name that changes its
    address between check and use gains nothing.
    """

    def __init__(self) -> None:
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = [each for each in await self._resolver.resolve(host, port, family) if is_public(each["host"])]
        if not found:
            raise OSError(None, "the host has no public address")
        return found

    async def close(self) -> None:
        await self._resolver.close()
