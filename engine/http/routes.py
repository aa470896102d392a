"""The routes other than generation: models, adapters, tokens, state, finished requests and allowances."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET

from engine.answering.errors import IS_INTERNAL
from engine.answering.model_names import ModelRegistry
from engine.answering.request_threads import LONG, RequestThreads
from engine.answering.usage_log import UsageLog
from engine.core.client import CoreClient
from engine.errors import EngineUnavailable
from engine.http.service_reports import ServiceReports
from engine.http.state_feed import StateFeed
from engine.http.trusted_headers import read_caller
from engine.metrics.metrics import Metrics
from engine.probing.prober import Prober
from wire.decoding import decode
from wire.digests import bare_digest, digest_name
from wire.errors import BadRequest
from wire.http_body import read_body
from wire.prefetch import PinRequest, PinResult, Prefetched, PrefetchRequest
from wire.probes import ProbeRequest
from wire.requests import AllowanceRequest, DetokenizeRequest, LoadAdapterRequest, TokenizeRequest, UnloadAdapterRequest
from wire.responses import (
    AdapterLoaded,
    AllowanceRaised,
    DetokenizeResponse,
    FinishedRequestList,
    ModelList,
    TokenizeResponse,
)
from wire.service import ServiceCharged, ServiceElsewhere
from wire.text.tokenizer import TextTooLong, Tokenizer

# Maximum time that a scrape waits for a step. After that, the gauges keep their last values.
SCRAPE_WAIT_S = 1.0
# Limit of tokens of one text: a million tokens take seconds and hundreds of megabytes.
MAX_TOKENIZED = 1 << 17
# Limits of one query for finished requests.
MAX_IDS, MAX_WAIT_S = 1000, 10.0


def json_response(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)


@dataclass(frozen=True, slots=True)
class EngineRoutes:
    """Handlers of one running engine."""

    tokenizer: Tokenizer
    core: CoreClient
    models: ModelRegistry
    metrics: Metrics
    usage_log: UsageLog
    states: StateFeed
    prober: Prober
    reports: ServiceReports
    threads: RequestThreads

    async def list_models(self, _: web.Request) -> web.Response:
        return json_response(ModelList(self.models.list(self.core.facts.max_model_len)))

    async def one_model(self, request: web.Request) -> web.Response:
        return json_response(self.models.one(request.match_info["name"], self.core.facts.max_model_len))

    async def tokenize(self, request: web.Request) -> web.Response:
        caller, raw = read_caller(request.headers, internal=request[IS_INTERNAL]), await read_body(request)
        is_long = len(raw) >= LONG
        body = await self.threads.run(caller, lambda: decode(TokenizeRequest, raw), is_long=is_long)
        if body.model is not None:
            self.models.resolve(body.model)
        tokens = await self.threads.run(caller, lambda: self._tokenize(body), is_long=is_long)
        names = [self.tokenizer.token(i) for i in tokens] if body.return_token_strs else UNSET
        return json_response(TokenizeResponse(tokens, len(tokens), self.core.facts.max_model_len, names))

    def _tokenize(self, body: TokenizeRequest) -> list[int]:
        limit = max(MAX_TOKENIZED, self.core.facts.max_model_len)
        try:
            if body.messages is None:
                special = body.add_special_tokens is not False
                return self.tokenizer.encode(body.prompt or "", add_special_tokens=special, limit=limit)
            return self.tokenizer.encode_chat(*body.template_input(), limit=limit)
        except TextTooLong:
            field = "prompt" if body.messages is None else "messages"
            message = f"{field}: expected at most about {limit} tokens."
            raise BadRequest(field, message, "context_length_exceeded") from None

    async def detokenize(self, request: web.Request) -> web.Response:
        caller, raw = read_caller(request.headers, internal=request[IS_INTERNAL]), await read_body(request)
        is_long = len(raw) >= LONG
        body = await self.threads.run(caller, lambda: decode(DetokenizeRequest, raw), is_long=is_long)
        if body.model is not None:
            self.models.resolve(body.model)
        # Keeps special tokens, so that `tokenize` of the text returns the same tokens.
        decode_all = partial(self.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(DetokenizeResponse(await self.threads.run(caller, decode_all, is_long=is_long)))

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = decode(LoadAdapterRequest, await read_body(request))
        digest = await self.models.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        return json_response(AdapterLoaded(body.lora_name, digest_name(digest)))

    async def unload_adapter(self, request: web.Request) -> web.Response:
        body = decode(UnloadAdapterRequest, await read_body(request))
        digest = await self.models.unload(body.lora_name)
        self.states.moved()
        return json_response(AdapterLoaded(body.lora_name, digest_name(digest)))

    async def state(self, request: web.Request) -> web.StreamResponse:
        """Send the state once, or with `?watch=true` line by line until the client leaves."""
        watch = request.query.get("watch", "false")
        if watch not in ("true", "false"):
            raise BadRequest("watch", f"watch: expected true or false, got {watch[:40]!r}.")
        if watch == "false":
            return json_response(await self.states.read())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        async with aclosing(self.states.follow()) as lines:
            async for line in lines:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(line)
        return response

    async def finished_requests(self, request: web.Request) -> web.Response:
        """Send the known requests among `?ids=`, once all have ended or `?wait=` seconds have passed."""
        ids = [id_ for id_ in request.query.get("ids", "").split(",") if id_]
        if not 0 < len(ids) <= MAX_IDS:
            raise BadRequest("ids", f"ids: expected 1 to {MAX_IDS} request ids, comma separated, got {len(ids)}.")
        try:
            wait = float(request.query.get("wait", "0"))
        except ValueError:
            wait = -1.0
        if not 0 <= wait <= MAX_WAIT_S:
            raise BadRequest("wait", f"wait: expected a number of seconds from 0 to {MAX_WAIT_S:g}.")
        if wait:
            await self.usage_log.wait(ids, wait)
        return json_response(FinishedRequestList([found for id_ in ids if (found := self.usage_log.get(id_))]))

    async def raise_allowance(self, request: web.Request) -> web.Response:
        """Raise the token allowance of a gateway's running request."""
        body = decode(AllowanceRequest, await read_body(request))
        return json_response(AllowanceRaised(self.usage_log.allow(body.id, body.tokens)))

    async def add_service(self, request: web.Request) -> web.Response:
        """Charge tenants for service that they received at other engines."""
        body = decode(ServiceElsewhere, await read_body(request))
        # A report is known from here on: the gateway may send it again while the core is slow to apply it.
        charged = await self.core.add_service_elsewhere(body.tenants) if self.reports.is_new(body) else 0
        return json_response(ServiceCharged(charged))

    async def probe(self, request: web.Request) -> web.Response:
        """Probe an adapter of the store for the tenant that the gateway names."""
        caller = read_caller(request.headers, internal=request[IS_INTERNAL])
        body = decode(ProbeRequest, await read_body(request))
        found = await self.prober.probe(bare_digest(body.model), caller.tenant_id)
        self.states.moved()
        return json_response(found)

    async def prefetch(self, request: web.Request) -> web.Response:
        """Load an adapter into host memory for a gateway's waiting request. Answers after the load."""
        body = decode(PrefetchRequest, await read_body(request))
        return json_response(Prefetched(await self.core.prefetch(body.digest, body.tenant)))

    async def pin(self, request: web.Request) -> web.Response:
        """Pin the operator's adapters in host memory for PIN_SECONDS. Answers after their loads."""
        body = decode(PinRequest, await read_body(request))
        return json_response(PinResult(await self.core.pin_adapters(body.digests)))

    async def update_gauges(self) -> None:
        try:
            async with asyncio.timeout(SCRAPE_WAIT_S):
                state = (await self.core.state()).state
        except (TimeoutError, EngineUnavailable):
            return
        self.metrics.running.set(state.num_running)
        self.metrics.waiting.set(state.num_waiting)
        self.metrics.kv_total.set(state.num_blocks)
        self.metrics.kv_used.set(state.num_blocks - state.num_free_blocks)
        self.metrics.adapters.set(len(state.resident_adapters))
        self.metrics.count(self.metrics.preemptions, state.num_preemptions)
        self.metrics.count(self.metrics.num_met, state.num_met)
        self.metrics.count(self.metrics.num_missed, state.num_missed)
        self.metrics.show_tenants(state.tenants)
        self.metrics.show_tiers(state.tiers)
        self.metrics.show_drafts(state.drafts, state.draft_steps)
        self.metrics.count(self.metrics.adapter_loads, state.num_adapter_loads)
        if self.metrics.vllm is not None:
            names = self.models.names_of(state.resident_adapters)
            self.metrics.vllm.show(state, self.models.base_name, names, self.core.facts.config.block_size)
