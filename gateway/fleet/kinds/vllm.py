"""vLLM servers: polled, with adapters loaded at runtime and a cache salt for each tenant and adapter.

vLLM does not distinguish tenants, so it gets at most one batch, in the gateway's fair order. Its runtime API for
adapters needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A name is `sha256:<digest>`; a request whose adapter another gateway
has just unloaded fails with 404 before any work, and is sent again after a load.

Before SAFE, an adapter loaded at runtime could take the slot of one that was generating; that request then continued
with the new adapter's weights, without an error or a log line (vllm-project/vllm#47724, fixed by #47725: 0.25.1 lacks
the fix, 0.26.0 has it). The gateway loads adapters beside running requests, so such a server may answer a tenant with
another's adapter.
"""

import re
from typing import Annotated, Any

import msgspec
from aiohttp import ClientResponse
from msgspec import Meta, Struct

from gateway.fleet.call import Call
from gateway.fleet.engine import OPENAI_REQUEST_ERRORS, EngineRecord, EngineState, OwnFields, Traits
from gateway.fleet.kinds.fields import allowed, cache_salt, is_one_sequence, request_type
from gateway.fleet.kinds.foreign import ForeignKind, describe_version, is_release, read_models
from gateway.fleet.kinds.kind import Misconfigured
from gateway.fleet.kinds.runtime_adapters import AdapterApi
from wire.digests import digest_name

SAFE = (0, 26, 0)
# Metrics of running and waiting requests.
REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
# vLLM's former names for the members of `structured_outputs`; current releases ignore them.
OLD_FORMS = "guided_"


class VllmFields(OwnFields):
    """Fields that vLLM serves and our engine does not."""

    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


class Vllm(ForeignKind):
    traits = Traits(
        name="vllm",
        prefix="vllm+",
        title="vLLM",
        own_fields=VllmFields,
        request_errors=OPENAI_REQUEST_ERRORS | {"BadRequestError"},
    )
    adapter_api = AdapterApi(
        load="/v1/load_lora_adapter",
        unload="/v1/unload_lora_adapter",
        is_loaded=lambda status, body, _: status == 200 or (status == 400 and b"already been loaded" in body),
        is_unloaded=lambda status, *_: status in (200, 404),
    )

    async def read_state(self, engine: EngineRecord) -> EngineState:
        self.adapters.note_running(engine)
        version = None if engine.address.any_version else check_version(await self.get(engine, "/version"))
        metrics = await self.get(engine, "/metrics")
        # The list is read last, so that it includes an adapter that was just loaded.
        models = read_models(await self.get(engine, "/v1/models"))
        counts = {"running": 0, "waiting": 0}
        for name, count in REQUESTS.findall(metrics):
            counts[name.decode()] += int(float(count))
        state = {
            "model": models.base_name(self._services.base_names()),
            "adapters_resident": models.adapters,
            "max_num_seqs": engine.address.requests,
            "version": version,
            **counts,
        }
        return EngineState(**state, reported=state)  # type: ignore[arg-type]

    def request_body(self, engine: EngineRecord, call: Call) -> dict[str, Any]:
        digest = call.model.digest
        body = request_body(call.body, call.path, call.tenant.id, digest)
        return {**body, "model": digest_name(digest) if digest else engine.state.model or call.model.name}

    async def lacks_adapter(self, response: ClientResponse, call: Call) -> bool:
        return response.status == 404


def request_body(body: dict[str, Any], path: str, tenant_id: str, digest: str | None) -> dict[str, Any]:
    """Return the body for a vLLM server, made from a checked body, without its `model`.

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


class _Version(Struct):
    version: str


def check_version(answer: bytes) -> str:
    """Return the release in the body of `/version`. Raises Misconfigured unless it never mixes up adapters."""
    try:
        version = msgspec.json.decode(answer, type=_Version).version
    except msgspec.MsgspecError:
        version = ""
    if not is_release(version, SAFE):
        raise Misconfigured(
            f"this vLLM server {describe_version(version)}; before {'.'.join(map(str, SAFE))} an adapter loaded at "
            "runtime may be served to another request (vllm-project/vllm#47724): upgrade it, or accept that with "
            "?any_version=true in LORAPLEX_ENGINES"
        )
    return version
