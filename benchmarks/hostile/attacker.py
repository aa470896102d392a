"""The attacking tenant: one process of the lowest priority that runs one attack, round after round.

    python -m benchmarks.hostile.attacker NAME      (its target as JSON on the first line of stdin)

It prints `ready` when its payloads are made. Each further line of stdin is an `Order` as JSON: it runs the attack for
the ordered time and prints one line of JSON, a `Round`. It connects from 127.0.0.2, so that a throttle by address can
distinguish it from the neighbour.
"""

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

ADDRESS = "127.0.0.2"
LOWEST_PRIORITY = 19
# Time limit for an attack to close its connections after its round.
GRACE_SECONDS = 90.0
# Linux's times of this process's main thread in nanoseconds: on a CPU, waiting for one; and its number of turns.
SCHEDSTAT = Path("/proc/self/schedstat")
KNOWS_WAIT = SCHEDSTAT.exists()
# Interval between samples of CPU time. It is shorter than a chat, so that the quiet round repeats bursts that delay
# a chat.
CURVE_SECONDS = 0.005
BOUNDARY = b"hostile-boundary"
REQUEST_ID = re.compile(rb"req_[0-9a-f]+")


@dataclass(frozen=True)
class Target:
    """The gateway under attack, as its attacker sees it.

    control: the URL at which engine doubles report their observations. max_upload_seconds: time limit of a refusal.
    mutations: uploads that `mutated-uploads` sends in a round. gives_way: whether the attacker's process gives way to
    all others. core: the core for the attackers alone; None if they use all.
    """

    url: str
    key: str
    neighbour_key: str
    base_model: str
    max_upload_seconds: float = 5.0
    max_error_bytes: int = 2048
    control: str = ""
    mutations: int = 200
    gives_way: bool = True
    core: int | None = None


@dataclass(frozen=True)
class Order:
    """Order to run one round.

    cpu_curve: CPU seconds that the attack `busy-loop` has used at several times of the round, as pairs of seconds since
        the round's start and CPU seconds; empty: it computes without pause.
    served: requests a second of `Attacker.as_served`.
    """

    seconds: float
    cpu_curve: Sequence[tuple[float, float]] = ()
    served: float = 12.0


@dataclass
class Round:
    """Outcome of one round.

    breaches: violated guarantees, as text. accepted: digests of adapters that were stored. cpu: CPU seconds of the
    attacker's process. cpu_curve: see `Order`. waited: seconds that the process could run and waited for a CPU. served:
    answers that the engine generated for the attacker's own key.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slowest: float = 0.0
    largest_error: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    cpu_curve: list[tuple[float, float]] = field(default_factory=list)
    waited: float = 0.0
    served: int = 0


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    seconds: float
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the error's code, or an empty string."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(self.json["error"]["code"])
        return ""


class Attacker:
    """Client that sends the requests of one attack and counts the answers."""

    def __init__(self, target: Target, session: aiohttp.ClientSession, order: Order) -> None:
        self.target = target
        self.session = session
        self.cpu_curve = order.cpu_curve
        self.served = order.served
        self.began = time.monotonic()
        self.ends = self.began + order.seconds
        self.round = Round()
        # Server errors that an attack may get.
        self.by_design = {503}

    @property
    def going(self) -> bool:
        return time.monotonic() < self.ends

    @property
    def left(self) -> float:
        return max(0.0, self.ends - time.monotonic())

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.target.key}"}

    def check(self, holds: bool, words: str) -> None:
        """Record a violated guarantee unless it holds."""
        if not holds and words not in self.round.breaches:
            self.round.breaches.append(words)

    def note(self, words: str) -> None:
        if words not in self.round.notes:
            self.round.notes.append(words)

    def count(self, status: int | str, seconds: float = 0.0, body: bytes = b"") -> None:
        """Count an answer; a server error other than 503 and an unbounded error message are breaches."""
        self.round.statuses[str(status)] += 1
        self.round.slowest = max(self.round.slowest, seconds)
        if isinstance(status, int) and status >= 400:
            self.round.largest_error = max(self.round.largest_error, len(body))
            self.check(len(body) <= self.target.max_error_bytes, f"an error of {len(body)} bytes")
        if isinstance(status, int) and status >= 500 and status not in self.by_design:
            self.check(False, f"{status}: {REQUEST_ID.sub(b'req_...', body[:160]).decode('utf-8', 'replace')}")

    async def call(self, method: str, path: str, *, seconds: float = 60.0, **options: Any) -> Answer | None:
        """Send one request and return its answer, or None if the connection broke or `seconds` passed."""
        began = time.monotonic()
        options["headers"] = self.headers | options.get("headers", {})
        try:
            async with asyncio.timeout(seconds):
                async with self.session.request(method, self.target.url + path, **options) as response:
                    body = await response.read()
        except TimeoutError:
            self.count("time-out", time.monotonic() - began)
            return None
        except (aiohttp.ClientError, OSError) as error:
            self.count(type(error).__name__, time.monotonic() - began)
            return None
        answer = Answer(response.status, body, time.monotonic() - began, dict(response.headers))
        self.count(answer.status, answer.seconds, body)
        is_own = options["headers"]["Authorization"] == self.headers["Authorization"]
        self.round.served += is_own and answer.status == 200 and path.endswith("/completions")
        return answer

    async def chat(self, words: str = "Hi", seconds: float = 60.0, **body: Any) -> Answer | None:
        body = {"model": self.target.base_model, "messages": [{"role": "user", "content": words}]} | body
        return await self.call("POST", "/v1/chat/completions", json=body, seconds=seconds)

    async def complete(self, prompt: Any, seconds: float = 60.0, **body: Any) -> Answer | None:
        body = {"model": self.target.base_model, "prompt": prompt} | body
        return await self.call("POST", "/v1/completions", json=body, seconds=seconds)

    async def upload(self, name: str, parts: dict[str, bytes], seconds: float = 60.0) -> Answer | None:
        """Push an adapter as `parts` (an archive is the part `file`) and record its digest if it is stored."""
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        data = form({"name": name.encode("utf-8", "surrogatepass")} | parts)
        answer = await self.call("POST", "/v1/adapters", data=data, headers=kind, seconds=seconds)
        if answer is not None and answer.status == 201:
            self.round.accepted.append(answer.json["digest"])
        return answer

    async def refused_upload(self, name: str, parts: dict[str, bytes]) -> Answer | None:
        """Push an adapter that must be refused with a 4xx and a reason within the target's time limit."""
        answer = await self.upload(name, parts)
        if answer is not None and answer.status not in (429, 503):
            self.check(400 <= answer.status < 500, f"{name}: expected a refusal, got {answer.status}")
        if answer is not None:
            limit = self.target.max_upload_seconds
            self.check(answer.seconds <= limit, f"{name}: the refusal took more than {limit:g} s")
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a bare connection with the smallest receive buffer that the system allows."""
        parts = urlsplit(self.target.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**14, local_addr=(ADDRESS, 0))
        return reader, writer

    def head(self, method: str, path: str, length: int | None, *more: str) -> bytes:
        """Return a request's head, written by hand. length: bytes of the body; None for a chunked body."""
        lines = [f"{method} {path} HTTP/1.1", "Host: hostile", f"Authorization: Bearer {self.target.key}"]
        lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
        return "\r\n".join([*lines, *more, "", ""]).encode()

    async def side_by_side(self, number: int, one: Callable[[int], Awaitable[object]]) -> None:
        """Run this many copies of `one` at once, and cancel the rest when the time is over."""
        tasks = [asyncio.ensure_future(one(index)) for index in range(number)]
        _, pending = await asyncio.wait(tasks, timeout=self.left)
        for task in pending:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, OSError | aiohttp.ClientError):
                raise result

    async def as_served(self, one: Callable[[int], Awaitable[object]]) -> None:
        """Run `one` as often as the attacked round had served answers, evenly over the time that is left.

        An honest tenant in a closed loop would be served more than an attacker with slow or refused requests, and its
        load would hide the attack's. `one` gets the number of its turn.
        """
        count = max(1, round(self.served * (self.ends - self.began)))
        distance = self.left / count

        async def in_turn(turn: int) -> None:
            await self.pause(turn * distance)
            await one(turn)

        await self.side_by_side(count, in_turn)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, self.left))


