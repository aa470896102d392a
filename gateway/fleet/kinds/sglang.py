"""SGLang servers: polled, with adapters loaded at runtime and a cache salt for each tenant and adapter.

Written from the sources of SGLang 0.5.11 to 0.5.23. It has never run against a real SGLang.

Before SAFE, SGLang accepted a `cache_salt` and ignored it: the salt never reached the scheduler, so all tenants shared
the prefix cache (sgl-project/sglang#23300: 0.5.10.post1 lacks the fix, 0.5.11 has it). The keys of caches outside the
server's memory still lack the salt. `check_server` refuses a server with such a cache, or with another setting that can
mix up tenants or adapters.

A request selects its adapter by `lora_path`. Its `model` has no colon, because SGLang reads the text after a
colon as an adapter's name. SGLang ignores fields that it does not know, so this module refuses them.
"""

import re
from typing import Annotated, Any

import msgspec
from aiohttp import ClientResponse
from msgspec import Meta, Raw, Struct

from gateway.fleet.calls.answers import read_error
from gateway.fleet.calls.call import Call
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.traits import Traits
from gateway.fleet.kinds.fields import allowed, cache_salt, is_one_sequence, request_type
from gateway.fleet.kinds.foreign import ForeignKind, describe_version, is_release, read_models, reported_state
from gateway.fleet.kinds.kind import Misconfigured
from gateway.fleet.kinds.runtime_adapters import AdapterApi
from wire.digests import digest_name
from wire.errors import BadRequest
from wire.structured import ANY_OBJECT, KINDS, GrammarSpec, read_spec

SAFE = (0, 5, 11)
# Sent as `model`: SGLang's own default for requests without one.
ANY_MODEL = "default"
ADAPTER_PREFIX = "sha256-"
_ADAPTER_NAME = re.compile(ADAPTER_PREFIX + "([0-9a-f]{64})")
# Texts in a 400 for an adapter that is not loaded, or that SGLang could not load again by itself.
ADAPTER_AWAY = (b"has never been loaded", b"are not loaded", b"Failed to implicitly load LoRA adapter")

