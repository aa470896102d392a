"""Engine double with persistent books: it speaks our engine's protocol and makes up tokens.

Its counts are in the engine's own ring (engine.answering.usage_log), in a file, written before an event is sent.
"""

import argparse
import asyncio
import json
from pathlib import Path

from aiohttp import web

from engine.answering.usage_log import UsageLog, UsageSlot
from testing.gateway.upstream import TOKEN
from testing.gateway.upstream_bodies import usage

PROMPT_TOKENS = 11
CACHED_TOKENS = 3


class Double:
    def __init__(self, file: Path, event_seconds: float) -> None:
        self.finished = UsageLog(file)
        self.event_seconds = event_seconds

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_get("/state", self.state)
        app.router.add_get("/finished", self.ask)
        return app

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def state(self, _: web.Request) -> web.Response:
        state = {"revision": 1, "model": "base", "adapters_resident": [], "running": 0, "waiting": 0}
        return web.json_response(state | {"max_num_seqs": 256})

    async def ask(self, request: web.Request) -> web.Response:
        ids = request.query["ids"].split(",")
        await self.finished.wait(ids, float(request.query["wait"]))
        known = [found for id_ in ids if (found := self.finished.get(id_)) is not None]
        fields = ("id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens")
        return web.json_response({"object": "list", "data": [{f: getattr(k, f) for f in fields} for k in known]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["x-loraplex-internal-token"] == TOKEN
        body = await request.json()
        slot = self.finished.open(request.headers["x-request-id"], PROMPT_TOKENS)
        reason = "abort"
        try:
            response = await self.stream(request, body, slot)
            reason = "length"
            return response
        finally:
            slot.end(reason)

    async def stream(self, request: web.Request, body: dict, slot: UsageSlot) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        tokens = body["max_tokens"]
        for made in range(1, tokens + 1):
            await asyncio.sleep(self.event_seconds)
            slot.count(PROMPT_TOKENS, made, CACHED_TOKENS)
            if made == 1:
                await response.prepare(request)
            choice = {"index": 0, "text": "a", "finish_reason": "length" if made == tokens else None}
            counts = {"completion_tokens": made, "prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS}
            event = {"id": "c", "model": body["model"], "choices": [choice], "usage": None, "loraplex": counts}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        last = {"id": "c", "model": body["model"], "choices": [], "usage": usage(tokens)}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--event-ms", type=float, default=20.0)
    options = parser.parse_args()
    runner = web.AppRunner(
        Double(options.file, options.event_ms / 1000).app(), handler_cancellation=True, access_log=None
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port, reuse_address=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
