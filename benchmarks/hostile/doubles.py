"""Misbehaving engine doubles, run in their own process behind a gateway.

    python -m benchmarks.hostile.doubles KIND

Prints one line of JSON: the engines' addresses for LORAPLEX_ENGINES, and a control URL whose `/seen` reports the
doubles' observations. Kinds: vllm (shows which parts of a client's body reach vLLM, and answers requests for
log-probabilities with some MiB of them), redirecting (one of two engines redirects its requests), slow (tokens as slow
as requested, to keep a reservation), poison (three engines that die of a certain word and are restarted).
"""

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from testing.gateway.upstream import TOKEN, Upstream
from testing.gateway.vllm_double import VllmDouble, envelope, usage
from testing.ports import free_port
from testing.serving import serving

POISON = "poison"
ENGINES = 3
RESTART_SECONDS = 0.3
# Minimum size of the double's whole answers with log-probabilities.
LARGE_ANSWER_BYTES = 6 * 2**20
# Bytes of such an answer that are written at once.
PIECE_BYTES = 2**16
# Time of each token, as long as a step of the simulated device.
TOKEN_SECONDS = 0.008


class Control:
    """Control server that answers `/seen` with the records that a kind keeps in `seen`."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/seen", lambda _: self._seen())
        app.router.add_route("*", "/trap/{rest:.*}", self._trap)
        return app

    async def _seen(self) -> web.Response:
        return web.json_response({k: v() if callable(v) else v for k, v in self.seen.items()})

    async def _trap(self, request: web.Request) -> web.Response:
        """Record a request that followed a redirect; there must be none."""
        body = await request.text()
        secret = TOKEN in " ".join(request.headers.values())
        self.seen.setdefault("trapped", []).append({"bytes": len(body), "secret": secret})
        return web.json_response({"id": "x", "choices": [], "usage": None})


class Timed(Upstream):
    """Engine double whose tokens take time."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(TOKEN_SECONDS * (await request.json())["max_tokens"])
        return await super()._generate(request)


class Redirecting(Upstream):
    """Engine double that redirects every generation to `trap`."""

    trap = ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{self.trap}{request.path}"})


class LargeVllm(VllmDouble):
    """Double of vLLM whose whole answers with log-probabilities have some MiB."""

    def __init__(self) -> None:
        super().__init__()
        entry = {f"token {number}": -1.5 for number in range(20)}
        texts = {"top_logprobs": [entry] * (LARGE_ANSWER_BYTES // len(json.dumps(entry, separators=(",", ":"))))}
        choice = {"index": 0, "text": "aa", "logprobs": texts | {"tokens": []}, "finish_reason": "length"}
        choices = memoryview(json.dumps([choice], separators=(",", ":")).encode())
        self._choices = [choices[start : start + PIECE_BYTES] for start in range(0, len(choices), PIECE_BYTES)]

    async def _answer(self, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        await asyncio.sleep(TOKEN_SECONDS * body["max_tokens"])
        if body.get("stream") or body.get("logprobs") is None:
            return await super()._answer(request, body, is_chat)
        head = json.dumps(envelope(body))[:-1].encode() + b', "choices": '
        pieces: list[bytes | memoryview] = [head, *self._choices, b', "usage": ' + json.dumps(usage(2)).encode() + b"}"]
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = sum(map(len, pieces))
        await response.prepare(request)
        # The pieces are not joined, and other tasks run between them: this process answers the neighbour's chats too.
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response


class Poisonable(Timed):
    """Engine double that exits when a request contains a certain word."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if POISON in await request.text():
            os._exit(9)
        return await super()._generate(request)


async def one_engine(port: int) -> None:
    """Serve one poisonable engine until the process ends."""
    async with Poisonable().serving(port):
        await asyncio.Event().wait()


async def keep_alive(port: int, deaths: list[int]) -> None:
    """Restart an engine whenever it exits."""
    while True:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.hostile.doubles", "engine", str(port))
        )
        try:
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        deaths.append(port)
        await asyncio.sleep(RESTART_SECONDS)


async def serve(kind: str) -> None:
    control = Control()
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(serving(control.app()))
        description: dict[str, Any] = {"control": url}
        if kind == "vllm":
            vllm = await exits.enter_async_context(LargeVllm().serving())
            description["engines"] = [f"vllm+{vllm.url}?key_env=KEY_OF_VLLM"]
            description["environment"] = {"KEY_OF_VLLM": vllm.api_key}
            control.seen["fields"] = lambda: sorted({name for _, body in vllm.requests for name in body})
            control.seen["salts"] = lambda: sorted({body.get("cache_salt", "") for _, body in vllm.requests})
            control.seen["requests"] = lambda: len(vllm.requests)
        elif kind == "redirecting":
            good = await exits.enter_async_context(Timed().serving())
            bad = await exits.enter_async_context(Redirecting().serving())
            bad.trap = f"{url}/trap"
            description["engines"] = [good.url, bad.url]
        elif kind == "slow":
            description["engines"] = [(await exits.enter_async_context(Upstream().serving())).url]
        else:
            assert kind == "poison", kind
            ports = [free_port() for _ in range(ENGINES)]
            deaths: list[int] = []
            control.seen["deaths"] = lambda: len(deaths)
            description["engines"] = [f"http://127.0.0.1:{port}" for port in ports]
            keepers = [asyncio.ensure_future(keep_alive(port, deaths)) for port in ports]
            exits.callback(lambda: [keeper.cancel() for keeper in keepers])
        print(json.dumps(description), flush=True)
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(15, over.set)
        await over.wait()
        if kind == "poison":
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(one_engine(int(sys.argv[2])) if sys.argv[1] == "engine" else serve(sys.argv[1]))
