"""Double of SGLang's server (0.5.11 to 0.5.23) as a gateway sees it: routes, statuses, messages, and made-up tokens.

Its behaviour is taken from SGLang's sources; no test runs a real SGLang. It is stricter in one point: SGLang ignores
a field that it does not know, and the double records it in `ignored`.
"""

import json
from pathlib import Path
from typing import Any

from aiohttp import web

from testing.gateway.foreign_double import PROMPT_TOKENS, ForeignDouble, number_of_sequences, token_counts

API_KEY = "the-key-of-one-sglang-server"

# Fields of both routes in 0.5.11, of `CompletionRequest`, and of `ChatCompletionRequest`.
COMMON = {
    "model",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "return_hidden_states",
    "return_routed_experts",
    "return_cached_tokens_details",
    "top_k",
    "min_p",
    "min_tokens",
    "regex",
    "ebnf",
    "repetition_penalty",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "lora_path",
    "session_params",
    "response_format",
    "custom_params",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "data_parallel_rank",
    "rid",
    "extra_key",
    "cache_salt",
    "priority",
}
COMPLETION = COMMON | {"prompt", "best_of", "echo", "suffix", "json_schema", "custom_labels"}
CHAT = COMMON | {
    "messages",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "continue_final_message",
    "separate_reasoning",
    "stream_reasoning",
    "chat_template_kwargs",
    "max_dynamic_patch",
    "min_dynamic_patch",
    "use_audio_in_video",
}