MAX_REPETITION_PENALTY = 2.0
# Fields that every release since SAFE reads on each route that has them.
SERVED = frozenset(
    {
        "chat_template_kwargs",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
# Values of other fields that are SGLang's behaviour without the field, so the field is dropped.
WITHOUT_EFFECT: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "bad_words": [],
    "continue_final_message": False,
    "include_stop_str_in_output": False,
    "parallel_tool_calls": True,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
}
# Members of `chat_template_kwargs` that SGLang itself reads, with their accepted types. An object as
# `spaces_between_special_tokens` would end SGLang's detokenizer process, which all requests share.
NOT_VARIABLES: dict[str, tuple[type, ...]] = {"reasoning_effort": (str,), "spaces_between_special_tokens": ()}
# Fields that are sent in another form, or dropped because they have no effect on the answer.
TRANSLATED = frozenset(
    {"best_of", "cache_salt", "model", "response_format", "structured_outputs", "user", *(f"guided_{k}" for k in KINDS)}
)


# A number of requests, or a rank. A negative one would reduce the capacity of a base model's other servers.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class ServerInfo(Struct):
    """Settings in SGLang's `/server_info` that the gateway depends on."""

    version: str = ""
    frontend: str = "python"
    enable_lora: bool | None = None
    max_lora_rank: Count | None = None
    max_loaded_loras: int | None = None
    dp_size: int = 1
    tokenizer_worker_num: int = 1
    disaggregation_mode: str | None = "null"
    speculative_algorithm: str | None = None
    enable_lmcache: bool | None = None
    enable_flexkv: bool | None = None
    hicache_storage_backend: str | None = None
    radix_cache_backend: str | None = None
    enable_unified_cache_external_linker: bool | None = None
    api_key: str | None = None
    admin_api_key: str | None = None
    tool_call_parser: str | None = None
    enable_deterministic_inference: bool | None = None


class Sglang(ForeignKind):
    traits = Traits(
        name="sglang",
        prefix="sglang+",
        title="SGLang",
        request_errors=frozenset({"BAD_REQUEST"}),
        # Its messages name the adapters of all tenants and quote its settings.
        shows_messages=False,
    )
    adapter_api = AdapterApi(
        load="/load_lora_adapter",
        unload="/unload_lora_adapter",
        is_loaded=lambda status, body, _: status == 200 or (status == 400 and b"already loaded" in body),
        is_unloaded=lambda status, body, _: status == 200 or (status == 400 and b"does not exist" in body),
        name=lambda digest: ADAPTER_PREFIX + digest,
    )

    async def read_state(self, engine: EngineRecord) -> EngineState:
        self.adapters.note_running(engine)
        info = msgspec.json.decode(await self.get(engine, "/server_info"), type=ServerInfo)
        check_server(info, engine.address.adapters, any_version=engine.address.any_version)
        [load] = msgspec.json.decode(await self.get(engine, "/v1/loads?include=core"), type=_Loads).loads
        # The list is read last, so that it includes an adapter that was just loaded.
        models = read_models(await self.get(engine, "/v1/models"))
        state = {
            "model": models.base_name(self._services.base_names()),
            "version": info.version,
            # An adapter with another name belongs to the server's operator: no request selects it, and it stays loaded.
            "adapters_resident": [
                digest_name(m[1]) for name in models.adapters if (m := _ADAPTER_NAME.fullmatch(name))
            ],
            "running": load.num_running_reqs,
            "waiting": load.num_waiting_reqs,
            "max_num_seqs": min(engine.address.requests, load.max_running_requests or engine.address.requests),
            "max_lora_rank": engine.address.max_rank or info.max_lora_rank or 0,
        }
        return reported_state(
            state,
            calls_tools=info.tool_call_parser is not None,
            keeps_seeds=info.enable_deterministic_inference,
        )

    def request_body(self, engine: EngineRecord, call: Call) -> dict[str, Any]:
        return request_body(call.body, call.path, call.tenant.id, call.model.digest, engine.state.reported)

    async def lacks_adapter(self, response: ClientResponse, call: Call) -> bool:
        if response.status != 400:
            return False
        body = await read_error(response)
        if any(words in body for words in ADAPTER_AWAY):
            return True
        response.release()
        raise self.refusal(response, body, call.model)


def request_body(
    body: dict[str, Any], path: str, tenant_id: str, digest: str | None, reported: dict[str, Any]
) -> dict[str, Any]:
    """Return the body for an SGLang server, made from a checked body. reported: the server's reported state.

    Raises the protocol's BadRequest.
    """
    given = allowed(body, request_type(path))
    sent = {name: given[name] for name in SERVED & given.keys()}
    for name in sorted(given.keys() - SERVED - TRANSLATED):
        if given[name] != WITHOUT_EFFECT.get(name):
            raise _not_served(name)
    _check_values(sent, reported)
    spec = read_spec(
        given.get("response_format"),
        given.get("structured_outputs"),
        {kind: given.get(f"guided_{kind}") for kind in KINDS},
    )
    if spec is not None:
        sent |= _constraint(spec)
    if sent.get("top_k") == 0:
        sent["top_k"] = -1
    if sent.get("stream"):
        # SGLang counts each sequence separately, but the gateway reads a count as the total of the request.
        sent["stream_options"] = {**sent["stream_options"], "continuous_usage_stats": is_one_sequence(sent)}
    sent["cache_salt"] = cache_salt(tenant_id, digest, given.get("cache_salt"))
    sent["model"] = ANY_MODEL
    if digest is not None:
        sent["lora_path"] = ADAPTER_PREFIX + digest
    return sent


def _check_values(sent: dict[str, Any], reported: dict[str, Any]) -> None:
    """Raise BadRequest for a value that SGLang refuses or ignores."""
    if sent.get("repetition_penalty", 1.0) > MAX_REPETITION_PENALTY:
        message = f"repetition_penalty: expected at most {MAX_REPETITION_PENALTY:g} on this engine."
        raise BadRequest("repetition_penalty", message, "unsupported_parameter")
    if sent.get("max_tokens") == 0:
        raise BadRequest(
            "max_tokens", "max_tokens: expected at least 1 on this engine, got 0.", "unsupported_parameter"
        )
    if sent.get("echo") and "logprobs" in sent:
        raise BadRequest("echo", "echo: is not served with logprobs by this engine.", "unsupported_parameter")
    variables = sent.get("chat_template_kwargs", {})
    for name, kind in NOT_VARIABLES.items():
        if name in variables and not isinstance(variables[name], kind):
            raise BadRequest(
                "chat_template_kwargs", f"chat_template_kwargs: {name} is not allowed here.", "unsupported_parameter"
            )
    if "seed" in sent and not reported.get("keeps_seeds"):
        raise _not_served("seed")
    if sent.get("tools") and not reported.get("calls_tools"):
        raise _not_served("tools")


def _constraint(spec: GrammarSpec) -> dict[str, Any]:
    """Return SGLang's fields for a constraint of the answer. Raises BadRequest."""
    if spec.kind == "regex":
        return {"regex": spec.text}
    if spec.kind != "json":
        raise _not_served(spec.param)
    if spec.text == ANY_OBJECT:
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "answer", "schema": Raw(spec.text.encode())}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _not_served(field: str) -> BadRequest:
    return BadRequest(field, f"{field}: is not served by this engine.", "unsupported_parameter")


