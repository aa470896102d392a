"""The parts of `loraplex up` that need no model: ports, and the embedded Valkey."""

import socket
from contextlib import closing
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from loraplex.up.config import UpConfig
from loraplex.up.datadir import DataDir
from loraplex.up.display import Display
from loraplex.up.local import LocalService, check_redis
from loraplex.up.ports import UpError, check_port
from testing.ports import free_port


def command_line(pid: int) -> str:
    """Return the command line that `ps` shows to all users; Linux."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def config(**changes) -> UpConfig:
    return UpConfig(**{"model": "/models/tiny"} | changes)


@pytest.mark.usefixtures("starts_servers")
def test_a_port_in_use_is_refused_and_a_free_one_is_not():
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UpError, match=rf"127\.0\.0\.1 port {port}: Address already in use; choose another"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port())


@pytest.mark.usefixtures("starts_servers")
def test_an_address_that_is_not_ours_is_refused():
    with pytest.raises(UpError, match=r"192\.0\.2\.1 port 8080"):
        check_port("192.0.2.1", 8080)


async def test_a_redis_that_takes_us_or_not(tmp_path):
    data = DataDir.open(tmp_path)
    service = LocalService(config(), data, Display())
    url = await service._start_valkey()
    try:
        check_redis(url)
        with pytest.raises(UpError, match="invalid username-password"):
            check_redis(url.replace(data.secrets().redis_password, "guess"))
    finally:
        await service.stop()
    with pytest.raises(UpError, match=r"--redis-url.*No such file"):
        check_redis(url)


@pytest.mark.parametrize("url", ["", "mysql://:sekret@db", "redis://:sek/ret@db:1", "redis://[:sekret@db"])
def test_a_redis_url_that_is_none_is_refused_without_its_password(url):
    with pytest.raises(UpError, match="--redis-url: expected redis://") as refusal:
        check_redis(url)
    assert "sek" not in str(refusal.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8080"), ("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://[::1]:8080")],
)
def test_the_gateways_url_is_one_to_visit(host, url):
    assert config(host=host).gateway_url == url


@pytest.mark.parametrize("deep", [False, True], ids=["short path", "path too long for a socket"])
async def test_valkey_keeps_its_data_behind_a_password(tmp_path, deep):
    data = DataDir.open(tmp_path / ("d" * 120 if deep else "data"))
    for run in range(2):
        service = LocalService(config(), data, Display())
        url = await service._start_valkey()
        try:
            async with redis.asyncio.Redis.from_url(url) as client:
                assert await client.incr("runs") == run + 1
            async with redis.asyncio.Redis.from_url(url.replace(data.secrets().redis_password, "guess")) as stranger:
                with pytest.raises(redis.exceptions.ConnectionError, match="invalid username-password"):
                    await stranger.get("runs")
            [child] = service.processes.children
            assert data.secrets().redis_password not in command_line(child.process.pid)
        finally:
            await service.stop()


def test_the_gateways_environment_holds_the_secrets_and_the_choice_of_database(tmp_path):
    data = DataDir.open(tmp_path)
    service = LocalService(config(database_url="postgresql://db/x"), data, Display())
    environment = service._gateway_environment("redis://r")
    assert environment["LORAPLEX_DATABASE_URL"] == "postgresql://db/x"
    assert environment["LORAPLEX_KEY_PEPPER"] == data.secrets().key_pepper
    assert environment["LORAPLEX_PORT"] == "8080"
