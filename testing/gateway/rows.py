"""Usage rows for tests."""

from datetime import UTC, datetime
from typing import Any

from gateway.usage_row import UsageRow

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def row(request_id: str, **changes: Any) -> UsageRow:
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant_id": "t1",
        "tenant": "acme",
        "key_id": "k",
        "endpoint": "completions",
        "model": "base",
        "adapter_digest": None,
        "engine": "http://e",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "cached_tokens": 1,
        "cost": 7,
        "latency_ms": 10,
        "ttft_ms": None,
        "status": "ok",
        "finish_reason": "stop",
        "created_at": NOON,
    }
    return UsageRow(**values | changes)
