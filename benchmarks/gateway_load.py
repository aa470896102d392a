"""Load generator for gateway measurements: many connections, each with one small request after the other.

Prints one JSON line, in milliseconds: for whole answers the latency, and its part beyond the engine's own time; for
streams the transit time of each event, and how much longer the gap before it was at the reader than at the engine. The
connections begin one after the other within START_SECONDS; if all began at once, their first requests would measure
each other.
"""

import argparse
import asyncio
import json
import re
import time
from functools import partial
from typing import cast
from urllib.parse import urlsplit

MADE = re.compile(rb"made_us=(\d+) ")
START_SECONDS = 0.5
TAKEN = re.compile(rb"engine_us=(\d+) ")
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    def __init__(self, load: "Load", request: bytes) -> None:
        self.load, self.request = load, request
        self.buffer = bytearray()
        self.last: tuple[int, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.ask()

    def ask(self) -> None:
        if self.load.left == 0:
            self.transport.close()
            return
        self.load.left -= 1
        self.buffer.clear()
        self.last = None
        self.started = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.load.stream:
            self.observe_events(data)
            return
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end >= 0 and (length := LENGTH.search(self.buffer)) and len(self.buffer) >= end + 4 + int(length[1]):
            latency = (time.perf_counter() - self.started) * 1000
            self.load.latencies.append(latency)
            if taken := TAKEN.search(self.buffer):
                self.load.added.append(latency - int(taken[1]) / 1000)
            self.finish(self.buffer.startswith(b"HTTP/1.1 200"))

    def observe_events(self, data: bytes) -> None:
        self.buffer += data
        now, read = time.monotonic_ns() // 1000, 0
        for found in MADE.finditer(self.buffer):
            made, read = int(found[1]), found.end()
            self.load.transits.append((now - made) / 1000)
            if self.last is not None:
                self.load.added_gaps.append((now - self.last[1] - (made - self.last[0])) / 1000)
            self.last = (made, now)
        del self.buffer[:read]
        if self.buffer.endswith(b"\r\n0\r\n\r\n"):
            self.finish(b"[DONE]" in self.buffer)

    def finish(self, good: bool) -> None:
        if not good:
            self.load.failures.append(bytes(self.buffer[-300:]).decode("utf-8", "replace"))
        self.load.done += 1
        self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        self.load.open -= 1
        if self.load.open == 0:
            self.load.ended.set_result(None)


class Load:
    def __init__(self, url: str, keys: list[str], models: list[str], total: int, connections: int, body: dict) -> None:
        self.left, self.open, self.stream, self.done = total, connections, bool(body.get("stream")), 0
        self.latencies: list[float] = []
        self.added: list[float] = []
        self.transits: list[float] = []
        self.added_gaps: list[float] = []
        self.failures: list[str] = []
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.address = (parts.hostname, parts.port)
        self.requests = []
        for index in range(connections):
            raw = json.dumps({**body, "model": models[index % len(models)]}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            head += f"Authorization: Bearer {keys[index % len(keys)]}\r\nContent-Length: {len(raw)}\r\n\r\n"
            self.requests.append(head.encode() + raw)

    async def run(self) -> dict[str, object]:
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        started = time.perf_counter()
        connections = self.open
        for index, request in enumerate(self.requests):
            await asyncio.sleep(max(0.0, started + START_SECONDS * index / connections - time.perf_counter()))
            await loop.create_connection(partial(Connection, self, request), *self.address)
        await self.ended
        seconds = time.perf_counter() - started
        measured = {
            "latency": self.latencies,
            "added": self.added,
            "transit": self.transits,
            "added_gap": self.added_gaps,
        }
        return {
            "requests": self.done,
            "seconds": seconds,
            "per_second": self.done / seconds,
            "failures": self.failures[:3],
            "failed": len(self.failures),
            **{name: percentiles(values) for name, values in measured.items() if values},
        }


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * part))], 3) for name, part in at.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--keys", default="none", help="comma separated; the connections take turns")
    parser.add_argument("--models", default="base", help="comma separated; the connections take turns")
    parser.add_argument("--n", type=int, required=True, help="requests")
    parser.add_argument("--c", type=int, required=True, help="connections")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    flags = parser.parse_args()
    words = "The quick brown fox jumps over the lazy dog. " * 4
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
    body = {"messages": messages, "max_tokens": flags.tokens, "temperature": 0.7, "stream": flags.stream}
    load = Load(flags.url, flags.keys.split(","), flags.models.split(","), flags.n, flags.c, body)
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    print(json.dumps(run(load.run())), flush=True)
