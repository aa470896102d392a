"""Deaths of engines as events: recorded by several gateway processes, and seen by an operator after a SIGKILL."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select, update

from engine.program import FAILED_EXIT_CODE
from gateway.alerts import watch
from gateway.alerts.engine_deaths import PAUSE, Death, EngineDeaths
from gateway.alerts.messages import text
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.pages.overview import attention
from gateway.records.events.events import Event, Events
from gateway.records.events.tables import events
from gateway.records.sql.database import Database
from testing.gateway.running import BASE_MODEL, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_model
from tests.gateway.pages.overview.test_overview import words

START_SECONDS = 100.0
URL = "http://one:1"


class Process:
    """A gateway process' view of one engine."""

    def __init__(self, database: Database, url: str = URL) -> None:
        self.deaths = EngineDeaths(Events(database))
        self.engine = EngineRecord(Address(url), on_death=self.deaths.note)

    def serves(self, instance: str) -> None:
        """Let the engine report an instance that is up."""
        self.engine.observe_state(EngineState(instance=instance, readings=None), 0)
        self.engine.mark_up()


async def recorded(database: Database) -> list[Event]:
    found, _ = await Events(database).list(kind="engine.died")
    return found[::-1]


async def pass_pause(database: Database) -> None:
    """Make all events older, as if the pause had passed."""
    async with database.write() as connection:
        for row in (await connection.execute(select(events.c.id, events.c.created_at))).all():
            earlier = row.created_at - PAUSE
            await connection.execute(update(events).where(events.c.id == row.id).values(created_at=earlier))


async def test_deaths_that_two_processes_see_are_counted_once_and_at_most_one_event_a_minute(database: Database):
    """Each process counts what the other has not recorded; a crash loop adds one event a minute with the number."""
    processes = [Process(database) for _ in range(2)]
    for process in processes:
        process.serves("i0")
        process.engine.note_death("refused")
        # Each further check finds no process.
        process.engine.note_death("refused")
    await asyncio.gather(*(process.deaths.record() for process in processes))
    for process in processes:
        await process.deaths.record()
    [first] = await recorded(database)
    assert (first.data["engine"], first.data["deaths"], first.data["reason"]) == (URL, 1, "refused")
    for number in range(1, 5):
        for process in processes:
            process.serves(f"i{number}")
            process.engine.note_death("refused")
            await process.deaths.record()
    assert len(await recorded(database)) == 1
    await pass_pause(database)
    for process in processes * 2:
        await process.deaths.record()
    [_, second] = await recorded(database)
    assert (second.data["deaths"], second.data["instances"]) == (4, ["i1", "i2", "i3", "i4"])
    assert text("engine.died", None, second.data, second.created_at).startswith(f"The engine {URL} died 4 times\n")
    await pass_pause(database)
    for process in processes:
        await process.deaths.record()
    assert len(await recorded(database)) == 2


async def test_an_engine_without_an_instance_dies_once_for_two_processes(database: Database):
    for process in [Process(database) for _ in range(2)]:
        process.engine.mark_up()
        process.engine.note_death("refused")
        await process.deaths.record()
        await pass_pause(database)
        await process.deaths.record()
    assert [event.data["deaths"] for event in await recorded(database)] == [1]


async def test_two_processes_that_record_the_death_of_an_engine_without_an_instance_at_once_add_one_event(
    database: Database,
):
    processes = [Process(database) for _ in range(8)]
    at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for number, process in enumerate(processes):
        death = Death(None, at + timedelta(seconds=number / 10), "refused")
        process.deaths._waiting[URL].append(death)
        # Each has read the table before the others wrote to it.
        await process.deaths._record_of(URL, [], at + timedelta(seconds=1))
    assert [event.data["deaths"] for event in await recorded(database)] == [1]


async def test_an_instance_that_counted_as_dead_long_ago_does_not_hide_later_deaths(database: Database):
    """A refused connection may be the network's fault. The instance's second death blocked all later ones for good."""
    process = Process(database)
    process.serves("i0")
    process.engine.note_death("refused")
    await process.deaths.record()
    for _ in range(61):
        await pass_pause(database)
    process.serves("i0")
    process.serves("i1")
    process.serves("i2")
    for _ in range(2):
        await process.deaths.record()
    assert [event.data["instances"] for event in await recorded(database)] == [["i0"], ["i1"]]
    assert not process.deaths._waiting


async def test_the_first_report_of_an_engine_that_is_up_is_no_death(database: Database):
    """A gateway that starts while an engine is in a long step reads its health before its state."""
    process = Process(database)
    process.engine.mark_up()
    process.serves("i0")
    await process.deaths.record()
    assert await recorded(database) == []
    process.serves("i1")
    await process.deaths.record()
    assert [event.data["instances"] for event in await recorded(database)] == [["i0"]]


async def test_another_engine_has_events_of_its_own(database: Database):
    process, other = Process(database), Process(database, "http://two:1")
    for number in range(2):
        for each in (process, other):
            each.serves(f"{each.engine.url} {number}")
            await each.deaths.record()
    # A new instance answers: the former one has died.
    assert [(event.data["engine"], event.data["reason"]) for event in await recorded(database)] == [
        (URL, "another instance answers"),
        ("http://two:1", "another instance answers"),
    ]


