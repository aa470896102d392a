"""Redis for admission: one script, a hard deadline on every call, and no waiting for a server that is away."""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from importlib import resources
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.errors import Unavailable
from gateway.process.loop_lag import deadline
from gateway.process.outage import Outage
from gateway.redis.connections import translate
from gateway.redis.pipeline import Pipeline
from gateway.redis.sentinel import SCHEME as SENTINEL
from gateway.redis.sentinel import sentinel_client

log = logging.getLogger(__name__)

Client = Redis | RedisCluster

MAX_CONNECTIONS = 64
# Deadlines after which a connection attempt is abandoned; its callers have left by then.
CONNECT_PATIENCE = 60
# Calls in a row that fail before the server is taken to be away, and how often it is then asked whether it is back.
FAILURES = 2
PROBE_SECONDS = 0.2


def connect(url: str, timeout: float) -> Client:
    """Return a client that connects on first use. timeout: the deadline that each caller sets for its own calls.

    `redis+cluster://host:port` (and `rediss+cluster`) names any node of a cluster. For `redis+sentinel` see
    `sentinel.py`. Raises ValueError for a URL that cannot be parsed.
    """
    # redis-py's own time limits mistake a stall of the event loop for a server that does not answer, so they only end
    # calls that no caller waits for. There is no socket_timeout: with it the client writes within asyncio.wait_for,
    # which on Python 3.11 may lose a cancellation, so that the task lives on. A single immediate retry covers a pooled
    # connection that a restarted server has closed; every call of the script may be sent twice.
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    scheme, _, rest = url.partition("://")
    if scheme.endswith("+cluster"):
        cluster = RedisCluster.from_url(
            f"{scheme.removesuffix('+cluster')}://{rest}",
            # Of each node, and without waiting for one: `Store` keeps below it.
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


class Store:
    """Redis within deadlines. away: the server did not answer; calls raise Unavailable at once until a ping is
    answered.
    """

    def __init__(self, redis: Client, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout
        self._source = resources.files("gateway.quota").joinpath("quota.lua").read_text("utf-8")
        self._digest = hashlib.sha1(self._source.encode()).hexdigest()
        # A cluster's commands go to many nodes, each by a connection that redis-py chooses.
        self._pipeline = None if isinstance(redis, RedisCluster) else Pipeline(redis)
        self._connections = nullcontext() if self._pipeline is not None else asyncio.Semaphore(MAX_CONNECTIONS)
        self._beginning = asyncio.Lock()
        self._begun = False
        # ... and raises AttributeError for a connection that it has dropped as another call was about to write to it.
        dropped = (AttributeError,) if isinstance(redis, RedisCluster) else ()
        self._faults: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError, *dropped)
        self._failures = 0
        self._outage = Outage(log, "redis")
        self._refusals = Outage(log, "a call to redis")
        self._probe: asyncio.Task[None] | None = None
        self.away = False
        self._answers_since = -math.inf

    @property
    def answers_for(self) -> float:
        """Seconds since the server came back; without end where it was never away."""
        return 0.0 if self.away else time.monotonic() - self._answers_since

    @property
    def answers_since(self) -> float:
        """The moment (monotonic) when the server came back; the beginning of time where it was never away."""
        return self._answers_since

    @property
    def in_order(self) -> bool:
        """Whether scripts are run in the order in which this process called them."""
        return self._pipeline is not None

    async def script(self, tenant_id: str, *arguments: Any) -> Any:
        """One call of the quota's script on one tenant's keys. Raises Unavailable."""
        # The hash tag keeps a tenant's keys on one shard of a cluster, where one script may see them all.
        tag = f"loraplex:{{{tenant_id}}}:"
        keys = (tag + "quota", tag + "leases", tag + "held", tag + "usage")
        return await self.call(lambda: self._evaluate(*keys, *arguments))

    async def _evaluate(self, *keys_and_arguments: Any) -> Any:
        try:
            return await self._execute("EVALSHA", self._digest, 4, *keys_and_arguments)
        except NoScriptError:
            # The server was restarted, or is another one. EVAL leaves the script there.
            return await self._execute("EVAL", self._source, 4, *keys_and_arguments)

    async def _execute(self, *command: Any) -> Any:
        if self._pipeline is None:
            return await self._redis.execute_command(*command)
        try:
            return await self._pipeline.send(*command)
        except RedisConnectionError:
            # One more try, at once, as `connect` has it.
            return await self._pipeline.send(*command)

    async def call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command within the deadline, which includes connecting, resolving names and waiting for a connection.

        Raises Unavailable.
        """
        if self.away:
            raise unavailable()
        try:
            async with deadline(self._timeout), self._connections:
                if not self._begun:
                    await self._begin()
                answer = await command()
        except ResponseError as error:
            # It is there and answers; only this cannot be done: a key of another kind, a shard without a master.
            self._refusals.failed(str(error), "whoever asked is refused")
            raise unavailable() from error
        except self._faults as error:
            self._failed(error)
            raise unavailable() from error
        self._failures = 0
        self._refusals.over()
        return answer

    async def _begin(self) -> None:
        # redis-py's client of a cluster trips over calls that come while it learns who the nodes are.
        async with self._beginning:
            if not self._begun and isinstance(self._redis, RedisCluster):
                await self._redis.initialize()
            self._begun = True

    async def ping(self) -> None:
        """Ping the server, even while it is away. Raises Unavailable."""
        try:
            async with deadline(self._timeout):
                await self._begin()
                await self._redis.ping()
        except self._faults as error:
            raise unavailable() from error

    async def close(self) -> None:
        """Ends the probing and the calls; the client is its owner's to close."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        if self._pipeline is not None:
            await self._pipeline.reset()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= FAILURES and not self.away:
            self.away = True
            self._outage.failed(type(error).__name__, "limits hold as LORAPLEX_QUOTA_FALLBACK says")
            self._probe = asyncio.create_task(self._wait_until_back())
        elif not self.away:
            log.info("redis: %s", type(error).__name__)

    async def _wait_until_back(self) -> None:
        if self._pipeline is not None:
            # It may hang where a new connection does not.
            await self._pipeline.reset()
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await self.ping()
            except Unavailable as error:
                self._outage.failed(type(error.__cause__).__name__, "limits hold as LORAPLEX_QUOTA_FALLBACK says")
                continue
            self._failures = 0
            self.away = False
            self._answers_since = time.monotonic()
            self._outage.over()
            return


def unavailable() -> Unavailable:
    return Unavailable("The quota store is unavailable; try again shortly.", code="quota_unavailable")
