"""Bound of the time to first token of each request of `benchmarks.residency`: docs/design/step-loop.md, "with free
seats and blocks".

All tenants have weight 1, and all prompts the same length. The lead of a request's tenant over another one is estimated
from above: its tokens so far, with a load for each request, less the other tenant's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from adapters.tiers.reservations import BUSY_WAIT_S, PAGE_WAIT_S
from benchmarks.adapter_engine import Stream
from engine.config import EngineConfig
from engine.scheduling.cost import HELD_PAGES, load_cost
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN

# Upper limits of a host load, a copy and a step on this machine, and the pages of an adapter of rank 16.
LOAD_S, COPY_S, STEP_S, PAGES = 0.1, 0.1, 0.3, 2
# Wait for the pages of one adapter: of a tenant with running requests, for two copies and two steps.
ADAPTER_S = BUSY_WAIT_S + PAGE_WAIT_S + LOAD_S + 2 * COPY_S + 2 * STEP_S
# Least cost of a stream's token.
TOKEN = OUTPUT_TOKEN + PAGES / HELD_PAGES
_CONFIG = EngineConfig(model="")


@dataclass(frozen=True)
class Machine:
    """Speed and size of the engine under test. step: mean seconds of a step; row: seconds of a prompt token; prompt:
    tokens of every prompt; adapters: number that the device holds.
    """

    step: float
    row: float
    prompt: int
    adapters: int


@dataclass(frozen=True)
class Wait:
    """The wait of a request for its first token, in seconds, and its bound."""

    tenant: str
    ttft: float
    bound: float


def waits(streams: Sequence[Stream], machine: Machine) -> list[Wait]:
    return [Wait(s.tenant, s.ttft, bound(s, streams, machine)) for s in streams]


def bound(request: Stream, streams: Sequence[Stream], machine: Machine) -> float:
    """Return the bound of a request's time to first token, in seconds."""
    first = request.token_times[0]
    beside = [s for s in streams if s.sent < first and s.end > request.sent]
    own = [s for s in beside if s.tenant == request.tenant]
    # The tenant's requests without a first token when this one was sent, and those of them that went before it.
    waiting = [s for s in own if s.token_times[0] > request.sent]
    ahead = [s for s in waiting if s.sent <= request.sent or s.token_times[0] <= first]
    running = {s.digest for s in own if s.token_times[0] < first} - {request.digest}
    # With all adapters on the device, nothing loads and no request waits for pages.
    lacks_pages = len({s.digest for s in streams}) > machine.adapters
    load = load_cost(PAGES) if lacks_pages else 0.0
    growth = _served(own, request.tenant, machine, first, load) - _served(own, request.tenant, machine, request.sent)
    before = _served(streams, request.tenant, machine, request.sent, load)
    credit = 0.0
    for other in {s.tenant for s in beside} - {request.tenant}:
        lead = max(0.0, before - _served(streams, other, machine, request.sent))
        # A tenant that begins to wait may be behind by the slack, and within it the nearest request goes first.
        credit += lead + growth + 2 * _CONFIG.fair_slack
    # Seconds in which the prompts of a step in progress compute a token, beside its decodes.
    token_s = machine.row * (1 + 1 / (_CONFIG.prefill_stretch - 1))
    unit_s, pages = token_s, 0.0
    if lacks_pages:
        others = max(1, machine.adapters - len(running))
        unit_s = max(2 * machine.step / (TOKEN * others), token_s)
        pages = len({s.digest for s in ahead}) * ADAPTER_S
    return pages + credit * unit_s + len(ahead) * machine.prompt * token_s + 2 * len(ahead) * STEP_S


def _served(streams: Sequence[Stream], tenant: str, machine: Machine, until: float, load: float = 0.0) -> float:
    """Return the cost of a tenant's tokens until a time, with the cost of a load for each of its requests."""
    total = 0.0
    for stream in streams:
        tokens = sum(time <= until for time in stream.token_times) if stream.tenant == tenant else 0
        if tokens:
            total += machine.prompt * PROMPT_TOKEN + tokens * TOKEN + load
    return total
