"""Targets of the time to first token, by this gateway's clock: from a request's arrival, for engines of every kind.

Only streams count: the client of a whole answer gets its first token with its last, and foreign engines do not report
when they made it.
"""

from gateway.billing.charges import Ending
from gateway.billing.inference_request import InferenceRequest
from gateway.records.tenants.tenants import Tenant


def target_of(asked: InferenceRequest, tenant: Tenant) -> float | None:
    """Return the target of a stream in seconds: the request's, or else its tenant's. None: no target, or no stream."""
    return (asked.body.get("ttft_target") or tenant.ttft_target) if asked.stream else None


def is_met(target: float | None, ending: Ending, first_token: float | None, ended: float) -> bool | None:
    """Return whether a request met its target; None if it does not count.

    first_token, ended: seconds from its arrival; first_token is None if no token came. A request without a token missed
    its target, unless it was invalid, or its client left (or its key was revoked) while the target could still be met.
    """
    if target is None or (first_token is None and ending is Ending.REFUSED):
        return None
    if first_token is not None:
        return first_token <= target
    if ending in (Ending.CANCELLED, Ending.REVOKED):
        return None if ended <= target else False
    # A complete answer without tokens came when it ended.
    return ending is Ending.FINISHED and ended <= target