def form(parts: dict[str, bytes]) -> bytes:
    """Return a multipart body, written by hand."""
    body = []
    for name, content in parts.items():
        file = b"" if name == "name" else b'; filename="%s"' % name.encode()
        body.append(
            b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
            % (BOUNDARY, name.encode(), file, content)
        )
    return b"".join(body) + b"--%s--\r\n" % BOUNDARY


def seconds_waited() -> float:
    """Return the time that this process's main thread, which runs the attack, has waited for a CPU; 0 if unknown."""
    return int(SCHEDSTAT.read_text().split()[1]) / 1e9 if KNOWS_WAIT else 0.0


@contextlib.asynccontextmanager
async def recorded_cpu(curve: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Append the process's CPU seconds since now to `curve`, every `CURVE_SECONDS` until the context ends."""
    began, cpu = time.monotonic(), time.process_time()

    async def record() -> None:
        while True:
            await asyncio.sleep(CURVE_SECONDS)
            curve.append((time.monotonic() - began, time.process_time() - cpu))

    recording = asyncio.create_task(record())
    try:
        yield
    finally:
        recording.cancel()


async def run_round(name: str, target: Target, order: Order) -> Round:
    """Run the attack once, for about the ordered time."""
    from benchmarks.hostile.catalogue import ATTACKS

    cpu = time.process_time()
    connector = aiohttp.TCPConnector(limit=0, local_addr=(ADDRESS, 0))
    async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as session:
        attacker = Attacker(target, session, order)
        waited = seconds_waited()
        try:
            async with recorded_cpu(attacker.round.cpu_curve):
                async with asyncio.timeout(order.seconds + GRACE_SECONDS):
                    await ATTACKS[name].run(attacker)
        except TimeoutError:
            attacker.check(False, f"the gateway kept the attacker waiting for {GRACE_SECONDS:g} s beyond its time")
        attacker.round.waited = seconds_waited() - waited
        attacker.round.seconds = time.monotonic() - attacker.began
        attacker.round.cpu = time.process_time() - cpu
        if not KNOWS_WAIT:
            attacker.note("the attacker's wait for a CPU is unknown")
        return attacker.round


def give_way() -> None:
    """Let every other process have this process's core as soon as it wakes up.

    Niceness 19 alone does not: a process that wakes up waits up to 4 ms for a tick of the kernel's clock, and a chat
    has some twenty such wake-ups. So 500 bodies that were sent to a process outside of the stack doubled the p99 of
    the neighbour's chats. A policy of Linux does; elsewhere niceness is all there is.
    """
    os.nice(LOWEST_PRIORITY)
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    from benchmarks.hostile.catalogue import ATTACKS

    name = sys.argv[1]
    target = Target(**json.loads(sys.stdin.readline()))
    if target.gives_way:
        give_way()
    if target.core is not None:
        os.sched_setaffinity(0, {target.core})
    prepare = ATTACKS[name].prepare
    if prepare is not None:
        prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(vars(asyncio.run(run_round(name, target, Order(**json.loads(line)))))), flush=True)


if __name__ == "__main__":
    main()
