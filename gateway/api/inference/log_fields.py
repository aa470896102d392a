"""Fields of the access log that an admitted inference request adds."""

from typing import Any

from aiohttp import web

from gateway.billing.account import Account

LOG_FIELDS = web.RequestKey("log_fields", dict)


def log_fields(account: Account) -> dict[str, Any]:
    """Return the model, its version, the tokens, the time to the first token and the engine; never a text."""
    used, first = account.used, account.first_token_seconds
    fields = {
        "model": account.model.name,
        "version": account.model.version,
        "prompt_tokens": used.prompt,
        "cached_tokens": used.cached,
        "completion_tokens": used.completion,
        "ttft_ms": None if first is None else round(first * 1000),
        "engine": account.used_engines.engine,
    }
    return {name: value for name, value in fields.items() if value is not None}