class SglangDouble(ForeignDouble):
    """Double of an SGLang server.

    info: body of `/server_info`. known: every adapter ever loaded, which SGLang loads again by itself after an unload.
    ignored: fields that a real server would not read. sums_cached: whether the cached tokens of each choice are added,
    as in SGLang's earlier releases, though the prompt's tokens count once.
    """

    def __init__(self, api_key: str = API_KEY, base_model: str = "base") -> None:
        super().__init__(base_model, root=base_model)
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "frontend": "python",
            "api_key": api_key,
            "admin_api_key": None,
            "served_model_name": base_model,
            "enable_lora": True,
            "max_lora_rank": 16,
            "max_loaded_loras": None,
            "max_loras_per_batch": 8,
            "dp_size": 1,
            "tokenizer_worker_num": 1,
            "disaggregation_mode": "null",
            "speculative_algorithm": None,
            "enable_lmcache": False,
            "enable_flexkv": False,
            "hicache_storage_backend": None,
            "radix_cache_backend": None,
            "enable_unified_cache_external_linker": False,
            "tool_call_parser": "llama3",
            "enable_deterministic_inference": False,
            "launch_command": "python -m sglang.launch_server --api-key ...",
            "internal_states": [{"last_gen_throughput": 0.0}],
        }
        # Status of `/server_info`.
        self.info_status = 200
        self.known: dict[str, str] = {}
        self.ignored: set[str] = set()
        self.sums_cached = False
        # Error of the next request: a status, or a stream's error type.
        self.fail_request: tuple[int, str, str] | None = None
        # Keys of the prefix cache: the request's salt and adapter, and the prompt.
        self.cache: set[tuple[str, str]] = set()

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/server_info", self._server_info)
        router.add_get("/v1/loads", self._loads)
        router.add_post("/load_lora_adapter", self._load)
        router.add_post("/unload_lora_adapter", self._unload)

    def _wanted_key(self, path: str) -> str | None:
        if path == "/health":
            return None
        admin_key = self.info["admin_api_key"] if path.endswith("_lora_adapter") else None
        return admin_key or self.info["api_key"]

    async def _server_info(self, _: web.Request) -> web.Response:
        if self.info_status != 200:
            return web.Response(status=self.info_status)
        return web.json_response(self.info)

    async def _loads(self, request: web.Request) -> web.Response:
        assert request.query == {"include": "core"}
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "max_running_requests": 48,
        }
        return web.json_response({"version": self.info["version"], "dp_rank_count": 1, "loads": [load]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        self.loads.append(name)
        reason = None
        if name in self.names:
            reason = f"Failed to load LoRA adapter {name} because it is already loaded"
        elif not (Path(path) / "adapter_config.json").is_file():
            reason = f"{path} does not have an adapter_config.json"
        elif self.fail_loads is not None:
            reason = self.fail_loads
        if reason is None:
            self.names[name] = self.known[name] = path
        return self._lora_result(reason)

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        self.unloads.append(name)
        found = self.names.pop(name, None)
        loaded = f"Loaded LoRAs: {list(self.names)}"
        return self._lora_result(None if found else f"LoRA with name {name} does not exist. {loaded}")

    def _lora_result(self, reason: str | None) -> web.Response:
        result = {"success": reason is None, "error_message": reason or "", "loaded_adapters": self.names}
        return web.json_response(result, status=200 if reason is None else 400)

    def _refusal(self, body: dict[str, Any], is_chat: bool) -> web.Response | None:
        self.ignored |= body.keys() - (CHAT if is_chat else COMPLETION)
        if (reason := self._refused(body, is_chat)) is not None:
            return error(400, "BadRequest", reason)
        if self.fail_request is not None and not body.get("stream"):
            return error(*self.fail_request)
        return None

    def _refused(self, body: dict[str, Any], is_chat: bool) -> str | None:
        """Return the reason for a 400, which quotes the input as pydantic does."""
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if not is_chat and limit is not None and limit <= 0:
            return f"1 validation error: max_tokens must be positive, input_value={body}"
        if body.get("top_k", -1) == 0:
            return "top_k must be -1 (disable) or at least 1, got 0."
        if not 0 < body.get("repetition_penalty", 1) <= 2:
            return "repetition_penalty must be in (0, 2] (1.0 = no penalty)"
        if sum(field in body for field in ("regex", "ebnf", "response_format")) > 1:
            return "Only one of regex, json_schema, or ebnf can be set."
        kinds = (body.get("response_format") or {}).get("type", "text")
        if kinds not in ("text", "json_object", "json_schema"):
            return f"response_format.type input_value={kinds}"
        adapter = body["model"].partition(":")[2] or body.get("lora_path")
        if adapter is not None and adapter not in self.names:
            if adapter not in self.known:
                loaded = f"All loaded adapters: dict_keys({list(self.known)})."
                return f"Got LoRA adapter that has never been loaded: {adapter}\n{loaded}"
            self.names[adapter] = self.known[adapter]
        return None

    def cached_tokens(self, body: dict[str, Any]) -> int:
        """Return the cached tokens of a prompt's prefix, and cache the prompt."""
        has_salts = tuple(map(int, self.info["version"].split(".")[:3])) >= (0, 5, 11)
        salt = body.get("cache_salt", "") if has_salts else ""
        key = salt + (body.get("lora_path") or ""), json.dumps(body.get("prompt", body.get("messages")))
        found = key in self.cache
        self.cache.add(key)
        return PROMPT_TOKENS - 1 if found else 0

    async def _answer(self, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        made = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        cached, of_all = self.cached_tokens(body), envelope(body, is_chat)
        if self.sums_cached:
            cached *= number_of_sequences(body)
        if body.get("stream"):
            pieces = [{"delta": {"content": "a"}} if is_chat else {"text": "a"}] * made
            failure = None if self.fail_request is None else error_detail(*self.fail_request)
            options = body["stream_options"]
            return await self._stream(request, options, of_all, pieces, lambda tokens: usage(tokens, cached), failure)
        content: dict[str, Any] = {"message": {"role": "assistant", "content": "a" * made}} if is_chat else {}
        choice = {"index": 0, "text": "a" * made, "finish_reason": "length", "matched_stop": None, **content}
        return web.json_response({**of_all, "choices": [choice], "usage": usage(made, cached), "metadata": {}})


def envelope(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": "0123456789abcdef", "object": kind, "created": 1, "model": body["model"]}


def usage(tokens: int, cached: int) -> dict[str, Any]:
    return {**token_counts(tokens), "prompt_tokens_details": {"cached_tokens": cached}, "reasoning_tokens": 0}


def error(status: int, kind: str, message: str) -> web.Response:
    """Return an error body: without an outer `error`, and with the status as the code."""
    return web.json_response(error_detail(status, kind, message), status=status)


def error_detail(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
