"""An OpenAI-shaped server that answers at once with `max_tokens` events: the opposite of a model.

It measures the generator's own overhead. `python -m loraplex.bench.echo` serves on a free port, prints it, and ends
with its standard input.
"""

import asyncio
import json
import sys

from aiohttp import web

# Events in one write, so that the server costs less than the client that it measures.
EVENTS_PER_WRITE = 32
MODEL = "echo"


class Echo:
    """The server's handlers. Each answer has a usage block whose prompt tokens are the prompt's words."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        is_chat = request.path.endswith("chat/completions")
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.answer(response, body["max_tokens"], is_chat=is_chat)
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": body["max_tokens"]}
        await response.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def answer(self, response: web.StreamResponse, tokens: int, *, is_chat: bool) -> None:
        """Write the answer's events."""
        one = event({"choices": [choice("word ", is_chat=is_chat)]})
        for first in range(0, tokens, EVENTS_PER_WRITE):
            await response.write(one * min(EVENTS_PER_WRITE, tokens - first))


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def choice(text: str, *, is_chat: bool, finish_reason: str | None = None) -> dict[str, object]:
    content: dict[str, object] = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, **content, "finish_reason": finish_reason}


async def main() -> None:
    runner = web.AppRunner(Echo().app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
