"""Notes of running requests, on a single Redis server and on a cluster."""

from gateway.quota.demand import RequestSize
from gateway.quota.limits import upload_limits
from gateway.quota.quota import Quota
from gateway.records.tenants.limits import AdapterLimits
from testing.gateway.principals import principal


async def test_notes_of_running_requests(quota: Quota):
    who = principal(tenant_id="notes")
    assert await quota.notes("notes") == []
    note = {"model": "pirate", "version": 3, "text": "ü" * 300}
    taken = [await quota.acquire(who, "pirate", f"r{number}", RequestSize(1, 1), note) for number in range(3)]
    async with quota.upload("notes", "upload", upload_limits(AdapterLimits())):
        assert await quota.notes("notes") == [note] * 3
    for each in taken:
        await quota.release(each)
    assert await quota.notes("notes") == []
