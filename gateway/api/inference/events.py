"""Events of a stream as the client receives them."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from gateway.api.requests.prompts import CHAT, COMPLETIONS
from gateway.billing.account import Account
from gateway.billing.inference_request import InferenceRequest
from gateway.fleet.calls.answers import Fields, decode_choices, decode_field
from wire.money import exact_money

# Prefix of an answer's id by the name of its endpoint.
ID_PREFIXES = {CHAT.name: "chatcmpl-", COMPLETIONS.name: "cmpl-"}


# Fields of engines' answers that are not for clients: counts of our engines, and the addresses of a pair's KV blocks.
INTERNAL = ("loraplex", "kv_transfer_params")


def drop_internal(answer: Fields) -> None:
    for name in INTERNAL:
        answer.pop(name, None)


def head_of(account: Account) -> Fields:
    """Return the fields of an answer that the gateway sets: its model, and its id, which ends like the request's."""
    answer_id = ID_PREFIXES[account.endpoint] + account.reservation.request_id.removeprefix("req_")
    return {"id": _as_json(answer_id), "model": _as_json(account.model.shown)}


def _as_json(value: str) -> Raw:
    return Raw(msgspec.json.encode(value))


def show_billed(answer: Fields, account: Account) -> None:
    """Set the counts so far, as they are billed, and their cost in the `usage` of an answer or of a stream's event, if
    it has one.
    """
    if _says_something(answer, "usage"):
        usage = decode_field(answer, "usage")
        if isinstance(usage, dict):
            answer["usage"] = Raw(msgspec.json.encode(usage | _billed(account)))


def _billed(account: Account) -> dict[str, Any]:
    used = account.used
    return {
        "prompt_tokens": used.prompt,
        "completion_tokens": used.completion,
        "total_tokens": used.prompt + used.completion,
        "prompt_tokens_details": {"cached_tokens": used.cached},
        # A JSON number with all of its decimals, as OpenRouter's clients expect.
        "cost": Raw(exact_money(account.cost).encode()),
        "currency": account.reservation.currency,
    }


def visible_event(event: Fields, head: Fields, include_usage: bool) -> Fields | None:
    """Return a stream's event as the client receives it; None for an event that only the gateway requested."""
    drop_internal(event)
    event.update(head)
    if not include_usage:
        event.pop("usage", None)
    return event if _says_something(event, "choices") or _says_something(event, "usage") else None


def shortened(event: Fields, head: Fields, asked: InferenceRequest, account: Account) -> Iterator[dict[str, Any]]:
    """Yield the last events of a shortened stream. The client receives them instead of `event`."""
    envelope = {name: event[name] for name in ("object", "created") if name in event} | head
    text: dict[str, Any] = {"delta": {}} if account.endpoint == CHAT.name else {"text": ""}
    unseen = {choice.index for choice in decode_choices(event)}
    left = [index for index in range(asked.choices) if index not in account.ended_choices - unseen]
    choices = [{"index": index, **text, "logprobs": None, "finish_reason": "length"} for index in left]
    yield {**envelope, "choices": choices}
    if asked.include_usage:
        yield {**envelope, "choices": [], "usage": _billed(account)}


def _says_something(event: Fields, name: str) -> bool:
    raw = memoryview(event.get(name, b""))
    return raw.nbytes > len(b"null") or bytes(raw) not in (b"", b"[]", b"null")
