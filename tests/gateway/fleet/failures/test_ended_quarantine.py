"""The end of a tenant's quarantine by an operator, and the evidence that is forgotten with it."""

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.api.admin.quarantine import AdminQuarantine
from gateway.errors import Unavailable
from gateway.fleet.adapter_probes import AdapterProber, AdapterRefused
from gateway.fleet.engines.own_requests import NamedBody, named
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import LIMITS, TENANT, Deaths, Suspicion
from gateway.fleet.failures.quarantine import Quarantine
from gateway.redis.client import connect
from testing.gateway.commands import runner
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_deaths import REQUEST, note
from tests.gateway.fleet.failures.test_quarantine import BODY, SECRET, Clock, die, engine, is_quarantined, note_death
from tests.gateway.fleet.failures.test_shared_quarantine import Processes

OTHER = Suspect("request", "b", "a mark")


@pytest.fixture
def deaths(clock: Clock) -> Deaths:
    return Deaths(600.0, clock)


def test_the_evidence_before_the_end_counts_no_more(deaths: Deaths, clock: Clock):
    for _ in range(LIMITS["request"]):
        note(deaths, clock, "e", "v")
    assert deaths.causes_of(REQUEST)
    deaths.forget("v", clock())
    assert not deaths.causes_of(REQUEST)
    assert not deaths.has_candidate("v")
    for number in range(1, LIMITS["request"] + 1):
        note(deaths, clock, "e", "v")
        assert bool(deaths.causes_of(REQUEST)) == (number == LIMITS["request"])
    assert len(deaths.causes_of(REQUEST)) == LIMITS["request"]


def test_a_tenants_next_quarantine_needs_as_many_deaths_as_the_first(deaths: Deaths, clock: Clock):
    whole = Suspect(TENANT, "v", "")
    for _ in range(2):
        for _ in range(LIMITS[TENANT]):
            assert not deaths.causes_of(whole)
            note(deaths, clock, "e", "v")
        assert len(deaths.causes_of(whole)) == LIMITS[TENANT]
        deaths.forget("v", clock())


def test_a_report_after_the_end_of_a_death_before_it_is_no_evidence(deaths: Deaths, clock: Clock):
    note(deaths, clock, "e1", "v", suspect=None)
    [death] = deaths.recent()
    deaths.forget("v", clock())
    deaths.add(death, [REQUEST])
    note(deaths, clock, "e2", "v")
    assert not deaths.causes_of(REQUEST)
    assert deaths.of(REQUEST) == deaths.recent()[1:]


def test_the_end_blames_and_suspects_no_other_tenant(deaths: Deaths, clock: Clock):
    """The tenant was there, so no other one was alone, and its request stays the known cause."""
    for number in range(2):
        note(deaths, clock, f"e{number}", "v", "b")
        deaths.add(deaths.recent()[-1], [OTHER])
    assert deaths.suspicion(OTHER) == Suspicion({"v"}, 2)
    note(deaths, clock, "e2", "v")
    assert deaths.causes_of(REQUEST)
    assert deaths.is_innocent(OTHER)
    deaths.forget("v", clock())
    assert not deaths.causes_of(OTHER)
    assert deaths.suspicion(OTHER) is None
    assert deaths.is_innocent(OTHER)
    assert [death.tenants for death in deaths.recent()] == [{"v", "b"}, {"v", "b"}, {"v"}]


def test_the_end_of_a_quarantine_leaves_the_evidence_against_others(deaths: Deaths, clock: Clock):
    """Only a death that the tenant caused has a known cause; it was just there at the others."""
    for number in range(2):
        note(deaths, clock, f"e{number}", "v", "b", suspect=OTHER)
    deaths.forget("v", clock())
    assert deaths.suspicion(OTHER) == Suspicion({"v"}, 2)
    note(deaths, clock, "e2", "b", suspect=OTHER)
    assert deaths.causes_of(OTHER)


