"""OpenAI server double for the bench: answers with a known time to first token, known gaps and known failures."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from loraplex.bench.echo import Echo, choice, event
from testing.serving import serving

Failing = Mapping[int, str]


@dataclass
class Double(Echo):
    """Server whose answers have a first token after `ttft` seconds and one more every `gap` seconds.

    per_event: tokens in one event. extra: tokens that the usage block counts beyond those sent; None: no usage block.
    fails: by the request's number, from 0, in the order of arrival: an HTTP status, `drop` (the stream breaks after its
    first token), `event` (an error event after it), `stall` (no answer), `empty` (no token). lists: names in
    `/v1/models`; all but `base` are adapters. seats: maximum concurrent answers.
    """

    ttft: float = 0.0
    gap: float = 0.0
    per_event: int = 1
    extra: int | None = 0
    fails: Failing = field(default_factory=dict)
    lists: tuple[str, ...] = ("base", "a0", "a1")
    seats: int = 1000
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.seats)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async with serving(self.app()) as url:
            yield url

    async def models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "parent": None if name == "base" else "base"} for name in self.lists]
        return web.json_response({"data": data})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        failure = self.fails.get(len(self.bodies))
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if failure == "stall":
            await asyncio.sleep(3600)
        if failure is not None and failure.isdigit():
            refusal = {"error": {"code": "quota_exceeded", "message": f"{request.headers.get('Authorization')} no"}}
            return web.json_response(refusal, status=int(failure))
        async with self._free:
            return await self._stream(request, body, failure)

    async def _stream(self, request: web.Request, body: dict[str, Any], failure: str | None) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if is_chat:
            await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        await asyncio.sleep(self.ttft)
        events = 0 if failure == "empty" else body["max_tokens"] // self.per_event
        for number in range(events):
            if number:
                await asyncio.sleep(self.gap)
            await response.write(event({"choices": [choice("word ", is_chat=is_chat)]}))
            if failure == "drop":
                assert request.transport is not None
                request.transport.close()
                return response
            if failure == "event":
                await response.write(event({"error": {"code": "engine_died", "message": "gone"}}))
                return response
        await response.write(event({"choices": [choice("", is_chat=is_chat, finish_reason="length")]}))
        if self.extra is not None:
            prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
            tokens = events * self.per_event + self.extra
            usage = {"prompt_tokens": len(prompt.split()) + 3, "completion_tokens": tokens}
            await response.write(event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response
