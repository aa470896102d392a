"""vLLM servers: polled, with adapters loaded at runtime and a cache salt for each tenant and adapter.

vLLM does not distinguish tenants, so it gets at most one batch, in the gateway's fair order. Its runtime API for
adapters needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A name is `sha256:<digest>`; a request whose adapter another gateway
has just unloaded fails with 404 before any work, and is sent again after a load.

Before SAFE, an adapter loaded at runtime could take the slot of one that was generating; that request then continued
with the new adapter's weights, without an error or a log line (vllm-project/vllm#47724, fixed by #47725: 0.25.1 lacks
the fix, 0.26.0 has it). The gateway loads adapters beside running requests, so such a server may answer a tenant with
another's adapter.
"""

import asyncio
import re
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import ClientResponse
from msgspec import Meta, Struct

from gateway.fleet.call import Call
from gateway.fleet.engine import OPENAI_REQUEST_ERRORS, EngineRecord, EngineState, OwnFields, Traits
from gateway.fleet.kinds.fields import allowed, cache_salt, is_one_sequence, request_type
from gateway.fleet.kinds.kind import EngineKind, Misconfigured, Services
from gateway.fleet.kinds.runtime_adapters import AdapterApi, RuntimeAdapters
from wire.digests import digest_name

SAFE = (0, 26, 0)
# `0.26.0`, `0.26.0+cpu`, `0.26.1rc2.dev5+g0123abc`; a pre-release may lack changes of its release.
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(a|b|rc|dev)\d*)?(?:\D.*)?")
# Metrics of running and waiting requests.
REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
# vLLM's former names for the members of `structured_outputs`; current releases ignore them.
OLD_FORMS = "guided_"
# A body with more prompt tokens is rebuilt on a thread.
INLINE_TOKENS = 4096


class VllmFields(OwnFields):
    """Fields that vLLM serves and our engine does not."""

    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


API = AdapterApi(
    load="/v1/load_lora_adapter",
    unload="/v1/unload_lora_adapter",
    is_loaded=lambda status, body, _: status == 200 or (status == 400 and b"already been loaded" in body),
    is_unloaded=lambda status, *_: status in (200, 404),
)


class Vllm(EngineKind):
    traits = Traits(
        name="vllm",
        prefix="vllm+",
        title="vLLM",
        own_fields=VllmFields,
        request_errors=OPENAI_REQUEST_ERRORS | {"BadRequestError"},
    )

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.adapters = RuntimeAdapters(services, API)

    async def read_state(self, engine: EngineRecord) -> EngineState:
        if not engine.address.any_version:
            check_version(await self.get(engine, "/version"))
        metrics = await self.get(engine, "/metrics")
        # The list is read last, so that it includes an adapter that was just loaded.
        models = msgspec.json.decode(await self.get(engine, "/v1/models"), type=_Models).data
        bases = [model.id for model in models if model.parent is None]
        base_model = self._services.base_model
        counts = {"running": 0, "waiting": 0}
        for name, count in REQUESTS.findall(metrics):
            counts[name.decode()] += int(float(count))
        state = {
            "model": base_model if base_model in bases else ", ".join(bases),
            "adapters_resident": [model.id for model in models if model.parent is not None],
            "max_num_seqs": engine.address.requests,
            **counts,
        }
        return EngineState(**state, reported=state)  # type: ignore[arg-type]

    async def send(self, engine: EngineRecord, call: Call) -> ClientResponse:
        digest = call.model.digest
        build = partial(request_body, call.body, call.path, call.tenant.id, digest)
        # The work grows with the messages, so long conversations are processed on a thread.
        body = await asyncio.to_thread(build) if call.prompt_tokens > INLINE_TOKENS else build()
        if digest is None:
            return await self.post(engine, call, body, call.model.name, self.headers(engine))
        await self.adapters.ensure(engine, digest)
        response = await self.post(engine, call, body, digest_name(digest), self.headers(engine))
        if response.status == 404:
            response.release()
            await self.adapters.ensure(engine, digest, again=True)
            response = await self.post(engine, call, body, digest_name(digest), self.headers(engine))
        return response


def request_body(body: dict[str, Any], path: str, tenant_id: str, digest: str | None) -> dict[str, Any]:
    """Return the body for a vLLM server, made from a checked body; the caller sets its `model`.

    Raises the protocol's BadRequest.
    """
    sent = allowed(body, request_type(path), (VllmFields,))
    for name in [each for each in sent if each.startswith(OLD_FORMS)]:
        sent["structured_outputs"] = {name.removeprefix(OLD_FORMS): sent.pop(name)}
    sent["cache_salt"] = cache_salt(tenant_id, digest, sent.get("cache_salt"))
    if sent.get("stream"):
        # Each event then carries the tokens so far, by which a client that leaves is billed. It is off for several
        # sequences: vLLM counts each alone, and the gateway would take one count for the total.
        sent["stream_options"] = {**sent["stream_options"], "continuous_usage_stats": is_one_sequence(sent)}
    return sent


class _Model(Struct):
    id: str
    parent: str | None = None


class _Models(Struct):
    data: list[_Model]


class _Version(Struct):
    version: str


def check_version(answer: bytes) -> None:
    """Raise Misconfigured unless the body of `/version` names a release that never mixes up adapters."""
    try:
        version = msgspec.json.decode(answer, type=_Version).version[:40]
    except msgspec.MsgspecError:
        version = ""
    match = _VERSION.fullmatch(version)
    numbers = tuple(int(part or 0) for part in match.groups()[:3]) if match else (0, 0, 0)
    is_early = match is not None and match[4] is not None and numbers == SAFE
    if numbers < SAFE or is_early:
        said = f"is of version {version!r}" if version else "does not say its version"
        wanted = ".".join(map(str, SAFE))
        raise Misconfigured(
            f"this vLLM server {said}; before {wanted} an adapter loaded at runtime may be served to another request "
            "(vllm-project/vllm#47724): upgrade it, or accept that with ?any_version=true in LORAPLEX_ENGINES"
        )
