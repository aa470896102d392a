"""Double of llm-d's router (May 2026) in front of doubles of vLLM, as a gateway sees it.

Its behaviour is taken from the router's source (`pkg/epp`): a request without a body goes to a random server, a request
for an adapter to a server that has it loaded, a refusal is a plain text with the reason in a header.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Self

from aiohttp import ClientSession, web

from testing.gateway.vllm_double import VllmDouble
from testing.serving import serving


class LlmdDouble:
    """Router of a pool. fairness: fairness ids of the requests. drop: status and reason of every request, or None."""

    def __init__(self, servers: Sequence[VllmDouble]) -> None:
        self.url = ""
        self.servers = servers
        self.fairness: list[str] = []
        self.drop: tuple[int, str] | None = None
        self._turn = count()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        async with ClientSession() as self._session, serving(app) as self.url:
            yield self

    async def _get(self, request: web.Request) -> web.Response:
        server = self.servers[next(self._turn) % len(self.servers)]
        async with self._session.get(server.url + request.path) as got:
            return web.Response(status=got.status, body=await got.read(), content_type=got.content_type)

    async def _post(self, request: web.Request) -> web.Response:
        # The router's name for requests without the header.
        self.fairness.append(request.headers.get("x-gateway-inference-fairness-id", "default-flow"))
        if self.drop is not None:
            status, reason = self.drop
            words = "inference error: ResourceExhausted - dropped by flow control at 10.0.0.7"
            return web.Response(status=status, text=words, headers={"x-llm-d-request-dropped-reason": reason})
        model = (await request.json())["model"]
        server = min(self.servers, key=lambda each: (model not in each.names, each.running, len(each.names)))
        async with self._session.post(
            server.url + request.path, data=await request.read(), headers=request.headers
        ) as got:
            return web.Response(status=got.status, body=await got.read(), content_type=got.content_type)
