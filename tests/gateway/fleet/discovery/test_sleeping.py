"""Base models whose engines sleep: a real gateway, the supervisor of `loraplex up`, and engine doubles as processes."""

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from gateway.fleet.discovery.addresses import parse_address
from loraplex.up.processes import ProcessGroup
from loraplex.up.sleeping import Engine, SleepingBase, Supervisor
from testing.gateway.running import Answer, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_model
from wire.headers import INTERNAL_TOKEN_HEADER

pytestmark = pytest.mark.usefixtures("starts_servers")

# An engine that serves after a second, and dies at its start while the file `broken` exists.
ENGINE = textwrap.dedent("""
    import asyncio, sys, time
    from pathlib import Path
    from testing.gateway.upstream import Upstream

    port, name, broken = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

    async def main():
        if broken.exists():
            raise SystemExit("no memory")
        await asyncio.sleep(1)
        engine = Upstream()
        engine.model = name
        async with engine.serving(port):
            while True:
                engine.reported = {"steps": len(engine.requests)}
                await asyncio.sleep(0.02)

    asyncio.run(main())
""")
SLEEP_AFTER = 2.0
START_SECONDS = 60.0


class Bench(NamedTuple):
    gateway: Gateway
    bases: dict[str, SleepingBase]
    broken: dict[str, Path]
    urls: dict[str, str]
    supervisor: str

    async def are_asleep(self, *names: str) -> None:
        async def asleep() -> bool:
            return all(self.bases[name].state == "asleep" for name in names)

        await until(asleep)

    async def are_noticed(self, *names: str) -> None:
        """Wait until the gateway shows the base models' engines as asleep."""

        async def noticed() -> bool:
            rows = (await self.gateway.admin.get("/admin/api/engines")).json["data"]
            asleep = {row["url"] for row in rows if "asleep" in str(row)}
            return {self.urls[name] for name in names} <= asleep

        await until(noticed)


async def ask(client: Client, model: str) -> Answer:
    return await client.complete(model=model, max_tokens=2)


