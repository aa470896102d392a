"""Redis behind Sentinel: each new connection asks for the master's address, and so follows a failover.

A URL is `redis+sentinel://[user:password@]host:port,host:port/master-name[/db][?options]`, or `rediss+sentinel` for TLS
to the servers and the sentinels. User and password are for the servers; the options `sentinel_username` and
`sentinel_password` are for the sentinels. The other options are redis-py's (`ssl_ca_certs=...`).
"""

from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from gateway.redis.connections import Translated

SCHEME = "+sentinel"
SENTINEL_PORT = 26379
# Time limit for the connection to a sentinel, as a share of the caller's deadline: if one is away, there is time to ask
# the next.
CONNECT_SHARE = 0.3


class SentinelUrl(NamedTuple):
    """Parsed URL. options: redis-py's options for connections to the servers. own: those for the sentinels."""

    sentinels: list[tuple[str, int]]
    master: str
    options: dict[str, Any]
    own: dict[str, Any]


class _MasterClient(Redis):
    """Client that also closes its connections to the sentinels."""

    sentinels: Sentinel

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for client in self.sentinels.sentinels:
            await client.aclose()


class _Tcp(Translated, SentinelManagedConnection):
    pass


class _Tls(Translated, SentinelManagedSSLConnection):
    pass


def parse(url: str) -> SentinelUrl:
    """Parse the URL. Raises ValueError; its text does not quote the URL, which may contain a password."""
    parts = urlsplit(url)
    base = parts.scheme.removesuffix(SCHEME)
    user, _, hosts = parts.netloc.rpartition("@")
    sentinels = [_address(text) for text in hosts.split(",")]
    master, _, db = parts.path.strip("/").partition("/")
    if not master:
        raise ValueError("expected the master's name after the sentinels: redis+sentinel://host:port,host:port/name")
    if db and not db.isdecimal():
        raise ValueError("expected a database's number after the master's name")
    options = dict(parse_url(f"{base}://{user + '@' if user else ''}sentinel/{db}?{parts.query}"))
    options.pop("host", None)
    tls = options.pop("connection_class", None) is not None
    names = {"sentinel_username": "username", "sentinel_password": "password"}
    own = {name: options.pop(given) for given, name in names.items() if given in options}
    own |= {name: value for name, value in options.items() if name.startswith("ssl_")}
    if tls:
        own["ssl"] = True
    options["connection_class"] = _Tls if tls else _Tcp
    return SentinelUrl(sentinels, unquote(master), options, own)


def check_sentinel_url(url: str) -> None:
    """Raise ValueError for a Sentinel URL that cannot be parsed."""
    if urlsplit(url).scheme.endswith(SCHEME):
        parse(url)


def sentinel_client(url: str, timeout: float, patience: float, retry: Retry) -> Redis:
    """Return a client of the current master. timeout: a caller's deadline. patience: the limit of a connection attempt.

    Raises ValueError.
    """
    found = parse(url)
    # By default, redis-py asks a sentinel that is away three times more, after pauses of seconds.
    limits = {"socket_timeout": None, "socket_connect_timeout": CONNECT_SHARE * timeout, "retry": retry}
    sentinel = Sentinel(found.sentinels, sentinel_kwargs={**found.own, **limits})
    pool = SentinelConnectionPool(
        found.master,
        sentinel,
        **{**found.options, "socket_timeout": None, "socket_connect_timeout": patience, "retry": retry},
    )
    client = cast(_MasterClient, _MasterClient.from_pool(pool))
    client.sentinels = sentinel
    return client


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or "]" in port:
        host, port = text, str(SENTINEL_PORT)
    if not host or not port.isdecimal():
        raise ValueError("expected sentinels as host:port,host:port")
    return host.strip("[]"), int(port)
