"""Limits on a tenant's uploads and deletions of adapters, on a real Valkey and on a cluster."""

import asyncio
from contextlib import suppress

import pytest

from gateway.errors import RateLimited, Unavailable
from gateway.quota.fallback import parse_fallback
from gateway.quota.limits import Limit, upload_limits
from gateway.quota.quota import Quota
from gateway.quota.uploading import ReceivedBytes, UploadSize
from gateway.records.tenants.limits import AdapterLimits
from gateway.redis.client import Client, connect
from testing.gateway.principals import principal
from testing.gateway.quotas import dump, take
from testing.gateway.running import until


def _limits(
    per_minute: int | None, at_once: int | None = None, bytes_per_minute: int | None = None
) -> tuple[Limit, ...]:
    return upload_limits(
        AdapterLimits(
            adapter_changes_per_minute=per_minute,
            max_concurrent_uploads=at_once,
            upload_bytes_per_minute=bytes_per_minute,
        )
    )


async def test_uploads_at_once_are_limited_and_each_end_frees_a_place(quota: Quota, redis: Client):
    tenant = principal().tenant.id
    for number in range(3):
        async with (
            quota.upload(tenant, f"a{number}", _limits(None, 2)),
            quota.upload(tenant, f"b{number}", _limits(None, 2)),
        ):
            with pytest.raises(
                RateLimited, match="this tenant: 2 concurrent uploads; needed 1, remaining 0"
            ) as refused:
                async with quota.upload(tenant, f"c{number}", _limits(None, 2)):
                    raise AssertionError("a third upload began")
            assert refused.value.kind == "concurrency"
    assert set(await dump(redis, principal(tenant_id=tenant))) == set()


@pytest.mark.usefixtures("stopped_clock")
async def test_changes_a_minute_are_limited_and_the_rate_is_not_given_back(quota: Quota):
    tenant = principal().tenant.id
    for number in range(5):
        async with quota.upload(tenant, f"u{number}", _limits(6, 1)):
            pass
    await quota.change(tenant, "delete", _limits(6))
    with pytest.raises(RateLimited, match="6 adapter changes per minute") as refused:
        await quota.change(tenant, "another", _limits(6))
    assert refused.value.kind == "requests"
    assert 1 <= int(refused.value.headers["Retry-After"]) <= 10


async def test_a_refused_upload_takes_nothing(quota: Quota):
    tenant = principal().tenant.id
    async with quota.upload(tenant, "runs", _limits(3, 1)):
        for number in range(10):
            with pytest.raises(RateLimited, match="1 concurrent upload;"):
                async with quota.upload(tenant, f"u{number}", _limits(3, 1)):
                    pass
    for number in range(2):
        await quota.change(tenant, f"c{number}", _limits(3))


async def test_an_upload_that_fails_or_whose_client_leaves_frees_its_place(quota: Quota):
    tenant = principal().tenant.id
    with pytest.raises(ValueError, match="broken"):
        async with quota.upload(tenant, "a", _limits(None, 1)):
            raise ValueError("broken")

    began = asyncio.Event()

    async def stay() -> None:
        async with quota.upload(tenant, "b", _limits(None, 1)):
            began.set()
            await asyncio.sleep(600)

    task = asyncio.create_task(stay())
    await began.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()

    async def free() -> bool:
        try:
            async with quota.upload(tenant, "c", _limits(None, 1)):
                return True
        except RateLimited:
            return False

    await until(free)


@pytest.mark.usefixtures("stopped_clock")
async def test_bytes_count_whatever_becomes_of_the_upload_and_their_size_is_held(quota: Quota, redis: Client):
    who = principal()
    size = UploadSize(60)
    with suppress(ValueError):
        async with quota.upload(who.tenant.id, "a", _limits(None, None, 100), size) as received:
            await received.add(60)
            with pytest.raises(RateLimited, match=r"100 uploaded bytes per minute; needed 60, remaining 4\d") as why:
                async with quota.upload(who.tenant.id, "b", _limits(None, None, 100), size):
                    pass
            assert why.value.kind == "requests"
            assert not {"x-ratelimit-limit-tokens", "x-ratelimit-limit-requests"} & why.value.headers.keys()
            raise ValueError("the upload is refused")
    with pytest.raises(RateLimited, match="needed 60, remaining 4") as refused:
        async with quota.upload(who.tenant.id, "c", _limits(None, None, 100), size):
            pass
    assert 1 <= int(refused.value.headers["Retry-After"]) <= 12
    # An upload that breaks off counts with the bytes that arrived.
    async with quota.upload(who.tenant.id, "d", _limits(None, None, 100), UploadSize(40)) as received:
        await received.add(5)
    async with quota.upload(who.tenant.id, "e", _limits(None, None, 100), UploadSize(35)):
        pass