@pytest.fixture
async def bench(tmp_path: Path, redis_url: str) -> AsyncIterator[Bench]:
    """Yield a gateway of the base models `alpha` and `beta`, each with one engine that may sleep."""
    save_model(tmp_path / "model", 512)
    group, token = ProcessGroup(tmp_path), TOKEN
    bases, broken, urls = {}, {}, {}
    for name in ("alpha", "beta"):
        port, broken[name] = free_port(), tmp_path / f"{name}.broken"
        url = urls[name] = f"http://127.0.0.1:{port}"

        async def is_healthy(url: str = url) -> bool:
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        argv = (sys.executable, "-c", ENGINE, str(port), name, str(broken[name]))
        began = time.monotonic()
        child = await group.start(name, argv, os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        await group.healthy(child, is_healthy, START_SECONDS)
        # `loraplex up` measures it in the same way, so that the announced time fits a slow machine.
        loaded = time.monotonic() - began
        bases[name] = SleepingBase(
            name,
            [Engine(child, url, is_healthy)],
            group,
            sleep_after=SLEEP_AFTER,
            load_seconds=loaded,
            ready_seconds=START_SECONDS,
            token=token,
        )
    supervisor, port = Supervisor(list(bases.values()), token), free_port()
    await supervisor.start("127.0.0.1", port)
    engines = [f"{url}?wake=http://127.0.0.1:{port}/bases/{number}" for number, url in enumerate(urls.values())]
    try:
        async with running(settings(tmp_path, tmp_path / "model", engines, redis_url, base_model="alpha")) as gateway:
            added = await gateway.admin.post("/admin/api/bases", {"name": "beta", "tokenizer": str(tmp_path / "model")})
            assert added.status == 201, added.body
            yield Bench(gateway, bases, broken, urls, f"http://127.0.0.1:{port}")
    finally:
        await supervisor.stop()
        await group.stop(lambda name: None)


async def test_an_idle_base_sleeps_and_a_request_wakes_it_within_its_retry_after(bench: Bench):
    acme = await bench.gateway.tenant("acme")
    await bench.are_asleep("alpha", "beta")
    await bench.are_noticed("alpha", "beta")
    assert (await bench.gateway.nobody.get("/readyz?strict=true")).status == 200, "sleep is no fault"
    for token, path, status in (("", "0", 401), ("guess", "0", 401), (TOKEN, "2", 404), (TOKEN, "x", 404)):
        headers = {"x-loraplex-internal-token": token}
        async with bench.gateway.session.post(f"{bench.supervisor}/bases/{path}", headers=headers) as response:
            assert response.status == status
    assert bench.bases["alpha"].state == "asleep", "only gateways may wake it"

    loaded = bench.bases["alpha"]._load_seconds
    refused = await ask(acme, "alpha")
    began = time.monotonic()
    assert (refused.status, refused.error["code"]) == (503, "base_asleep")
    seconds = int(refused.headers["Retry-After"])
    assert loaded <= seconds <= loaded + 4
    assert f"try again in {seconds} s" in refused.error["message"]

    async def serves() -> bool:
        return (await ask(acme, "alpha")).status == 200

    await until(serves)
    # On a busy machine this load may take longer than the first one, from which the time was estimated.
    slower = max(0.0, bench.bases["alpha"]._load_seconds - loaded)
    assert time.monotonic() - began < seconds + slower + 3.0, "the client was told the truth"
    assert bench.bases["beta"].state == "asleep", "only the base that was asked for wakes"

    # Requests keep it awake, also those between two looks of the supervisor.
    # Longer than a stall from here on.
    bench.bases["alpha"]._sleep_after = idle = 3 * SLEEP_AFTER
    for _ in range(5):
        assert (await ask(acme, "alpha")).status == 200
        await asyncio.sleep(idle / 4)
    assert bench.bases["alpha"].state == "awake"
    events = (await bench.gateway.admin.get("/admin/api/events")).json["data"]
    assert not [event for event in events if event["type"] == "engine.down"]


async def test_a_base_whose_engine_crashed_is_not_said_to_sleep(bench: Bench):
    """Its supervisor says that it is awake, so nothing starts it, and a time until it serves would be wrong."""
    acme, base = await bench.gateway.tenant("acme"), bench.bases["alpha"]
    base._engines[0].child.process.kill()

    async def is_down() -> bool:
        answer = await ask(acme, "alpha")
        assert base.state == "awake"
        return answer.status == 503 and answer.error["code"] != "engine_died"

    await until(is_down)
    refused = await ask(acme, "alpha")
    assert (refused.status, refused.error["code"]) == (503, "no_engine")
    assert "They start now" not in refused.error["message"]


async def test_a_base_wakes_while_another_is_flooded_and_fails_to_load(bench: Bench):
    acme, globex = await bench.gateway.tenant("acme"), await bench.gateway.tenant("globex")
    await bench.are_asleep("alpha", "beta")
    await bench.are_noticed("alpha", "beta")
    bench.broken["alpha"].touch()
    flood = [asyncio.create_task(_ask_always(acme, "alpha")) for _ in range(8)]

    async def globex_is_served() -> bool:
        return (await ask(globex, "beta")).status == 200

    await until(globex_is_served, START_SECONDS)
    assert bench.bases["alpha"].state != "awake"
    # Once its engine can start, the next request wakes this base too.
    bench.broken["alpha"].unlink()

    async def acme_is_served() -> bool:
        return (await ask(acme, "alpha")).status == 200

    await until(acme_is_served, START_SECONDS)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def _ask_always(client: Client, model: str) -> None:
    while True:
        await ask(client, model)


def test_a_listed_engine_may_have_a_supervisor():
    assert parse_address("http://h:1?wake=http://s:2/bases/0", lambda *_: "").wake == "http://s:2/bases/0"


@pytest.mark.parametrize(
    "text",
    ["http://h:1?wake=", "http://h:1?wake=ftp://x", "http://h:1?wake=http://u:p@x", "http://h:1?wake=http://x&a=1"],
)
def test_a_wrong_supervisor_is_one_clear_error(text: str):
    with pytest.raises(ValueError, match="wake"):
        parse_address(text, lambda *_: "")


def test_an_announced_engine_names_no_supervisor():
    with pytest.raises(ValueError, match="options after a"):
        parse_address("http://h:1?wake=http://attacker", None)


async def test_a_supervisor_without_a_given_port_listens_on_the_one_that_it_names():
    supervisor = Supervisor([], TOKEN)
    port = await supervisor.start("127.0.0.1")
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(
                f"http://127.0.0.1:{port}/bases/0", headers={INTERNAL_TOKEN_HEADER: TOKEN}
            ) as answer:
                assert answer.status == 404
            async with session.get(f"http://127.0.0.1:{port}/bases/0") as answer:
                assert answer.status == 401
    finally:
        await supervisor.stop()