@pytest.mark.parametrize("why", ["draining", "asleep", "drained by an operator", "never up"])
async def test_an_intended_end_is_no_death(database: Database, why: str):
    process = Process(database)
    if why != "never up":
        process.serves("i0")
    if why == "drained by an operator":
        process.engine.drained = Any  # type: ignore[assignment]
    elif why != "never up":
        process.engine.mark_down("it stops", Health.DRAINING if why == "draining" else Health.ASLEEP)
    process.engine.mark_down("refused")
    process.engine.note_death("refused")
    process.serves("i1")
    await process.deaths.record()
    assert await recorded(database) == []
    assert process.engine.died_at is None
    if why != "drained by an operator":
        process.engine.note_death("refused")
        await process.deaths.record()
        assert len(await recorded(database)) == 1


def start(model: Path, port: int, log: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Start `loraplex engine` as a separate process."""
    command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--device", "cpu"]
    command += ["--port", str(port), "--served-model-name", BASE_MODEL]
    command += ["--kv-cache-memory", "16MiB", "--adapter-memory", "4MiB", "--max-num-seqs", "8", *options]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "LORAPLEX_INTERNAL_TOKEN": TOKEN}
    with open(log, "ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


@asynccontextmanager
async def engine(
    model: Path, port: int, gateway: Gateway, log: Path, *options: str
) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """Yield an engine that is up, killed at the end if it still runs."""
    process = await asyncio.to_thread(start, model, port, log, *options)
    try:
        await gateway.engines_up(1, START_SECONDS)
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


@pytest.mark.timeout(400)
async def test_a_killed_engine_is_an_event_and_needs_attention(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """A kill left no trace for the operator unless the engine stayed away for 30 s. A planned restart is no death."""
    monkeypatch.setattr(attention, "FRESH_SECONDS", 0.0)
    # The event does not wait for a look of the watch.
    monkeypatch.setattr(watch, "LOOK_SECONDS", 3600.0)
    model, port, log = tmp_path / "tiny", free_port(), tmp_path / "engine.log"
    save_model(model)
    url = f"http://127.0.0.1:{port}"
    async with running(settings(tmp_path, model, [url], redis_url)) as gateway:

        async def found() -> list[dict[str, Any]]:
            return (await gateway.admin.get("/admin/api/events?type=engine.died")).json["data"]

        async def needs() -> list[str]:
            return [entry["text"] for entry in (await gateway.admin.get("/admin/api/attention")).json["data"]]

        async def died(seconds: float) -> dict[str, Any]:
            await until(found, seconds)
            [event] = await found()
            return event["data"]

        acme = await gateway.tenant("acme")
        async with engine(model, port, gateway, log) as process:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(asyncio.to_thread(process.wait), START_SECONDS) == 0
            await gateway.engines_up(0, START_SECONDS)
        async with engine(model, port, gateway, log) as process:
            assert await found() == []
            stream = asyncio.create_task(acme.complete(max_tokens=200, ignore_eos=True, stream=True))

            async def runs() -> bool:
                [shown] = (await gateway.admin.get("/admin/api/engines")).json["data"]
                return bool(shown["in_flight"])

            await until(runs)
            killed_at = datetime.now(UTC)
            process.kill()
            event = await died(10.0)
            assert (event["engine"], event["deaths"]) == (url, 1)
            assert abs(datetime.fromisoformat(event["last_at"]) - killed_at) < timedelta(seconds=10)
            await stream
        assert any(text.startswith(f"Engine {url} died once in the last hour, at ") for text in await needs())
        async with engine(model, port, gateway, log):

            async def runs_again() -> bool:
                return any(
                    "died once in the last hour" in each and "; it runs again since" in each for each in await needs()
                )

            await until(runs_again)
            async with gateway.browser() as browser:
                assert "died" in await words(browser, "/admin/engines")
                assert "died last" in await words(browser, f"/admin/engines/one?url={url}")
                assert "Engine died" in await words(browser, "/admin/alerts")
            assert len(await found()) == 1


@pytest.mark.timeout(200)
async def test_an_engine_that_ends_because_its_core_died_is_an_event(tmp_path: Path, redis_url: str):
    """The engine ends in order then, and said that it drains, so its end counted as intended."""
    model, port, log = tmp_path / "tiny", free_port(), tmp_path / "engine.log"
    save_model(model)
    url = f"http://127.0.0.1:{port}"
    async with (
        running(settings(tmp_path, model, [url], redis_url)) as gateway,
        engine(model, port, gateway, log, "--engine-core-mode", "process") as process,
    ):

        async def found() -> list[dict[str, Any]]:
            return (await gateway.admin.get("/admin/api/events?type=engine.died")).json["data"]

        [core] = psutil.Process(process.pid).children()
        core.kill()
        assert await asyncio.wait_for(asyncio.to_thread(process.wait), START_SECONDS) == FAILED_EXIT_CODE
        await until(found, 10.0)
        [event] = await found()
        assert (event["data"]["engine"], event["data"]["deaths"]) == (url, 1)
