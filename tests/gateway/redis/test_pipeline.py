"""Many callers on one connection, on a real Valkey: each gets its own answer, also when others fail."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.redis.client import connect
from gateway.redis.pipeline import Pipeline, pack

# Blocks only this connection, until a value is pushed.
BLOCKING = ("BLPOP", "nothing-is-ever-pushed-here", 0)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    redis = connect(redis_url, timeout=10.0)
    assert isinstance(redis, Redis)
    yield redis
    await redis.aclose()


@pytest.fixture
async def pipeline(redis: Redis) -> AsyncIterator[Pipeline]:
    pipeline = Pipeline(redis)
    yield pipeline
    await pipeline.reset()


def test_a_command_is_an_array_of_bulk_strings():
    assert pack(("SET", b"\r\n\xff", 12, "ä")) == b"*4\r\n$3\r\nSET\r\n$3\r\n\r\n\xff\r\n$2\r\n12\r\n$2\r\n\xc3\xa4\r\n"


async def test_everybody_gets_their_own_answer(pipeline: Pipeline):
    async def ask(number: int) -> list[bytes]:
        return [await pipeline.send("ECHO", f"{number}.{again}") for again in range(5)]

    answers = await asyncio.gather(*(ask(number) for number in range(200)))
    assert answers == [[f"{number}.{again}".encode() for again in range(5)] for number in range(200)]


async def test_commands_are_done_in_the_order_they_were_sent(pipeline: Pipeline):
    numbers = [pipeline.send("INCR", "test-pipeline-order") for _ in range(50)]
    assert await asyncio.gather(*numbers) == list(range(1, 51))


async def test_what_the_server_refuses_fails_its_own_call_only(pipeline: Pipeline):
    before, refused, after = pipeline.send("ECHO", "a"), pipeline.send("NO-SUCH-COMMAND"), pipeline.send("ECHO", "b")
    with pytest.raises(ResponseError, match="unknown command"):
        await refused
    assert (await before, await after) == (b"a", b"b")


async def test_an_answer_that_nobody_waits_for_is_nobody_elses(pipeline: Pipeline):
    unwanted, wanted = pipeline.send("ECHO", "unwanted"), pipeline.send("ECHO", "wanted")
    unwanted.cancel()
    assert await wanted == b"wanted"


async def test_a_lost_connection_fails_what_waits_and_the_next_command_takes_a_new_one(
    pipeline: Pipeline, redis: Redis
):
    own = await pipeline.send("CLIENT", "ID")
    waits = pipeline.send(*BLOCKING)
    await redis.execute_command("CLIENT", "KILL", "ID", own)
    with pytest.raises(RedisConnectionError):
        await waits
    assert await pipeline.send("CLIENT", "ID") != own


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_command_to_a_connection_that_has_just_closed_fails_as_any_on_a_lost_one(
    run: Callable[..., None], redis_url: str
):
    """uvloop raises a RuntimeError for a write to a closed connection, before the reader detects the loss."""

    async def main() -> None:
        redis = connect(redis_url, timeout=10.0)
        assert isinstance(redis, Redis)
        pipeline = Pipeline(redis)
        await pipeline.send("PING")
        for connection in redis.connection_pool._in_use_connections:
            connection._writer.transport.abort()
        with pytest.raises(RedisConnectionError):
            await pipeline.send("PING")
        assert await pipeline.send("ECHO", "again") == b"again"
        await pipeline.reset()
        await redis.aclose()

    run(main())


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("server", ["redis_url", "cluster_url"])
def test_any_other_call_fails_alike(server: str, run: Callable[..., None], request: pytest.FixtureRequest):
    async def main() -> None:
        redis = connect(request.getfixturevalue(server), timeout=10.0)
        await redis.set("test-closed", "a")
        if isinstance(redis, Redis):
            connection = await redis.connection_pool.get_connection()
        else:
            connection = redis.get_node_from_key("test-closed").acquire_connection()
            await connection.connect()
        connection._writer.transport.abort()
        with pytest.raises(RedisConnectionError):
            await connection.send_command("PING")
        if isinstance(redis, Redis):
            await redis.connection_pool.release(connection)
        else:
            redis.get_node_from_key("test-closed").release(connection)
        assert await redis.get("test-closed") == b"a"
        await redis.aclose()

    run(main())


async def test_a_reset_fails_what_waits_also_before_there_is_a_connection(pipeline: Pipeline):
    await pipeline.send("PING")
    for started in (True, False):
        waits = pipeline.send(*BLOCKING) if started else pipeline.send("PING")
        await pipeline.reset()
        with pytest.raises(RedisTimeoutError):
            await waits
    assert await pipeline.send("ECHO", "again") == b"again"


@pytest.mark.usefixtures("starts_servers")
async def test_a_server_that_is_not_there_fails_every_call():
    with socket.socket() as bound:  # bound but not listening, so that connections are refused
        bound.bind(("127.0.0.1", 0))
        nobody = connect(f"redis://127.0.0.1:{bound.getsockname()[1]}", timeout=10.0)
        assert isinstance(nobody, Redis)
        pipeline = Pipeline(nobody)
        answers = await asyncio.gather(*(pipeline.send("PING") for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [RedisConnectionError] * 3
        await nobody.aclose()
