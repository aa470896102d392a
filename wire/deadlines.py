"""Order of one tenant's requests, in the gateway's queue and in the engine: earliest deadline first.

A request's arrival is the time at which the gateway begins to read it, or the engine if it has no gateway. Deadlines
and targets of the time to first token count from its arrival, so they include the wait in the gateway's queue and the
loads of adapters. Ageing and preemption between tenants count the wait in the present queue only.
"""

# Target of the time to first token that orders a request without a target of its own, in seconds.
USUAL_TARGET_S = 10.0
# Waiting time that equals one step of priority, in seconds. Priorities age: a request that has waited this much longer
# goes before one of the next higher priority.
PRIORITY_S = 10.0
# Limit of a priority's absolute value, so that no request starves.
MAX_PRIORITY = 100


def deadline(arrived: float, ttft_target: float | None, priority: int) -> float:
    """Return the time that orders a request within its tenant: arrival plus target, shifted by the priority.

    arrived: see above, on the caller's clock. The result does not change during the wait, so no request starves. Lower
    priorities go first.
    """
    target = USUAL_TARGET_S if ttft_target is None else ttft_target
    return arrived + target + PRIORITY_S * max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
