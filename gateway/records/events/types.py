"""Types of events."""

from typing import Literal

EventType = Literal[
    # A tenant's spending reached one of its `budget_warn_at` below 1.
    "budget.threshold",
    # A tenant's spending reached its budget; further requests are refused.
    "budget.exhausted",
    # A tenant's spending reached one of its soft budgets; nothing is refused.
    "budget.soft",
    "tenant.suspended",
    # A key expires within 7 days.
    "key.expiring",
    # An engine died without a drain.
    "engine.died",
    "engine.down",
    "engine.up",
    # An engine answered with another adapter than the request's.
    "engine.mismatch",
    # The check of an upload or an engine's probe refused a version of an adapter.
    "adapter.rejected",
    # Engines died with a request, an adapter or several requests of a tenant, which are refused for a time.
    "request.quarantined",
    "adapter.quarantined",
    "tenant.quarantined",
    # Clients try API keys.
    "keys.guessed",
]
