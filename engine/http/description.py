"""Requests and responses of the engine's routes, published as `/openapi.json`."""

from typing import Any

from wire.openapi import Route, describe
from wire.prefetch import PinRequest, PinResult, Prefetched, PrefetchRequest
from wire.probes import AdapterProbe, ProbeRequest
from wire.requests import (
    AllowanceRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from wire.responses import (
    AdapterLoaded,
    AllowanceRaised,
    ChatCompletion,
    Completion,
    DetokenizeResponse,
    EngineStateResponse,
    FinishedRequestList,
    HealthStatus,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)
from wire.service import ServiceCharged, ServiceElsewhere

ROUTES = (
    Route("POST", "/v1/completions", "Continue a text.", CompletionRequest, Completion, streams=True),
    Route("POST", "/v1/chat/completions", "Answer a chat.", ChatCompletionRequest, ChatCompletion, streams=True),
    Route("GET", "/v1/models", "List the base model and the adapters loaded by name.", None, ModelList),
    Route("GET", "/v1/models/{name}", "Return a model.", None, Model),
    Route("POST", "/tokenize", "Return a prompt or a chat as token ids.", TokenizeRequest, TokenizeResponse),
    Route("POST", "/detokenize", "Return token ids as text.", DetokenizeRequest, DetokenizeResponse),
    Route(
        "POST", "/v1/load_lora_adapter", "Serve an adapter's folder under a name.", LoadAdapterRequest, AdapterLoaded
    ),
    Route("POST", "/v1/unload_lora_adapter", "Stop serving a name.", UnloadAdapterRequest, AdapterLoaded),
    Route("GET", "/state", "Return resident adapters, queued requests and free blocks.", None, EngineStateResponse),
    Route("GET", "/finished", "Return token counts of requests, by the gateway's ids.", None, FinishedRequestList),
    Route(
        "POST",
        "/allowances",
        "Raise the token limit of a request.",
        AllowanceRequest,
        AllowanceRaised,
    ),
    Route("POST", "/service", "Add tenants' service at other engines.", ServiceElsewhere, ServiceCharged),
    Route("POST", "/probe", "Compare an adapter with the base model on fixed prompts.", ProbeRequest, AdapterProbe),
    Route("POST", "/prefetch", "Load an adapter for a waiting request.", PrefetchRequest, Prefetched),
    Route("POST", "/pins", "Pin adapters in host memory for 30 s.", PinRequest, PinResult),
    Route("GET", "/health", "Return whether requests can be served.", None, HealthStatus),
    Route("GET", "/ping", "Return the same as /health.", None, HealthStatus),
    Route("GET", "/readyz", "Return the same as /health.", None, HealthStatus),
    Route("GET", "/livez", "Return whether the engine is alive: 503 once it has failed.", None, HealthStatus),
    Route("GET", "/version", "Return the engine's version.", None, Version),
    Route("GET", "/metrics", "Return Prometheus metrics."),
    Route("GET", "/openapi.json", "This description.", None, dict),
)


def engine_description() -> dict[str, Any]:
    return describe("Loraplex engine", ROUTES)
