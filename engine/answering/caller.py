"""The caller of a request. `engine/http/trusted_headers.py` reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request.

    internal: the request has the internal token; without it the other fields are defaults.
    ttft_target: time to first token that the tenant wants, in seconds; None: no target.
    request_id: key of its token counts, None if they are not kept.
    allowance: completion tokens granted until the gateway raises them; None: no limit.
    base_digest: digest of the base model that must serve the request; None: any.
    """

    internal: bool = False
    tenant_id: str = ""
    weight: float = 1.0
    priority: int = 0
    ttft_target: float | None = None
    request_id: str | None = None
    allowance: int | None = None
    base_digest: str | None = None
