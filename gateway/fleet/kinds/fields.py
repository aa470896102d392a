"""Allow-list of request fields for foreign servers such as vLLM.

Such a server accepts fields that only its operator may set. vLLM's `kv_transfer_params` alone replaces the prompt that
the gateway has counted, names hosts to fetch KV blocks from, and exists in every server. Each release adds more. So a
body for a foreign server is built from the fields that the gateway has checked, at every depth; any other field is
refused by name.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, inspect

from gateway.fleet.engines.traits import OwnFields
from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest, NotServed

CHAT_PATH = "/v1/chat/completions"
RequestType = type[ChatCompletionRequest] | type[CompletionRequest]


# Hints for OpenAI's own service that many clients send. They do not change the answer and are dropped. `priority` and
# `ttft_target` are dropped too: they order a tenant's own requests, and such servers do not distinguish tenants.
DROPPED = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "ttft_target",
        "verbosity",
    }
)
# Arguments of transformers' `apply_chat_template`, which such servers take from `chat_template_kwargs` together with
# the template's variables.
RENDERERS_OWN = frozenset(
    {
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def check_fields(raw: bytes, request_type: RequestType, own_fields: Sequence[type[OwnFields]]) -> bytes:
    """Return the body without the fields that only some engine kinds serve, so that `request_type` can decode it.

    Raises the protocol's BadRequest for a field that is sent to no engine. A body that is not a JSON object is returned
    unchanged: `decode` reports it.
    """
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    if not isinstance(fields, dict):
        return raw
    _refuse_unknown(fields, request_type, own_fields)
    names = _names(own_fields) & fields.keys()
    if not names:
        return raw
    for struct in own_fields:
        decode(struct, msgspec.json.encode({name: fields[name] for name in names & set(struct.__struct_fields__)}))
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in names})


def allowed(
    body: dict[str, Any], request_type: RequestType, own_fields: Sequence[type[OwnFields]] = ()
) -> dict[str, Any]:
    """Return the declared fields of a checked body, at every depth, that have a value and that engines use.

    Raises the protocol's BadRequest as `check_fields` does, which has not run if all foreign servers announced
    themselves.
    """
    body = {name: msgspec.json.decode(value) if isinstance(value, Raw) else value for name, value in body.items()}
    _refuse_unknown(body, request_type, own_fields)
    served = {name: body[name] for name in (_served(request_type) - DROPPED) & body.keys() if body[name] is not None}
    sent: dict[str, Any] = _declared(served, _type_info(request_type))
    return sent | {name: body[name] for name in _names(own_fields) & body.keys() if body[name] is not None}


def request_type(path: str) -> RequestType:
    """Return the type of the requests to a route."""
    return ChatCompletionRequest if path == CHAT_PATH else CompletionRequest


def cache_salt(tenant_id: str, digest: str | None, client_salt: str | None) -> str:
    """Return the salt of a request's KV blocks. client_salt: the client's salt.

    Only requests with the same tenant, adapter and client's salt share blocks. The adapter is included because caches
    behind vLLM may leave it out of their keys (vllm-project/vllm#44250). The length is fixed, because vLLM refuses
    salts of more than 1,024 characters.
    """
    parts = "\0".join((tenant_id, digest or "base", client_salt or ""))
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


def _refuse_unknown(fields: dict[str, Any], request_type: RequestType, own_fields: Sequence[type[OwnFields]]) -> None:
    # A field without a value has no effect.
    known = {*request_type.__struct_fields__, *_names(own_fields), *DROPPED}
    for name, value in fields.items():
        if value is not None and name not in known:
            raise BadRequest(name[:64], f"{name[:64]}: is not served by this gateway.", "unsupported_parameter")
    variables = fields.get("chat_template_kwargs")
    if isinstance(variables, dict) and (taken := RENDERERS_OWN & variables.keys()):
        message = f"chat_template_kwargs: {min(taken)} is not allowed here."
        raise BadRequest("chat_template_kwargs", message, "unsupported_parameter")


def _names(own_fields: Sequence[type[OwnFields]]) -> frozenset[str]:
    return frozenset(name for struct in own_fields for name in struct.__struct_fields__)


@cache
def _served(request_type: RequestType) -> frozenset[str]:
    """Return the fields of a request that the engines use."""
    return frozenset(field.name for field in msgspec.structs.fields(request_type) if field.type != NotServed)


@cache
def _type_info(request_type: RequestType) -> inspect.Type:
    return inspect.type_info(request_type)


def _declared(value: Any, declared: inspect.Type) -> Any:
    """Return a checked value without the members that its type does not declare.

    Only structs and lists of structs are traversed: a prompt may have a million token ids, and a schema any depth.
    """
    options = declared.types if isinstance(declared, inspect.UnionType) else (declared,)
    for option in options:
        if isinstance(option, inspect.StructType) and isinstance(value, dict):
            given = [field for field in option.fields if field.encode_name in value]
            return {field.encode_name: _declared(value[field.encode_name], field.type) for field in given}
        if isinstance(option, inspect.ListType) and isinstance(value, list) and _holds_structs(option.item_type):
            return [_declared(item, option.item_type) for item in value]
    return value


def _holds_structs(declared: inspect.Type) -> bool:
    options = declared.types if isinstance(declared, inspect.UnionType) else (declared,)
    return any(isinstance(option, inspect.StructType) for option in options)


def is_one_sequence(body: dict[str, Any]) -> bool:
    """Return whether a single prompt gets a single choice."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and body.get("n") in (None, 1)