def check_server(info: ServerInfo, adapters: int, *, any_version: bool = False) -> None:
    """Raise Misconfigured for a server that can mix up tenants or adapters, or that cannot load adapters.

    adapters: the number of adapters that the gateway keeps loaded.
    """
    if not (any_version or is_release(info.version, SAFE)):
        raise Misconfigured(
            f"this SGLang server {describe_version(info.version)}; before {'.'.join(map(str, SAFE))} it ignores cache "
            "salts, so tenants share cached prompts (sgl-project/sglang#23300): upgrade it, or accept that with "
            "?any_version=true in LORAPLEX_ENGINES"
        )
    for is_wrong, reason in _faults(info, adapters):
        if is_wrong:
            raise Misconfigured(f"this SGLang server {reason}")


def _faults(info: ServerInfo, adapters: int) -> list[tuple[bool, str]]:
    """Return pairs: whether a setting rules the server out, and the reason with the remedy."""
    outside = "keeps a cache whose keys lack the request's salt, so tenants would share cached prompts"
    caches = {
        "--enable-lmcache": info.enable_lmcache,
        "--enable-flexkv": info.enable_flexkv,
        "--hicache-storage-backend": info.hicache_storage_backend,
        "--radix-cache-backend": info.radix_cache_backend,
        "--enable-unified-cache-external-linker": info.enable_unified_cache_external_linker,
    }
    speculation = (info.speculative_algorithm or "").upper()
    return [
        (info.frontend != "python", f"has the front end {info.frontend[:40]!r}; only the Python one is supported"),
        (not info.enable_lora, "serves no adapters: start it with --enable-lora"),
        (info.dp_size != 1, "runs data-parallel replicas, which cannot load adapters: start it with --dp-size 1"),
        (
            info.tokenizer_worker_num != 1,
            "has several tokenizer workers, of which a load reaches only one: start it with --tokenizer-worker-num 1",
        ),
        (
            info.disaggregation_mode not in (None, "null"),
            "is one half of a disaggregated pair: start it without --disaggregation-mode",
        ),
        (
            "NGRAM" in speculation,
            "guesses tokens from other tenants' texts: start it without --speculative-algorithm NGRAM",
        ),
        *((bool(value), f"{outside}: start it without {flag}") for flag, value in caches.items()),
        (
            info.max_loaded_loras is not None and info.max_loaded_loras <= adapters,
            f"may keep {info.max_loaded_loras} "
            f"adapters, and the gateway keeps {adapters}: start it without --max-loaded-loras, or set a smaller "
            "?adapters= in LORAPLEX_ENGINES",
        ),
        (
            info.admin_api_key is not None and info.admin_api_key != info.api_key,
            "wants one key for requests and another for loading adapters: start it without --admin-api-key",
        ),
    ]


class _Load(Struct):
    num_running_reqs: Count = 0
    num_waiting_reqs: Count = 0
    max_running_requests: Count = 0


class _Loads(Struct):
    loads: Annotated[list[_Load], Meta(min_length=1, max_length=1)]
