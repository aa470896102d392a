"""Double of vLLM's server (0.32) as a gateway sees it: its routes, statuses and messages, with made-up tokens.

Its behaviour is taken from vLLM's sources; `test_vllm_real.py` tests the gateway against a real vLLM.
"""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from adapters.store import DirectoryStore
from testing.gateway.foreign_double import PROMPT_TOKENS, ForeignDouble, token_counts
from wire.digests import named_digest

API_KEY = "the-key-of-one-vllm-server"


class VllmDouble(ForeignDouble):
    """Double of a vLLM server.

    api_key: as --api-key, "" for none. served: tenants' salts in the order in which requests began. store: the adapter
    store of Loraplex's plugin, None without the plugin. base_digest, device: as the plugin reports them; None: a plugin
    that reports no device. block_size: tokens in a KV block, by default; 128 on a CPU. polls: number of reads of the
    metrics. prefill: the server from
    which this one fetches a prompt's blocks. kept: the prompts whose blocks are here, by request. fetched: number of
    prompts whose blocks came from `prefill`. finish_reason: that of whole answers.
    """

    def __init__(self, api_key: str = API_KEY, base_model: str = "base") -> None:
        super().__init__(base_model, root="/m")
        self.api_key = api_key
        self.served: list[str] = []
        self.load_seconds = 0.0
        # None: the version route is missing.
        self.version: str | None = "0.32.0"
        self.store: DirectoryStore | None = None
        self.base_digest = ""
        self.device: str | None = "cuda"
        self.block_size = 16
        self.polls = 0
        self.resolved: list[str] = []
        self.prefill: VllmDouble | None = None
        self.kept: dict[str, tuple[Any, ...]] = {}
        self.fetched = 0
        self.has_connector = True
        self.finish_reason = "length"
        self.hold_unloads = asyncio.Event()
        self.hold_unloads.set()
        self.hold_loads = asyncio.Event()
        self.hold_loads.set()
        self.loading = self.most_loading = 0

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/version", self._version)
        router.add_get("/metrics", self._metrics)
        router.add_post("/v1/load_lora_adapter", self._load)
        router.add_post("/v1/unload_lora_adapter", self._unload)

    def _wanted_key(self, path: str) -> str | None:
        return self.api_key if path.startswith("/v1") else None

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self.version}) if self.version else web.Response(status=404)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.polls += 1
        labels = f'{{engine="0",model_name="{self.base_model}"}}'
        text = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
        text += f"vllm:num_requests_running{labels} {float(self.running)}\n"
        text += f"vllm:num_requests_waiting{labels} {float(self.waiting)}\n"
        labels = f'{{block_size="{self.block_size}",mamba_block_size="None",user_specified_block_size="False"}}'
        text += f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{labels} 1.0\n"
        if self.store is not None:
            device = f',device="{self.device}"' if self.device is not None else ""
            labels = f'{{base_digest="{self.base_digest}",version="0.1.0"{device}}}'
            text += f"# TYPE loraplex_resolver_info gauge\nloraplex_resolver_info{labels} 1.0\n"
        return web.Response(text=text)

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
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        try:
            await self.hold_loads.wait()
            await asyncio.sleep(self.load_seconds)
        finally:
            self.loading -= 1
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

    def _refusal(self, body: dict[str, Any], is_chat: bool) -> web.Response | None:
        model = body["model"]
        if model != self.base_model and model not in self.names and not self._resolve(model):
            words = f"The model `{model}` does not exist. Valid aliases: {self.base_model}."
            return error(404, "NotFoundError", words, "model")
        if body.get("max_tokens", 1) > 1000:
            return error(400, "BadRequestError", f"max_tokens is too large for {model}", "max_tokens")
        self.served.append(body["cache_salt"])
        return None

    def _resolve(self, model: str) -> bool:
        """Load an adapter as the plugin does, and return whether there is the plugin and its store has the adapter."""
        digest = named_digest(model)
        if self.store is None or digest is None or (folder := self.store.path(digest)) is None:
            return False
        self.resolved.append(model)
        self.names[model] = str(folder)
        return True

    def _fetch(self, body: dict[str, Any], params: dict[str, Any]) -> None:
        """Take a prompt's blocks from `prefill`, as vLLM's NIXL connector does: once, and for the same request only."""
        assert self.prefill is not None
        assert params["remote_engine_id"] == self.prefill.url
        assert {"remote_block_ids", "remote_host", "remote_port", "tp_size"} <= params.keys()
        assert self.prefill.kept.pop(params["remote_request_id"]) == _prompt_of(body)
        self.fetched += 1

    def _keep(self, request: web.Request, body: dict[str, Any]) -> dict[str, Any] | None:
        """Keep a prompt's blocks and return their names; None without a connector."""
        if not self.has_connector:
            return None
        assert (body["max_tokens"], "stream" in body) == (1, False)
        key = f"cmpl-{request.headers['x-request-id']}"
        self.kept[key] = _prompt_of(body)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.url,
            "remote_request_id": key,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "remote_num_tokens": PROMPT_TOKENS,
        }

    async def _answer(self, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        made, params, kept = body["max_tokens"], body.get("kv_transfer_params") or {}, None
        if params.get("do_remote_prefill"):
            self._fetch(body, params)
        elif params.get("do_remote_decode"):
            kept = self._keep(request, body)
        if body.get("stream"):
            pieces = [{"text": "a"}] * made
            return await self._stream(request, body["stream_options"], envelope(body), pieces, usage)
        choice = {"index": 0, "text": "a" * made, "finish_reason": self.finish_reason, "stop_reason": None}
        whole = {**envelope(body), "choices": [choice], "usage": usage(made), "kv_transfer_params": kept}
        return web.json_response(whole)


def _prompt_of(body: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that determine a prompt's KV blocks."""
    return body["model"], body["prompt"], body["cache_salt"]


def envelope(body: dict[str, Any]) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}


def usage(tokens: int) -> dict[str, Any]:
    return {**token_counts(tokens), "prompt_tokens_details": None}


def error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    """Return an error body; vLLM repeats the status as the code, a number."""
    detail = {"message": message, "type": kind, "param": param, "code": status}
    return web.json_response({"error": detail}, status=status)
