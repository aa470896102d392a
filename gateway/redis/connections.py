"""redis-py's connections, with the same error on every event loop: a lost connection raises redis-py's ConnectionError.

On a connection that was just closed uvloop raises RuntimeError, which redis-py passes on unchanged.
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
    """Has it make such connections. Before its first one."""
    if isinstance(source, BlockingConnectionPool):
        source.connection_class = _CLASSES[source.connection_class]
        return
    # Nodes yet to be found are made from these, the first ones have been.
    options = source.connection_kwargs
    options["connection_class"] = _CLASSES[options["connection_class"]]
    for node in source.nodes_manager.startup_nodes.values():
        node.connection_class = options["connection_class"]
