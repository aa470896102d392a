"""Leases and reservations of running requests, on a real Valkey and on a cluster: kept, expired, revived, refunded."""

import asyncio
from datetime import timedelta

import msgspec
import pytest

from gateway.access.auth import TenantPrincipal
from gateway.errors import RateLimited, Unavailable
from gateway.quota import late_settlements
from gateway.quota.quota import Quota
from gateway.records.money.prices import Price
from gateway.redis.client import Client
from gateway.redis.keys import LEASE_SWEEPER_KEY
from testing.gateway.principals import principal
from testing.gateway.quotas import settle, take
from testing.gateway.running import until


async def test_a_lease_that_nobody_extends_frees_its_slot_and_waits_to_be_settled(redis: Client):
    dying = Quota(redis, timeout=30.0, lease_seconds=0.05)
    other = Quota(redis, timeout=30.0, lease_seconds=30)
    who = principal(tenant={"max_concurrent": 1, "max_concurrent_tokens": 1000, "budget_per_month": 1000})
    price = Price(output=1_000_000)
    await take(dying, who, 900, request_id="a", price=price, note={"model": "m", "price": price})
    await until(lambda: other.expired(who.tenant.id))
    [found] = await other.expired(who.tenant.id)
    assert (found.reservation.request_id, found.reservation.tokens, found.progress) == ("a", 900, None)
    assert found.note == {"model": "m", "price": {"input": 0, "cached": 0, "output": 1_000_000}}
    # Its slot and its tokens are free; its money is held until the cost is known.
    with pytest.raises(RateLimited, match="budget"):
        await take(other, who, 900, price=price)
    assert await settle(other, found.reservation, 10, 10) is not None
    assert await settle(dying, found.reservation, 10, 10) is None
    assert await other.expired(who.tenant.id) == []
    await take(other, who, 990, price=price)
    with pytest.raises(RateLimited, match="concurrent"):
        await take(other, who, 1)


async def test_a_lease_that_is_kept_does_not_end_and_says_how_far_it_is(redis: Client):
    # Extended every two seconds, so that it outlives a stall of some seconds.
    quota = Quota(redis, timeout=30.0, lease_seconds=6.0)
    who = principal(tenant={"max_concurrent": 1})
    running = await take(quota, who, request_id="a")
    quota.progress(running, "http://engine", 7, 9)
    keeper = asyncio.create_task(quota.keep_leases())
    try:
        # Reported with the first extension.
        await until(lambda: redis.hget(f"loraplex:{{{who.tenant.id}}}:held", "a:progress"))
        with pytest.raises(RateLimited):
            await take(quota, who)
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
    quota._leases._lease_ms = 10
    await quota._leases.extend(who.tenant.id)
    await until(lambda: quota.expired(who.tenant.id))
    [found] = await quota.expired(who.tenant.id)
    assert found.progress is not None
    assert (found.progress.engine_url, found.progress.prompt_tokens, found.progress.completion_tokens) == (
        "http://engine",
        7,
        9,
    )


async def test_a_lease_given_up_too_early_is_revived(redis: Client):
    """A lease that expired while its gateway could not reach Redis is revived, because its request continues."""
    quota = Quota(redis, timeout=30.0, lease_seconds=0.05)
    who = principal(tenant={"max_concurrent": 1})
    running = await take(quota, who)
    await until(lambda: quota.expired(who.tenant.id))
    quota._leases._lease_ms = 30_000
    await quota._leases.extend(who.tenant.id)
    assert await quota.expired(who.tenant.id) == []
    with pytest.raises(RateLimited):
        await take(quota, who)
    await settle(quota, running, 1)
    await take(quota, who)


