"""The parts of `loraplex up` that need no model: ports, and the embedded Valkey."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from loraplex.up import device_assignment, ports
from loraplex.up.config import UpConfig
from loraplex.up.datadir import DataDir
from loraplex.up.display import Display
from loraplex.up.local import LocalService, check_redis, explaining_port
from loraplex.up.ports import UpError, check_port, free_ports
from loraplex.up.processes import ChildError, ProcessGroup
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
def test_chosen_ports_are_free_and_the_system_gives_them_to_nobody(tmp_path, monkeypatch):
    """The system gives ports of its range to outgoing connections, between the choice and the program's start."""
    setting = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "EPHEMERAL", setting)
    for text, low, high in (("10006\t65535\n", 10_000, 10_005), ("10000 65529", 65_530, 65_535)):
        setting.write_text(text)
        with closing(socket.socket()) as taken:
            found = free_ports("127.0.0.1", 2, {low})
            assert len(set(found)) == 2
            assert low < min(found) <= max(found) <= high
            taken.bind(("127.0.0.1", found[0]))
            assert found[0] not in free_ports("127.0.0.1", 2, {low})
    setting.write_text("1024 65535")
    assert len(set(free_ports("127.0.0.1", 3))) == 3
    setting.unlink()
    assert all(port < 32_768 for port in free_ports("127.0.0.1", 100))
    with pytest.raises(UpError, match=r"192\.0\.2\.1 has no 1 free ports"):
        free_ports("192.0.2.1", 1)


@contextmanager
def asked(port: int) -> Iterator[socket.socket]:
    """Yield a connection to a process that answered nothing and has ended, as one that died while it loaded."""
    with socket.create_server(("127.0.0.1", port)) as server:
        connection = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()
    with connection:
        yield connection


@pytest.mark.usefixtures("starts_servers")
async def test_a_start_that_fails_for_a_port_that_was_taken_says_so(tmp_path):
    """An engine that runs and is not healthy uses the port itself."""
    [port] = free_ports("127.0.0.1", 1)
    group = ProcessGroup(tmp_path)
    dead = await group.start("engine", (sys.executable, "-c", "raise SystemExit(1)"), os.environ)
    runs = await group.start("other", (sys.executable, "-c", "import time; time.sleep(600)"), os.environ)
    await dead.process.wait()
    try:
        with pytest.raises(ChildError, match=r"^engine exited with code 1;"), explaining_port(dead, port):
            raise dead.death()
        with asked(port), pytest.raises(ChildError, match=r"^engine exited with code 1;"), explaining_port(dead, port):
            raise dead.death()
        with socket.create_server(("127.0.0.1", port)):
            expected = rf"^another process uses port {port}.* for engine; start again\nengine exited with code 1;"
            with pytest.raises(ChildError, match=expected), explaining_port(dead, port):
                raise dead.death()
            with pytest.raises(ChildError, match=r"^other was not ready"), explaining_port(runs, port):
                raise runs.failure("was not ready")
    finally:
        await group.stop(lambda name: None)


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


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["GPU-a", "GPU-b"]), ("GPU-b,GPU-c,GPU-a", ["GPU-b", "GPU-c"]), ("5, 2", ["5", "2"])],
    ids=["all", "some", "numbers"],
)
async def test_each_engine_sees_only_its_own_gpu(visible, expected, tmp_path, monkeypatch):
    """The machine has four GPUs; the parent's CUDA_VISIBLE_DEVICES, if it has one, is a choice of them."""
    monkeypatch.setattr(device_assignment.metadata, "version", lambda _: "2.9.0")
    monkeypatch.setattr(device_assignment, "_installed_gpus", lambda: ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    service = LocalService(config(engines=2), DataDir.open(tmp_path), Display(), device_assignment.choose_pins(2, ""))
    started = {}

    async def start(name, argv, env, cpus=()):
        started[name] = (argv, env, cpus)

    async def healthy(child, check, timeout):
        pass

    monkeypatch.setattr(service.processes, "start", start)
    monkeypatch.setattr(service.processes, "healthy", healthy)
    monkeypatch.setattr(service.processes, "keep_alive", lambda child, check, timeout: None)
    assert len(await service._start_engines()) == 2
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env, _ in started.values()] == expected
    for argv, env, cpus in started.values():
        assert argv[argv.index("--engines-on-host") + 1] == "2"
        assert env["LORAPLEX_INTERNAL_TOKEN"] == service.secrets.internal_token
        assert cpus == ()
