"""The allow-list of request fields for vLLM servers, and the request bodies for them.

vLLM accepts fields that only the operator may set: `kv_transfer_params` alone replaces the prompt that the gateway has
counted, names hosts to fetch KV blocks from, and exists in every server. Each release adds more. So a body for vLLM is
built from the fields that the gateway has checked, at every depth; any other field is refused by name.
"""

import hashlib
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct, inspect

from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest, NotServed

# vLLM's former names for the members of `structured_outputs`; current releases ignore them.
OLD_FORMS = "guided_"
CHAT_PATH = "/v1/chat/completions"
RequestType = type[ChatCompletionRequest] | type[CompletionRequest]


class VllmOnly(Struct, kw_only=True):
    """Fields that vLLM serves and our engine does not. They change the answer within its `max_tokens` only."""

    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None

    def check(self) -> None:
        pass


# Hints for OpenAI's own service that many clients send. They do not change the answer and are dropped. `priority` is
# dropped too, because it belongs to the tenant, not to the request.
DROPPED = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "verbosity",
    }
)
# Arguments of transformers' `apply_chat_template`, which vLLM takes from `chat_template_kwargs` together with the
# template's variables.
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
_VLLM_ONLY = frozenset(VllmOnly.__struct_fields__)


def check_fields(raw: bytes, kind: RequestType) -> bytes:
    """Return the body without the fields that only vLLM serves, as `kind` decodes it.

    Raises the protocol's BadRequest for a field that is sent to no engine. A body that is not a JSON object is returned
    unchanged: `decode` reports it.
    """
    try:
        fields = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw
    if not isinstance(fields, dict):
        return raw
    _refuse_unknown(fields, kind)
    only = {name: fields.pop(name) for name in _VLLM_ONLY & fields.keys()}
    if not only:
        return raw
    decode(VllmOnly, msgspec.json.encode(only))
    return msgspec.json.encode(fields)


def vllm_request(body: dict[str, Any], path: str, tenant_id: str, digest: str | None) -> dict[str, Any]:
    """Return the body for a vLLM server, made from a checked body; the caller sets its `model`.

    Raises the protocol's BadRequest as `check_fields` does, which has not run if all vLLM servers announced themselves.
    """
    body = {name: msgspec.json.decode(value) if isinstance(value, Raw) else value for name, value in body.items()}
    sent = _allowed(body, ChatCompletionRequest if path == CHAT_PATH else CompletionRequest)
    sent["cache_salt"] = cache_salt(tenant_id, digest, body.get("cache_salt"))
    if sent.get("stream"):
        # Each event then carries the tokens so far, by which a client that leaves is billed. Off for several sequences:
        # vLLM counts each of them alone, which would be taken for the total.
        sent["stream_options"] = {**sent["stream_options"], "continuous_usage_stats": _is_one_sequence(sent)}
    return sent


def cache_salt(tenant_id: str, digest: str | None, own: str | None) -> str:
    """Return the salt of a request's KV blocks. own: the client's salt.

    Only requests with the same tenant, adapter and client's salt share blocks. The adapter is included because caches
    behind vLLM may leave it out of their keys (vllm-project/vllm#44250). The length is fixed, because vLLM refuses
    salts of more than 1,024 characters.
    """
    parts = "\0".join((tenant_id, digest or "base", own or ""))
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()


def _allowed(body: dict[str, Any], kind: RequestType) -> dict[str, Any]:
    """Return the declared fields of a body, at every depth, that have a value and an effect in vLLM."""
    _refuse_unknown(body, kind)
    served = {name: body[name] for name in _served(kind) & body.keys() if body[name] is not None}
    sent: dict[str, Any] = _declared(served, _type_info(kind))
    for name in [each for each in sent if each.startswith(OLD_FORMS)]:
        sent["structured_outputs"] = {name.removeprefix(OLD_FORMS): sent.pop(name)}
    return sent | {name: body[name] for name in _VLLM_ONLY & body.keys() if body[name] is not None}


def _refuse_unknown(fields: dict[str, Any], kind: RequestType) -> None:
    # A field without a value has no effect.
    known = kind.__struct_fields__
    for name, value in fields.items():
        if value is not None and name not in known and name not in _VLLM_ONLY and name not in DROPPED:
            raise BadRequest(name[:64], f"{name[:64]} is not served by this gateway", "unsupported_parameter")
    variables = fields.get("chat_template_kwargs")
    if isinstance(variables, dict) and (taken := RENDERERS_OWN & variables.keys()):
        message = f"chat_template_kwargs: {min(taken)} cannot be given here"
        raise BadRequest("chat_template_kwargs", message, "unsupported_parameter")


@cache
def _served(kind: RequestType) -> frozenset[str]:
    """Return the fields of a request that the engines use."""
    return frozenset(field.name for field in msgspec.structs.fields(kind) if field.type != NotServed)


@cache
def _type_info(kind: RequestType) -> inspect.Type:
    return inspect.type_info(kind)


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


def _is_one_sequence(body: dict[str, Any]) -> bool:
    """Return whether a single prompt gets a single choice."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not several and body.get("n") in (None, 1)