async def test_a_lease_that_was_lost_is_put_back(redis: Client):
    """A running request whose lease Redis lost holds its slot again, and is settled if its gateway dies."""
    who = principal(
        tenant={"max_concurrent": 1, "budget_per_month": 10**6},
        key={"max_concurrent_tokens": 900, "tokens_per_day": 900},
    )
    quota = Quota(redis, timeout=30.0, lease_seconds=600)
    running = await take(quota, who, 400, request_id="a", note={"model": "m"})
    quota.progress(running, "http://engine", 7, 9)
    tag = f"loraplex:{{{who.tenant.id}}}:"
    for part in ("quota", "leases", "held", "usage"):
        await redis.delete(tag + part)
    for _ in range(2):
        await quota._leases.extend(who.tenant.id)
    kept = await redis.hgetall(tag + "quota")
    counted = kept.pop(b"!")
    assert int(counted) > 0
    assert kept == {b"tenant:c": b"1", b"key:0123456789abcdef:o": b"400", b"key:0123456789abcdef:d#": b"400"}
    with pytest.raises(RateLimited, match="concurrent"):
        await take(quota, who)
    quota._leases._lease_ms = 10
    await quota._leases.extend(who.tenant.id)
    await until(lambda: quota.expired(who.tenant.id))
    [found] = await quota.expired(who.tenant.id)
    assert (found.note, found.reservation.admitted_at) == ({"model": "m"}, running.admitted_at)
    assert found.progress is not None
    assert await settle(quota, running, 100) is not None
    assert await settle(quota, running, 100) is None
    await take(quota, who)


async def test_a_request_that_another_gateway_has_settled_changes_nothing_at_its_end(redis: Client):
    """A gateway that was cut off for longer than a lease neither restores the lease nor settles it again."""
    cut_off = Quota(redis, timeout=30.0, lease_seconds=0.05)
    other = Quota(redis, timeout=30.0, lease_seconds=600)
    who = principal(
        tenant={"max_concurrent": 2, "tokens_per_minute": 1000, "requests_per_minute": 9, "budget_per_month": 1000},
        key={"tokens_per_day": 1000, "budget_per_30_days": 1000, "max_concurrent_tokens": 1000},
    )
    price = Price(output=1_000_000)
    running = await take(cut_off, who, 400, request_id="a", price=price)
    await until(lambda: other.expired(who.tenant.id))
    [found] = await other.expired(who.tenant.id)
    assert await settle(other, found.reservation, 100, 100, is_abandoned=True) is not None
    assert await redis.zrange(f"loraplex:{{{who.tenant.id}}}:abandoned", 0, -1) == [b"a"]
    before = await left(other, who)
    assert before["budget_per_month"] == before["budget_per_30_days"] == 900
    assert before["max_concurrent"] == 2
    cut_off._leases._lease_ms = 600_000
    for _ in range(2):
        await cut_off._leases.extend(who.tenant.id)
    assert not cut_off.runs(running)
    # Its next tokens end it. Once it has ended, nothing is remembered of it.
    with pytest.raises(Unavailable):
        cut_off.progress(running, "http://engine", 0, 1)
    assert await settle(cut_off, running, 250, 250) is None
    cut_off.progress(running, "http://engine", 0, 1)
    # Time pays off the debt of rates meanwhile; a second settlement would have added 150 tokens to it.
    after = await left(other, who)
    assert after.pop("tokens_per_minute") >= before.pop("tokens_per_minute")
    assert 0 <= after.pop("tokens_per_day") - before.pop("tokens_per_day") < 50
    assert after == before


async def test_a_request_whose_gateway_is_back_is_not_settled_by_another_one(redis: Client):
    """The other gateway listed the ended lease before it was extended again."""
    back = Quota(redis, timeout=30.0, lease_seconds=0.05)
    other = Quota(redis, timeout=30.0, lease_seconds=600)
    who = principal(tenant={"max_concurrent": 1, "budget_per_month": 1000})
    running = await take(back, who, 400, request_id="a", price=Price(output=1_000_000))
    await until(lambda: other.expired(who.tenant.id))
    [found] = await other.expired(who.tenant.id)
    back._leases._lease_ms = 600_000
    await back._leases.extend(who.tenant.id)
    assert await settle(other, found.reservation, 100, 100, is_abandoned=True) is None
    with pytest.raises(RateLimited, match="concurrent"):
        await take(other, who)
    assert await settle(back, running, 250, 250) is not None
    assert (await left(other, who))["budget_per_month"] == 750


