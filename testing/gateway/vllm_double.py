"""Double of vLLM's server (0.32) as a gateway sees it: its routes, statuses and messages, with made-up tokens.

Its behaviour is taken from vLLM's sources; `test_vllm_real.py` tests the gateway against a real vLLM.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from testing.serving import serving

PROMPT_TOKENS = 7
API_KEY = "the-key-of-one-vllm-server"


class VllmDouble:
    """Double of a vLLM server.

    api_key: as --api-key, "" for none. loads, unloads: adapter names in request order. hold: while clear, requests run
    without ending. served: tenants' salts in the order in which requests began.
    """

    def __init__(self, api_key: str = API_KEY, base_model: str = "base") -> None:
        self.url = ""
        self.api_key = api_key
        self.base_model = base_model
        self.names: dict[str, str] = {}
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.served: list[str] = []
        self.load_seconds = 0.0
        # Target of redirects; "" sends none.
        self.redirect = ""
        # None: the version route is missing.
        self.version: str | None = "0.32.0"
        self.fail_loads: str | None = None
        self.running = self.most_running = 0
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_unloads = asyncio.Event()
        self.hold_unloads.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["VllmDouble"]:
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        async with serving(app) as self.url:
            yield self

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if (
            self.api_key
            and request.path.startswith("/v1")
            and request.headers.get("Authorization") != f"Bearer {self.api_key}"
        ):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version}) if self.version else web.Response(status=404)

    async def _metrics(self, _: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.base_model}"}}'
        text = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
        text += f"vllm:num_requests_running{labels} {float(self.running)}\nvllm:num_requests_waiting{labels} 0.0\n"
        return web.Response(text=text)

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": self.base_model, "object": "model", "root": "/m", "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": path, "parent": self.base_model}
            for name, path in self.names.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        self.loads.append(name)
        if name in self.names:
            return error(
                400,
                "InvalidUserInput",
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
            )
        await asyncio.sleep(self.load_seconds)
        if not (Path(path) / "adapter_config.json").is_file():
            return error(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        if self.fail_loads is not None:
            return error(500, "InternalServerError", self.fail_loads)
        self.names[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        await self.hold_unloads.wait()
        if self.names.pop(name, None) is None:
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect + request.path})
        body = await request.json()
        self.requests.append(({k.lower(): v for k, v in request.headers.items()}, body))
        model = body["model"]
        if model != self.base_model and model not in self.names:
            words = f"The model `{model}` does not exist. Valid aliases: {self.base_model}."
            return error(404, "NotFoundError", words, "model")
        if body.get("max_tokens", 1) > 1000:
            return error(400, "BadRequestError", f"max_tokens is too large for {model}", "max_tokens")
        self.served.append(body["cache_salt"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.hold.wait()
            return await (self._stream(request, body) if body.get("stream") else self._whole(body))
        finally:
            self.running -= 1

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        made = body["max_tokens"]
        choice = {"index": 0, "text": "a" * made, "finish_reason": "length", "stop_reason": None}
        return web.json_response({**envelope(body), "choices": [choice], "usage": usage(made)})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        options, tokens = body["stream_options"], body["max_tokens"]
        for made in range(1, tokens + 1):
            reason = "length" if made == tokens else None
            event = {**envelope(body), "choices": [{"index": 0, "text": "a", "finish_reason": reason}]}
            if options.get("continuous_usage_stats"):
                event["usage"] = usage(made)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if options["include_usage"]:
            event = {**envelope(body), "choices": [], "usage": usage(tokens)}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def envelope(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}


def usage(tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}
    return {**counts, "prompt_tokens_details": None}


def error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    """Return an error body; vLLM repeats the status as the code, a number."""
    detail = {"message": message, "type": kind, "param": param, "code": status}
    return web.json_response({"error": detail}, status=status)
