"""Events of a stream as the client receives them."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from gateway.api.requests.prompts import CHAT, InferenceRequest
from gateway.billing.account import Account
from gateway.fleet.answers import Fields, decode_choices


def as_json(value: str) -> Raw:
    return Raw(msgspec.json.encode(value))


def visible_event(event: Fields, model: Raw, include_usage: bool) -> Fields | None:
    """Return a stream's event as the client receives it; None for an event that only the gateway requested."""
    event.pop("loraplex", None)
    event["model"] = model
    if not include_usage:
        event.pop("usage", None)
    return event if _says_something(event, "choices") or _says_something(event, "usage") else None


def shortened(event: Fields, model: Raw, asked: InferenceRequest, account: Account) -> Iterator[dict[str, Any]]:
    """Yield the last events of a shortened stream. The client receives them instead of `event`."""
    envelope = {name: event[name] for name in ("id", "object", "created") if name in event} | {"model": model}
    text: dict[str, Any] = {"delta": {}} if account.endpoint == CHAT.name else {"text": ""}
    unseen = {choice.index for choice in decode_choices(event)}
    left = [index for index in range(asked.choices) if index not in account.ended_choices - unseen]
    choices = [{"index": index, **text, "logprobs": None, "finish_reason": "length"} for index in left]
    yield {**envelope, "choices": choices}
    if asked.include_usage:
        used = account.used
        counts = {
            "prompt_tokens": used.prompt,
            "completion_tokens": used.completion,
            "total_tokens": used.prompt + used.completion,
            "prompt_tokens_details": {"cached_tokens": used.cached},
        }
        yield {**envelope, "choices": [], "usage": counts}


def _says_something(event: Fields, name: str) -> bool:
    raw = memoryview(event.get(name, b""))
    return raw.nbytes > len(b"null") or bytes(raw) not in (b"", b"[]", b"null")