async def test_a_running_request_survives_a_clock_that_is_a_day_ahead(redis: Client, caplog: pytest.LogCaptureFixture):
    """Redis loses the lease by a failover to a server on whose clock the request is older than the kept ids."""
    quota = Quota(redis, timeout=30.0, lease_seconds=600)
    who = principal(tenant={"max_concurrent": 1})
    running = await take(quota, who)
    lease = quota._leases._leases[who.tenant.id][running.request_id]
    lease.reservation = msgspec.structs.replace(running, admitted_at=running.admitted_at - timedelta(days=2))
    await redis.delete(*(f"loraplex:{{{who.tenant.id}}}:{part}" for part in ("quota", "leases", "held")))
    for _ in range(2):
        await quota._leases.extend(who.tenant.id)
    assert await redis.zcard(f"loraplex:{{{who.tenant.id}}}:leases") == 0
    assert quota.runs(running)
    quota.progress(running, "http://engine", 0, 1)
    assert caplog.text.count("is not restored") == 1
    assert "settled" not in caplog.text


async def left(quota: Quota, who: TenantPrincipal) -> dict[str, int]:
    return {each.limit.name: each.remaining for each in await quota.peek(who)}


async def test_one_sweep_finds_the_tenants_whose_leases_have_ended(redis: Client):
    dying, living = Quota(redis, timeout=30.0, lease_seconds=0.01), Quota(redis, timeout=30.0, lease_seconds=600)
    those = [principal(tenant={"max_concurrent": 1}) for _ in range(250)]
    for number, who in enumerate(those):
        await take(dying if number % 50 == 0 else living, who)
    ids = [who.tenant.id for who in those]

    async def found() -> bool:
        return await living.with_expired(ids) == ids[::50]

    await until(found)
    # Whether or not their settlement has begun.
    await living.expired(ids[0])
    assert await living.with_expired(ids) == ids[::50]
    assert await living.with_expired([]) == []


async def test_of_all_gateways_one_looks_after_the_dead(redis: Client):
    await redis.delete(LEASE_SWEEPER_KEY)
    quotas = [Quota(redis, timeout=30.0, lease_seconds=30) for _ in range(4)]
    first = await asyncio.gather(*(quota.is_first(600) for quota in quotas))
    assert sum(first) == 1
    await redis.delete(LEASE_SWEEPER_KEY)


async def test_what_a_client_took_that_left_meanwhile_is_given_back(quota: Quota, redis: Client):
    who = principal(tenant={"max_concurrent": 1})
    keeper = asyncio.create_task(quota.keep_leases())
    try:
        for _ in range(20):
            task = asyncio.create_task(take(quota, who))
            # A random point between the call and its answer.
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await settle(quota, task.result(), 1)

        async def free() -> bool:
            return not await redis.exists(f"loraplex:{{{who.tenant.id}}}:held")

        await until(free)
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
    await take(quota, who)


async def test_a_tenant_whose_settlement_fails_does_not_stop_the_others(redis: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(late_settlements, "RETRY_SECONDS", 0.1)
    quota = Quota(redis, timeout=30.0, lease_seconds=600)
    broken, other = (principal(tenant={"max_concurrent": 1}) for _ in range(2))
    key = f"loraplex:{{{broken.tenant.id}}}:held"
    await redis.set(key, b"of another type")
    running = await take(quota, other)
    quota._late_settlements.add(broken.tenant.id, "lost")
    quota._late_settlements.add(other.tenant.id, running.request_id)
    keeper = asyncio.create_task(quota.keep_leases())
    await until(lambda: asyncio.sleep(0, quota._late_settlements.tenant_ids == [broken.tenant.id]))
    await take(quota, other)
    await redis.delete(key)
    await until(lambda: asyncio.sleep(0, not quota._late_settlements.tenant_ids))
    keeper.cancel()
    await asyncio.wait({keeper})
    await quota.close()