def test_a_quarantine_begins_with_the_death_that_shows_the_cause_and_ends_by_the_newest(deaths: Deaths, clock: Clock):
    times = []
    for tenants in (("v", "b"), ("v", "b"), ("v",), ("v", "b")):
        note(deaths, clock, "e", *tenants)
        times.append(clock())
    [period] = deaths.quarantines()
    assert (period.suspect, period.began, period.ends) == (REQUEST, times[2], times[3] + 600.0)
    assert deaths.quarantines("v") == [period]
    assert deaths.quarantines("b") == []
    clock.now = period.ends - 0.1
    assert deaths.quarantines() == [period]
    clock.now = period.ends
    assert deaths.quarantines() == []


def test_a_tenants_quarantine_ends_when_too_few_deaths_are_remembered(deaths: Deaths, clock: Clock):
    times = []
    for _ in range(LIMITS[TENANT] + 1):
        note(deaths, clock, "e", "v")
        times.append(clock())
    period = deaths.quarantine_of(Suspect(TENANT, "v", ""))
    assert period is not None
    assert (period.began, period.ends) == (times[LIMITS[TENANT] - 1], times[1] + 600.0)


async def test_a_probe_may_kill_as_many_engines_again_after_the_end():
    """The prober remembers deaths for longer than the quarantine, and refused the adapter at its next probe."""
    quarantine, suspect = Quarantine(100.0, SECRET, clock=(clock := Clock())), Suspect("probe", "a", "0" * 64)
    prober = AdapterProber(*cast(Any, (SimpleNamespace(up=[]), {}, quarantine)))
    for _ in range(2):
        clock.now += 10.0
        quarantine.died(engine(a=1), "a", named([suspect]))
        prober._remember(suspect)
    with pytest.raises(AdapterRefused):
        prober._check_deaths(suspect)
    await quarantine.clear_tenant("a")
    assert prober._check_deaths(suspect)


async def test_all_processes_and_later_ones_learn_of_the_end(any_redis: Any, patient: None):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:

        async def kill(*counted: str) -> None:
            for url in ("http://one:1", "http://two:1"):
                processes.clock.now += 10.0
                await processes.die(one, url)
            await until(lambda: asyncio.sleep(0, is_quarantined(one) and is_quarantined(two)))
            await until(partial(processes.have_counted, *counted))

        # Each knows that the other one is alive, and answers its reports.
        for _ in range(2):
            await asyncio.gather(one.read(), two.read())
        await kill("request")
        processes.clock.now += 1.0
        [period] = await two.clear_tenant("a")
        assert period.suspect.kind == "request"
        assert not is_quarantined(two)
        await until(lambda: asyncio.sleep(0, not is_quarantined(one)))
        assert one.quarantines() == two.quarantines() == []
        async with processes.one() as late:
            await until(lambda: asyncio.sleep(0, len(late._deaths.recent()) == 2))
            await until(lambda: asyncio.sleep(0, not is_quarantined(late)))
            assert await late.suspicion("a", (), NamedBody(BODY)) is None
        # A quarantine that begins again is counted again.
        await kill("request", "request")


async def test_without_redis_the_quarantine_goes_on():
    redis = connect("redis://127.0.0.1:1/0", 0.2)
    processes = Processes(redis)
    async with processes.one() as one:
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += 10.0
            note_death(one, engine(url, a=1), "a")
        await until(lambda: asyncio.sleep(0, is_quarantined(one)))
        with pytest.raises(Unavailable, match="Redis is unavailable"):
            await one.clear_tenant("a")
        assert is_quarantined(one)
    await redis.aclose()