async def _add_all(received: ReceivedBytes, num_bytes: int) -> None:
    for _ in range(0, num_bytes, 1000):
        await received.add(1000)


@pytest.mark.usefixtures("stopped_clock")
async def test_an_upload_of_unknown_size_is_cut_off_where_the_limit_ends(quota: Quota, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.quota.uploading.FIRST_BYTES", 1000)
    tenant, size = principal().tenant.id, UploadSize(10**6, is_known=False)
    async with quota.upload(tenant, "a", _limits(None, None, 20_000), size) as first:
        for _ in range(10):
            await first.add(1000)
        async with quota.upload(tenant, "b", _limits(None, None, 20_000), size) as second:
            with pytest.raises(RateLimited, match="20000 uploaded bytes per minute") as refused:
                await _add_all(second, 11_000)
            assert "The upload ends here; the received bytes count." in str(refused.value)
        assert second.total >= 5000
    with pytest.raises(RateLimited):
        async with quota.upload(tenant, "c", _limits(None, None, 20_000), UploadSize(10_000)):
            pass


@pytest.mark.usefixtures("stopped_clock")
async def test_an_upload_above_the_whole_limit_takes_all_of_it_and_is_paid_off(quota: Quota):
    tenant = principal().tenant.id
    for is_known in (True, False):
        other = f"{tenant}-{is_known}"
        large = UploadSize(300, is_known=is_known)
        async with quota.upload(other, "a", _limits(None, None, 100), large) as received:
            await received.add(300)
        with pytest.raises(RateLimited) as refused:
            async with quota.upload(other, "b", _limits(None, None, 100), UploadSize(1)):
                pass
        assert 110 <= int(refused.value.headers["Retry-After"]) <= 121


async def test_the_place_of_a_gateway_that_died_is_free_after_its_lease(redis: Client):
    """The slot of a dead gateway's upload is free after its lease; without usage, nothing is listed for settlement."""
    dying = Quota(redis, timeout=30.0, lease_seconds=0.2)
    other = Quota(redis, timeout=30.0, lease_seconds=30)
    who = principal()
    upload = dying.upload(who.tenant.id, "a", _limits(10, 1, 100), UploadSize(100))
    await upload.__aenter__()

    async def free() -> bool:
        try:
            async with other.upload(who.tenant.id, "b", _limits(10, 1, 100), UploadSize(100)):
                return True
        except RateLimited:
            return False

    await until(free)
    assert await other.expired(who.tenant.id) == []
    assert set(await dump(redis, who)) == {"quota"}


async def test_a_long_upload_keeps_its_place(redis: Client):
    # The lease outlives a stall of some seconds.
    quota = Quota(redis, timeout=30.0, lease_seconds=6.0)
    tenant = principal().tenant.id

    async def end() -> float:
        """Return when the lease ends, in seconds."""
        [(_, milliseconds)] = await redis.zrange(f"loraplex:{{{tenant}}}:leases", 0, -1, withscores=True)
        return milliseconds / 1000

    keeper = asyncio.create_task(quota.keep_leases())
    try:
        async with quota.upload(tenant, "a", _limits(None, 1)):
            first = await end()
            while await end() < first + 3.0:
                await asyncio.sleep(0.2)
                with pytest.raises(RateLimited):
                    await _try(quota, tenant)
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})


async def _try(quota: Quota, tenant: str) -> None:
    async with quota.upload(tenant, "b", _limits(None, 1)):
        pass


async def test_uploads_and_requests_do_not_share_a_limit(quota: Quota):
    who = principal(tenant={"max_concurrent": 1, "requests_per_minute": 1})
    async with quota.upload(who.tenant.id, "a", _limits(1, 1)):
        await take(quota, who)
    async with quota.upload(who.tenant.id, "free", _limits(None, None)):
        pass


async def test_without_redis_it_is_as_the_operator_chose():
    redis = connect("redis://127.0.0.1:1", timeout=0.5)
    closed = Quota(redis, timeout=0.5, lease_seconds=30)
    local = Quota(redis, timeout=0.5, lease_seconds=30, fallback=parse_fallback(("local",)))
    with pytest.raises(Unavailable):
        await closed.change("t", "a", _limits(5))
    async with local.upload("t", "a", _limits(5, 1)):
        with pytest.raises(RateLimited):
            await _try(local, "t")
    await _try(local, "t")
    await closed.close()
    await local.close()
    await redis.aclose()
