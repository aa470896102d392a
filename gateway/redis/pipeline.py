"""Many callers' commands over one connection to Redis: those of one turn of the event loop go out in one write.

redis-py lends every call a connection of its own, which costs several times what the call does
(docs/perf/2026-11-21-gateway.md). Addresses, TLS, passwords and the protocol are redis-py's here as well.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError


class Pipeline:
    """Commands are done in the order of `send`, whoever asks. The connection is the client's: closed with it."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._unsent: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def send(self, *command: str | bytes | int) -> "asyncio.Future[Any]":
        """The answer to come. It fails with ResponseError for what the server refuses; with another RedisError where
        the connection is lost, and then the command may have been done."""
        answer = asyncio.get_running_loop().create_future()
        self._unsent.append(pack(command))
        self._waiting.append(answer)
        self._asked.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)
        return answer

    async def reset(self) -> None:
        """Gives the connection up, and what waits for it. The next command takes a new one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """One connection's life. Raises RedisError at its end."""
        connection = await self._pool.get_connection()
        both = asyncio.create_task(self._write(connection)), asyncio.create_task(self._read(connection))
        try:
            await asyncio.gather(*both)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        given_up = RedisTimeoutError("The connection was given up.")
        error = given_up if task.cancelled() else task.exception() or given_up
        self._task = None
        self._asked.clear()
        self._unsent.clear()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            packed = b"".join(self._unsent)
            self._unsent.clear()
            await connection.send_packed_command(packed, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        while True:
            refusal = None
            try:
                answer = await connection.read_response()
            except ResponseError as error:
                refusal = error
            waiter = self._waiting.popleft()
            if waiter.done():  # whoever asked waits no more
                continue
            if refusal is not None:
                waiter.set_exception(refusal)
            else:
                waiter.set_result(answer)


def pack(command: Sequence[str | bytes | int]) -> bytes:
    """A command as RESP's array of bulk strings. redis-py's own takes a third of a whole call."""
    parts = [b"*%d\r\n" % len(command)]
    for item in command:
        data = item if isinstance(item, bytes) else str(item).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
