"""Client of Redis: one server, a cluster, or servers behind Sentinels."""

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.redis.connections import translate
from gateway.redis.sentinel import SCHEME as SENTINEL
from gateway.redis.sentinel import sentinel_client

Client = Redis | RedisCluster

MAX_CONNECTIONS = 64
# Length of a connection attempt, in callers' deadlines. No caller waits for it by then.
CONNECT_PATIENCE = 60


def connect(url: str, timeout: float) -> Client:
    """Return a client that connects on first use. timeout: the deadline that each caller sets for its own calls.

    `redis+cluster://host:port` (and `rediss+cluster`) names any node of a cluster. `sentinel.py` describes
    `redis+sentinel`. Raises ValueError for a URL that cannot be parsed.
    """
    # redis-py's own time limits mistake a stall of the event loop for a server that does not answer, so they are set so
    # long that they only end calls without a waiting caller. socket_timeout is off: with it the client writes within
    # asyncio.wait_for, which on Python 3.11 may lose a cancellation, so that the task does not end. An immediate retry
    # covers a pooled connection that a restarted server has closed; every call of the script may safely be sent twice.
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    scheme, _, rest = url.partition("://")
    if scheme.endswith("+cluster"):
        cluster = RedisCluster.from_url(
            f"{scheme.removesuffix('+cluster')}://{rest}",
            # Connections to each node. The client does not wait for a free one; `QuotaStore` stays below this number.
            max_connections=2 * MAX_CONNECTIONS,
            socket_timeout=None,
            socket_connect_timeout=CONNECT_PATIENCE * timeout,
            retry=Retry(NoBackoff(), 3),
        )
        translate(cluster)
        return cluster
    if scheme.endswith(SENTINEL):
        return sentinel_client(url, timeout, CONNECT_PATIENCE * timeout, retry)
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=CONNECT_PATIENCE * timeout,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_PATIENCE * timeout,
        retry=retry,
    )
    translate(pool)
    return Redis.from_pool(pool)
