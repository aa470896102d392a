"""Connections of redis-py that raise the same error on every event loop.

uvloop raises RuntimeError on a connection that was just closed, and redis-py passes it on unchanged. These connections
raise redis-py's ConnectionError instead.
"""

from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import ConnectionError as RedisConnectionError


class Translated(AbstractConnection):
    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*arguments, **options)
        except RuntimeError as error:
            raise RedisConnectionError("The connection is closed.") from error


class _Tcp(Translated, Connection):
    pass


class _Tls(Translated, SSLConnection):
    pass


class _Unix(Translated, UnixDomainSocketConnection):
    pass


_CLASSES: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}


def translate(source: BlockingConnectionPool | RedisCluster) -> None:
    """Make a pool or a cluster client use these connections. Call it before the first connection."""
    if isinstance(source, BlockingConnectionPool):
        source.connection_class = _CLASSES[source.connection_class]
        return
    # Nodes that are discovered later are made from these options; the startup nodes exist already.
    options = source.connection_kwargs
    options["connection_class"] = _CLASSES[options["connection_class"]]
    for node in source.nodes_manager.startup_nodes.values():
        node.connection_class = options["connection_class"]
