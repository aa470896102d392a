"""External observation of a gateway: its memory, its event loop's stalls, and leftovers of an attack."""

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import redis

from benchmarks.hostile.place import Place
from gateway.process.background import running
from gateway.process.loop_lag import LoopLag
from gateway.process.loop_stalls import EVENT, Stall

PROBE_SECONDS = 0.01
MEMORY_SECONDS = 0.02
CHILDREN_SECONDS = 0.2
# An attack's last requests may end this long after it: a lease that is not extended lasts 30 s.
SETTLE_SECONDS = 45.0
DIGEST = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}(/(adapter_config\.json|adapter_model\.safetensors))?")


@dataclass
class Seen:
    """Measurements of one round, in bytes and seconds.

    memory: the gateway's peak above its start. children: its children's peak. stall: the slowest answer, without the
    time for which this process's own loop stalled. explained: stalls that the gateway's log explains, as `name=value`
    words; it has one in 10 s. own: stalls of this process's loop of more than 100 ms.
    """

    memory: int = 0
    children: int = 0
    stall: float = 0.0
    cpu: float = 0.0
    failures: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    own: list[Stall] = field(default_factory=list)


@dataclass(frozen=True)
class Remains:
    """Counts of everything that an attack may leave behind, by name."""

    counts: Counter[str]
    digests: frozenset[str]

    def beyond(self, before: "Remains", accepted: set[str]) -> list[str]:
        """Return what is new since `before`, as text. accepted: digests that may be in the store."""
        more = [f"{number - before.counts[name]} {name}" for name, number in self.counts.items()]
        found = [
            words for words, name in zip(more, self.counts, strict=True) if self.counts[name] > before.counts[name]
        ]
        unknown = self.digests - before.digests - accepted
        return found + ([f"{len(unknown)} adapters in the store without an accepted upload"] if unknown else [])


class Watch:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._gateway = psutil.Process(place.gateway_pid)
        self._redis = redis.Redis.from_url(place.redis_url, socket_timeout=10)

    def close(self) -> None:
        self._redis.close()

    async def observe(self, until: asyncio.Event) -> Seen:
        """Watch memory and stalls until the event is set."""
        seen = Seen()
        cpu = sum(self._gateway.cpu_times()[:2])
        logged = self._place.log.stat().st_size
        lag = LoopLag(seen.own.append)
        lag.explain_from_now()
        works = (self._memory(seen), self._stalls(seen, lag), self._children(seen))
        async with running(lag.watch()):
            tasks = [asyncio.ensure_future(work) for work in works]
            await until.wait()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                seen.failures.append(f"{type(result).__name__}: {result}")
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.cpu = sum(self._gateway.cpu_times()[:2]) - cpu
        with self._place.log.open("rb") as log:
            log.seek(logged)
            seen.explained = explanations(log.read().decode(errors="replace"))
        return seen

    async def _memory(self, seen: Seen) -> None:
        start = self._gateway.memory_info().rss
        while True:
            seen.memory = max(seen.memory, self._gateway.memory_info().rss - start)
            await asyncio.sleep(MEMORY_SECONDS)

    async def _children(self, seen: Seen) -> None:
        while True:
            total = 0
            for child in self._gateway.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += child.memory_info().rss
            seen.children = max(seen.children, total)
            await asyncio.sleep(CHILDREN_SECONDS)

    async def _stalls(self, seen: Seen, lag: LoopLag) -> None:
        """Request /healthz, which does no work, every 10 ms over one connection; the slowest answer is the stall.

        lag: measures this loop, whose own stalls are not counted.
        """

        def answered() -> None:
            seen.stall = max(seen.stall, time.monotonic() - began - lag.since(began))

        parts = urlsplit(self._place.url)
        request = f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
        while True:
            began = time.monotonic()
            try:
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            except OSError:
                answered()
                await asyncio.sleep(0.1)
                continue
            try:
                while True:
                    began = time.monotonic()
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = re.search(rb"(?i)content-length: *(\d+)", head)
                    await reader.readexactly(int(length[1]) if length else 0)
                    answered()
                    await asyncio.sleep(PROBE_SECONDS)
            except (OSError, asyncio.IncompleteReadError):
                continue
            finally:
                answered()
                writer.close()

    async def settled(self, before: Remains | None = None, accepted: set[str] | None = None) -> Remains:
        """Return the remains as soon as they are those of `before` again, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            remains = await self._remains()
            over = time.monotonic() > deadline
            if over or before is None or not remains.beyond(before, accepted or set()):
                return remains
            await asyncio.sleep(0.25)

    async def _remains(self) -> Remains:
        counts: Counter[str] = Counter()
        for path in self._place.temporary.iterdir():
            counts["temporary " + re.sub(r"[-_.][a-z0-9_]{6,}$", "", path.name)] += 1
        digests = _count_store(self._place.store, counts)
        counts["child processes"] = len(self._gateway.children(recursive=True))
        counts["open connections"] = sum(
            c.status == psutil.CONN_ESTABLISHED and c.laddr.port == urlsplit(self._place.url).port
            for c in self._gateway.net_connections()
        )
        for key in self._redis.scan_iter("loraplex:{*}:leases"):
            counts["leases"] += self._redis.zcard(key)
        for key in self._redis.scan_iter("loraplex:{*}:held"):
            counts["held requests"] += self._redis.hlen(key)
        await self._from_metrics(counts)
        return Remains(+counts, frozenset(digests))

    async def _from_metrics(self, counts: Counter[str]) -> None:
        headers = {"Authorization": f"Bearer {self._place.admin_key}", "Connection": "close"}
        url = f"{self._place.url}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
            text = await response.text()
        for name, words in (
            ("http_in_flight", "requests being answered"),
            ("engine_in_flight", "requests with engines"),
            ("queue_waiting", "requests in the queue"),
        ):
            found = re.findall(rf"^loraplex_gateway_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            counts[words] = int(sum(map(float, found)))
        available = re.findall(r"^loraplex_gateway_engine_available{.*} (\S+)$", text, re.MULTILINE)
        counts["engines taken out"] = sum(float(value) == 0 for value in available)


def explanations(log: str) -> list[str]:
    """Return the explanations of stalls in a gateway's log."""
    return [line.partition(f"{EVENT} ")[2] for line in log.splitlines() if f"{EVENT} " in line]


def _count_store(store: Path, counts: Counter[str]) -> set[str]:
    """Count what does not belong into an adapter store. Return the digests of its adapters."""
    digests = set()
    # os.walk passes over folders that are removed during the walk.
    for folder, _, files in os.walk(store):
        relative = os.path.relpath(folder, store)
        if DIGEST.fullmatch(relative):
            digests.add("sha256:" + relative[3:])
            counts["damaged store entries"] += not files
        counts["foreign files in the store"] += sum(not DIGEST.fullmatch(f"{relative}/{name}") for name in files)
    return digests
