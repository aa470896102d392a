"""Calls of the quota to Redis: one script, a hard deadline on every call, and no waiting for a server that is away."""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from gateway.error_codes import QUOTA_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.process.loop_lag import deadline
from gateway.process.outage import Outage
from gateway.quota import script
from gateway.redis.client import MAX_CONNECTIONS, Client
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import quota_keys
from gateway.redis.pipeline import Pipeline

log = logging.getLogger(__name__)

# Failed calls in a row after which the server counts as away, and the interval of the pings until it answers again.
FAILURES = 2
PROBE_SECONDS = 0.2


class QuotaStore:
    """Redis behind deadlines. away: True while the server does not answer; calls then raise Unavailable at once, until
    it answers a ping.
    """

    def __init__(self, redis: Client, timeout: float) -> None:
        self._redis = redis
        self._timeout = timeout
        self._source = script.source()
        self._script_hash = hashlib.sha1(self._source.encode()).hexdigest()
        # A cluster's commands go to many nodes, on connections that redis-py chooses.
        self._pipeline = None if isinstance(redis, RedisCluster) else Pipeline(redis)
        self._connections = nullcontext() if self._pipeline is not None else asyncio.Semaphore(MAX_CONNECTIONS)
        self._beginning = asyncio.Lock()
        self._begun = False
        # A cluster's client raises AttributeError if it drops a connection that another call is about to write to.
        dropped = (AttributeError,) if isinstance(redis, RedisCluster) else ()
        self._faults: tuple[type[Exception], ...] = (*REDIS_ERRORS, *dropped)
        self._failures = 0
        self._outage = Outage(log, "redis")
        self._refusals = Outage(log, "a call to redis")
        self._probe: asyncio.Task[None] | None = None
        self.away = False
        self._answers_since = -math.inf

    @property
    def answers_for(self) -> float:
        """Return the seconds since the server came back, infinite if it was never away."""
        return 0.0 if self.away else time.monotonic() - self._answers_since

    @property
    def answers_since(self) -> float:
        """Return the time (monotonic) at which the server came back, minus infinity if it was never away."""
        return self._answers_since

    @property
    def in_order(self) -> bool:
        """Return whether Redis runs scripts in the order in which this process calls them."""
        return self._pipeline is not None

    async def script(self, tenant_id: str, *arguments: Any) -> Any:
        """Call the quota's script on one tenant's keys. Raises Unavailable."""
        keys = quota_keys(tenant_id)
        return await self.call(lambda: self._evaluate(len(keys), *keys, *arguments))

    async def _evaluate(self, *keys_and_arguments: Any) -> Any:
        try:
            return await self.execute("EVALSHA", self._script_hash, *keys_and_arguments)
        except NoScriptError:
            # The server was restarted, or is another one. EVAL also loads the script.
            return await self.execute("EVAL", self._source, *keys_and_arguments)

    async def execute(self, *command: Any) -> Any:
        """Send a command within `call`. Commands and scripts of one process keep their order if `in_order`."""
        if self._pipeline is None:
            return await self._redis.execute_command(*command)
        try:
            return await self._pipeline.send(*command)
        except RedisConnectionError:
            # Retry once without a delay, as the clients of `connect` do.
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
            # The server answers, but cannot do this call: a key has another type, a shard has no master.
            self._refusals.failed(str(error), "the request is refused")
            raise unavailable() from error
        except self._faults as error:
            self._failed(error)
            raise unavailable() from error
        self._failures = 0
        self._refusals.over()
        return answer

    async def _begin(self) -> None:
        # redis-py's cluster client fails calls that arrive while it discovers the nodes, so they wait until it is done.
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
        """End the pings and the running calls. The owner of the client closes it."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait({self._probe})
        if self._pipeline is not None:
            await self._pipeline.reset()

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= FAILURES and not self.away:
            self.away = True
            self._outage.failed(type(error).__name__, "LORAPLEX_QUOTA_FALLBACK applies")
            self._probe = asyncio.create_task(self._wait_until_back())
        elif not self.away:
            log.info("a call to redis failed: %s", type(error).__name__)

    async def _wait_until_back(self) -> None:
        if self._pipeline is not None:
            # The old connection may hang where a new one does not.
            await self._pipeline.reset()
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await self.ping()
            except Unavailable as error:
                self._outage.failed(type(error.__cause__).__name__, "LORAPLEX_QUOTA_FALLBACK applies")
                continue
            self._failures = 0
            self.away = False
            self._answers_since = time.monotonic()
            self._outage.over()
            return


def unavailable() -> Unavailable:
    return Unavailable("The quota store is unavailable; try again shortly.", code=QUOTA_UNAVAILABLE)
