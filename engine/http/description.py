"""Requests and responses of the engine's routes, published as `/openapi.json`."""

from typing import Any

from wire.openapi import Route, describe
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
    Health,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)

ROUTES = (
    Route("POST", "/v1/completions", "Continue a text.", CompletionRequest, Completion, streams=True),
    Route("POST", "/v1/chat/completions", "Answer a chat.", ChatCompletionRequest, ChatCompletion, streams=True),
    Route("GET", "/v1/models", "The base model and the adapters loaded by name.", None, ModelList),
    Route("GET", "/v1/models/{name}", "One of them.", None, Model),
    Route("POST", "/tokenize", "A prompt or a chat as token ids.", TokenizeRequest, TokenizeResponse),
    Route("POST", "/detokenize", "Token ids as text.", DetokenizeRequest, DetokenizeResponse),
    Route(
        "POST", "/v1/load_lora_adapter", "Serve an adapter's folder under a name.", LoadAdapterRequest, AdapterLoaded
    ),
    Route("POST", "/v1/unload_lora_adapter", "Forget a name.", UnloadAdapterRequest, AdapterLoaded),
    Route("GET", "/state", "Resident adapters, queued requests and free blocks.", None, EngineStateResponse),
    Route("GET", "/finished", "Token counts of requests, by the gateway's ids.", None, FinishedRequestList),
    Route("POST", "/allowances", "Raise the tokens that a request may have.", AllowanceRequest, AllowanceRaised),
    Route("GET", "/health", "Readiness to serve requests.", None, Health),
    Route("GET", "/ping", "The same.", None, Health),
    Route("GET", "/livez", "Liveness: 503 once the engine has failed.", None, Health),
    Route("GET", "/version", "The engine's version.", None, Version),
    Route("GET", "/metrics", "For Prometheus."),
    Route("GET", "/openapi.json", "This description.", None, dict),
)


def engine_description() -> dict[str, Any]:
    return describe("Loraplex engine", ROUTES)
