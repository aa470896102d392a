"""Receiver of webhooks."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from testing.ports import free_port


class Target:
    """A web server that keeps what it receives, and answers with `status` and `text`. Its URL has secrets."""

    def __init__(self, text: str) -> None:
        self.received: list[tuple[Any, bytes]] = []
        self.status = 204
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/secret-path?token=secret-token"
        self._text = text

    async def handle(self, request: web.Request) -> web.Response:
        self.received.append((request.headers.copy(), await request.read()))
        return web.Response(status=self.status, text=self._text)

    @property
    def types(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.received]


@asynccontextmanager
async def webhook_target(text: str = "") -> AsyncIterator[Target]:
    """Run a target. text: the body of its answers."""
    target = Target(text)
    app = web.Application()
    app.router.add_post("/secret-path", target.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", target.port).start()
    yield target
    await runner.cleanup()
