"""The well-behaved tenant: short streamed chats at a steady slow rate, with an occasional small upload.

Every second chat is with its adapter, so that an attack on adapters, which evicts or unloads it, is seen.

Its rate follows the machine's speed, so that its own chats hardly queue behind each other: at a high utilisation a
small slow-down becomes a large one, and quiet rounds differ by more than any attack does.
"""

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.hostile.archives import good
from benchmarks.hostile.attacker import BOUNDARY, form
from benchmarks.hostile.place import Place
from benchmarks.hostile.ratios import percentile

# Interval between chats: a multiple of the duration of a single chat, and its minimum in seconds. Chats share the steps
# of a simulated device and hardly wait for each other, so there are more of them, and p99 depends on more than one.
CHAT_INTERVAL_FACTOR, SIMULATED_INTERVAL_FACTOR, MIN_CHAT_INTERVAL = 3.0, 1.5, 0.04
ADAPTER = "pirate"
# Limits of the neighbour's tenant above its own load. The default of 600 requests a minute would be below it.
NEIGHBOUR_LIMITS = {"requests_per_minute": 6_000, "tokens_per_minute": 1_000_000}
LONE_CHATS = 8
UPLOAD_SECONDS = 3.0
# Short answers give more chats a second, so that p99 depends on more than one of them: a first token and a decode step.
ANSWER_TOKENS = 2
# An answer that takes longer counts as failed.
PATIENCE_SECONDS = 30.0


@dataclass
class Measurements:
    """The neighbour's measurements, in seconds. failures: failed answers, as text."""

    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    uploads: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Measurements") -> None:
        self.whole += other.whole
        self.first += other.first
        self.uploads += other.uploads
        self.failures += other.failures


class Neighbour:
    """Load of one key. Requests begin by the clock, whether or not earlier ones have ended."""

    def __init__(self, session: aiohttp.ClientSession, place: Place, key: str, *, uploads: bool) -> None:
        self._session = session
        self._url = place.url
        self._headers = {"Authorization": f"Bearer {key}"}
        # In turn. Without uploads, the engines are doubles and have no adapters.
        self._models = itertools.cycle([place.base_model, ADAPTER] if uploads else [place.base_model])
        self._factor = SIMULATED_INTERVAL_FACTOR if place.is_simulated else CHAT_INTERVAL_FACTOR
        self._uploads = uploads
        self.chat_interval = MIN_CHAT_INTERVAL
        # Keeps a slow machine from exceeding this tenant's own limit of concurrent uploads. Waiting counts as time.
        self._one_upload = asyncio.Lock()

    async def calibrate(self) -> None:
        """Warm up the service with single chats, one after the other, and set the interval from their duration.

        It includes the first upload, because the engine probes a content only at its first upload.
        """
        measured = Measurements()
        if self._uploads:
            await self._guarded(self._upload, measured)
        for _ in range(2 * LONE_CHATS):
            await self._guarded(self._chat, measured)
        lone = percentile(measured.whole[LONE_CHATS:], 0.5)
        self.chat_interval = max(MIN_CHAT_INTERVAL, self._factor * lone)

    async def measure(self, until: asyncio.Event) -> Measurements:
        """Measure until the event is set and every started request has ended."""
        measured = Measurements()
        beats = [self._beat(self.chat_interval, self._chat, measured, until)]
        if self._uploads:
            beats.append(self._beat(UPLOAD_SECONDS, self._upload, measured, until))
        await asyncio.gather(*beats)
        return measured

    async def _beat(self, seconds: float, one: Any, measured: Measurements, until: asyncio.Event) -> None:
        began, turn, tasks = time.monotonic(), 0, []
        while not until.is_set():
            tasks.append(asyncio.ensure_future(self._guarded(one, measured)))
            turn += 1
            try:
                await asyncio.wait_for(until.wait(), max(0.0, began + turn * seconds - time.monotonic()))
            except TimeoutError:
                continue
        await asyncio.gather(*tasks)

    async def _guarded(self, one: Any, measured: Measurements) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await one(measured, began)
        except TimeoutError:
            measured.failures.append(f"no answer after {PATIENCE_SECONDS:g} s")
            (measured.whole if one == self._chat else measured.uploads).append(PATIENCE_SECONDS)
        except (aiohttp.ClientError, OSError) as error:
            measured.failures.append(type(error).__name__)

    async def _chat(self, measured: Measurements, began: float) -> None:
        body = {"model": next(self._models), "messages": [{"role": "user", "content": "Say hello."}], "stream": True}
        body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
        url = f"{self._url}/v1/chat/completions"
        async with self._session.post(url, json=body, headers=self._headers) as response:
            if response.status != 200:
                measured.failures.append(f"chat {response.status}: {(await response.text())[:120]}")
                return
            first, text = 0.0, b""
            async for chunk in response.content.iter_any():
                first = first or time.monotonic() - began
                text = text[-200:] + chunk
        if b"[DONE]" not in text:
            measured.failures.append("a stream without its end")
        measured.first.append(first)
        measured.whole.append(time.monotonic() - began)

    async def _upload(self, measured: Measurements, began: float) -> None:
        headers = self._headers | {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        data = form({"name": ADAPTER.encode()} | good())
        post = self._session.post
        async with self._one_upload, post(f"{self._url}/v1/adapters", data=data, headers=headers) as response:
            text = await response.text()
        if response.status != 201:
            measured.failures.append(f"upload {response.status}: {text[:120]}")
        measured.uploads.append(time.monotonic() - began)
