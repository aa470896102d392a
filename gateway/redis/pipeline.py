"""Pipeline of many callers' commands over one connection to Redis: one write for each iteration of the event loop.

redis-py takes a connection from its pool for every call, which costs several times as much as the call itself
(docs/perf/2026-11-21-gateway.md). Addresses, TLS, passwords and the protocol are still redis-py's.
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
    """Pipeline over one connection of the client's pool. Redis runs all commands in the order of `send`."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._unsent: list[bytes] = []
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def send(self, *command: str | bytes | int) -> "asyncio.Future[Any]":
        """Send a command and return a future of its answer.

        The future fails with ResponseError if the server refuses the command, and with another RedisError if the
        connection is lost; the server may have run the command in that case.
        """
        answer = asyncio.get_running_loop().create_future()
        self._unsent.append(pack(command))
        self._waiting.append(answer)
        self._asked.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)
        return answer

    async def reset(self) -> None:
        """Close the connection and fail the commands that wait for it. The next command uses a new connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Use one connection until it is lost. Raises RedisError at that time."""
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
            if waiter.done():  # the caller was cancelled
                continue
            if refusal is not None:
                waiter.set_exception(refusal)
            else:
                waiter.set_result(answer)


def pack(command: Sequence[str | bytes | int]) -> bytes:
    """Encode a command as RESP's array of bulk strings. redis-py's own encoder takes a third of the time of a call."""
    parts = [b"*%d\r\n" % len(command)]
    for item in command:
        data = item if isinstance(item, bytes) else str(item).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
