"""The caller of a request. `engine/http/trusted_headers.py` reads it."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    internal: the request has the internal token; without it the other fields are defaults.
    ttft_target: time to first token that the tenant wants, in seconds; None: no target.
    request_id: key of its token counts, None if they are not kept.
    allowance: completion tokens granted until the gateway raises them; None: no limit.
    base_digest: digest of the base model that must serve the request; None: any.
    received: time at which this engine began to read the request, in seconds of time.monotonic(). age: seconds since it
    arrived at the gateway, at that time.
    """

    internal: bool = False
    tenant_id: str = ""
    weight: float = 1.0
    priority: int = 0
    ttft_target: float | None = None
    request_id: str | None = None
    allowance: int | None = None
    base_digest: str | None = None
    received: float = field(default_factory=time.monotonic)
    age: float = 0.0

    @property
    def arrived_at(self) -> float:
        """Return the time of the request's arrival at the gateway, or here without one, on this machine's clock."""
        return self.received - self.age