async def test_an_operator_lists_and_ends_a_quarantine(tmp_path: Path, model_dir: Path, redis_url: str):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(2)]
        urls = sorted(each.url for each in engines)
        of = settings(tmp_path, model_dir, urls, redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        other = await stack.enter_async_context(running(of))
        run, acme = runner(gateway), await gateway.tenant("acme")
        await gateway.tenant("globex")
        for each in engines:
            each.refuses = None
        assert (await acme.complete(prompt="a secret of acme")).status == 502

        async def listed(at: Gateway, query: str = "") -> list[dict[str, Any]]:
            return list((await at.admin.get(f"/admin/api/quarantine{query}")).json["data"])

        for at in (gateway, other):

            async def is_known(at: Gateway = at) -> bool:
                return len(await listed(at)) == 1

            await until(is_known)
        [row] = await listed(gateway)
        assert (row["kind"], row["tenant"], row["adapter"], row["engines"]) == ("request", "acme", None, urls)
        assert row["began_at"] < row["ends_at"]
        assert await listed(gateway, "?tenant=globex") == []
        shown = (await run("quarantine", "list", "--tenant", "acme")).stdout
        assert shown.splitlines()[1].split()[:2] == ["request", "acme"]
        assert "secret" not in shown + str(row)
        for each in engines:
            each.refuses = False
        assert (await acme.complete(prompt="a secret of acme")).error["code"] == "request_quarantined"
        path = "/admin/api/tenants/acme/quarantine"
        viewer = gateway.client((await gateway.admin.post("/admin/api/keys", {"role": "viewer"})).json["key"])
        assert (await viewer.get("/admin/api/quarantine")).status == 200
        assert [(await each.call("DELETE", path)).status for each in (viewer, acme)] == [403, 403]
        assert (await gateway.admin.call("DELETE", "/admin/api/tenants/nobody/quarantine")).status == 404
        assert (await run("quarantine", "clear", "globex")).stdout == "ended the quarantine of globex: 0 entries\n"
        assert len(await listed(gateway)) == 1
        assert (await run("quarantine", "clear", "acme")).stdout == "ended the quarantine of acme: 1 entry\n"
        assert await listed(gateway) == []

        async def is_over() -> bool:
            return await listed(other) == []

        await until(is_over)
        for at in (gateway, other):
            served = at.client(acme.key or "")
            await until(lambda served=served: _is_served(served))
        entries = (await gateway.admin.get("/admin/api/audit?action=quarantine")).json["data"]
        assert [(each["action"], each["target"], each["tenant"], each["detail"]) for each in entries] == [
            ("quarantine.end", "acme", "acme", {"ended": 1}),
            ("quarantine.end", "globex", "globex", {"ended": 0}),
        ]


async def _is_served(client: Any) -> bool:
    return (await client.complete(prompt="a secret of acme")).status == 200


@pytest.mark.parametrize("is_away", [False, True])
async def test_an_adapter_is_listed_by_its_digest_though_the_names_of_tenants_may_be_missing(
    is_away: bool, clock: Clock
):
    async def names(ids: set[str]) -> dict[str, str]:
        if is_away:
            raise Unavailable("the database is unavailable")
        return dict.fromkeys(ids, "acme")

    quarantine = Quarantine(100.0, SECRET, clock=clock)
    for number in range(LIMITS["adapter"]):
        clock.now += 10.0
        note_death(quarantine, engine(a=1), "a", [f"{'d' * 64}@base-id"], prompt=f"{number}")
    routes = AdminQuarantine(
        quarantine=quarantine, **cast(Any, {"tenants": SimpleNamespace(names=names), "audit": None})
    )
    answer = await routes.list(make_mocked_request("GET", "/admin/api/quarantine"))
    [row] = json.loads(cast(Any, answer).body)["data"]
    assert (row["kind"], row["adapter"]) == ("adapter", f"sha256:{'d' * 64}")
    assert (row["tenant"], row["tenant_id"]) == (None if is_away else "acme", "a")


async def test_a_list_is_limited_and_the_newest_come_first(clock: Clock):
    quarantine = Quarantine(100.0, SECRET, clock=clock)
    for number in range(3):
        for _ in range(LIMITS["request"]):
            die(quarantine, clock, engine(**{f"{number}": 1}), tenant=f"{number}")
    tenants = SimpleNamespace(names=lambda ids: asyncio.sleep(0, {each: each for each in ids}))
    routes = AdminQuarantine(quarantine=quarantine, **cast(Any, {"tenants": tenants, "audit": None}))
    answer = await routes.list(make_mocked_request("GET", "/admin/api/quarantine?limit=2"))
    found = json.loads(cast(Any, answer).body)
    assert ([row["tenant"] for row in found["data"]], found["has_more"]) == (["2", "1"], True)
