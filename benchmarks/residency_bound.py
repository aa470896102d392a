"""Bound of the time to first token of each request of `benchmarks.residency`: docs/design/step-loop.md, "A request with
free seats and blocks".

All tenants have weight 1, and all prompts the same length. During a wait the bound grows with the service of the
request's own tenant and with the arrival of further tenants. Each moment of the wait is compared with the bound by
then, so later service cannot excuse an earlier delay.

The lead of a request's tenant over another one is estimated from above: its tokens so far, with a load for each
request, less the other tenant's tokens.
"""

from bisect import bisect
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
# Longest time between the charge of a token and its delivery: a step is planned while the one before it runs.
DELIVERY_S = 2 * STEP_S
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
    """The wait of a request for its first token, in seconds, and its bounds.

    part: elapsed time divided by the bound at the moment of the wait at which this is greatest; above 1 the request was
    late. bound: the bound of that moment. at_start: the bound without its tenant's requests sent more than a host load
    later; every other tenant counts, also one that comes during the wait.
    """

    tenant: str
    ttft: float
    part: float
    bound: float
    at_start: float


def waits(streams: Sequence[Stream], machine: Machine) -> list[Wait]:
    return [_wait(stream, streams, machine) for stream in streams]


def _wait(request: Stream, streams: Sequence[Stream], machine: Machine) -> Wait:
    bound = RequestBound(request, streams, machine)
    parts = [((moment - request.sent) / (limit := bound.at(moment)), limit) for moment in bound.moments()]
    part, limit = max(parts)
    return Wait(request.tenant, request.ttft, part, limit, bound.at_start())


class RequestBound:
    """The bound of a request's wait, in seconds, by the moment of the wait."""

    def __init__(self, request: Stream, streams: Sequence[Stream], machine: Machine) -> None:
        self._request, self._machine, sent = request, machine, request.sent
        own = [s for s in streams if s.tenant == request.tenant and s.end > sent]
        # With all adapters on the device, nothing loads, no request waits for pages, and a tenant's requests begin in
        # the order of their arrival. Requests that are sent within a host load may arrive or load in any order.
        self._lacks_pages = len({s.digest for s in streams}) > machine.adapters
        self._load = load_cost(PAGES) if self._lacks_pages else 0.0
        earlier = [s for s in own if s.sent <= sent + LOAD_S]
        later = [s for s in own if s.sent > sent + LOAD_S] if self._lacks_pages else []
        waiting = [s for s in earlier if s.token_times[0] > sent]
        self._num_waiting = len(waiting)
        self._pages_s = len({s.digest for s in waiting}) * ADAPTER_S if self._lacks_pages else 0.0
        self._used = sorted((s.token_times[0], s.digest) for s in [*earlier, *later] if s.digest != request.digest)
        self._overtaking = sorted(s.token_times[0] for s in later)
        self._tokens = sorted(t for s in [*earlier, *later] for t in s.token_times if t > sent)
        self._earlier_adapters = len({s.digest for s in earlier} - {request.digest})
        self._earlier_tokens = sum(t > sent for s in earlier if s is not request for t in s.token_times)
        self._leads = self._leads_over_others(streams)

    def _leads_over_others(self, streams: Sequence[Stream]) -> list[tuple[float, float]]:
        """Return for each other tenant the time from which it has requests, and the request's tenant's lead over it."""
        request = self._request
        mine = self._served(streams, request.tenant, self._load)
        came: dict[str, float] = {}
        for stream in streams:
            if stream.end > request.sent and stream.tenant != request.tenant:
                came[stream.tenant] = min(stream.sent, came.get(stream.tenant, stream.sent))
        return [(time, max(0.0, mine - self._served(streams, other))) for other, time in came.items()]

    def _served(self, streams: Sequence[Stream], tenant: str, load: float = 0.0) -> float:
        """Return the cost of a tenant's tokens until the wait began, with the cost of a load for each request."""
        counts = [bisect(s.token_times, self._request.sent) for s in streams if s.tenant == tenant]
        return sum(self._machine.prompt * PROMPT_TOKEN + count * TOKEN + load for count in counts if count)

    def moments(self) -> list[float]:
        """Return the ends of the times during which the bound stays the same, until the first token."""
        first = self._request.token_times[0]
        changes = {time - DELIVERY_S for time in (*self._tokens, *(came for came, _ in self._leads))}
        return [*(moment for moment in sorted(changes) if self._request.sent < moment < first), first]

    def at(self, moment: float) -> float:
        """Return the bound by what the tenant has been served until a moment."""
        until = moment + DELIVERY_S
        overtaking = bisect(self._overtaking, until - 1e-9)
        tokens = bisect(self._tokens, until - 1e-9)
        used = len({digest for time, digest in self._used if time < until})
        leads = [lead for came, lead in self._leads if came < until]
        return self._seconds(self._num_waiting + overtaking, tokens, used, leads)

    def at_start(self) -> float:
        """Return the bound without later requests of the tenant: those before it get all of their tokens."""
        leads = [lead for _, lead in self._leads]
        return self._seconds(self._num_waiting, self._earlier_tokens, self._earlier_adapters, leads)

    def _seconds(self, begun: int, tokens: int, used: int, leads: Sequence[float]) -> float:
        """Return the bound in which the tenant begins some requests, this one included, and gets some tokens. used: its
        other adapters on the device; leads: its leads over the other tenants.
        """
        machine = self._machine
        growth = begun * (machine.prompt * PROMPT_TOKEN + self._load) + tokens * TOKEN
        # A tenant that begins to wait may be behind by the slack; within it the request of best locality goes first.
        credit = sum(lead + growth + 2 * _CONFIG.fair_slack for lead in leads)
        # Seconds in which the prompts of a step in progress compute a token, beside its decodes.
        token_s = machine.row * (1 + 1 / (_CONFIG.prefill_stretch - 1))
        unit_s = token_s
        if self._lacks_pages:
            unit_s = max(2 * machine.step / (TOKEN * max(1, machine.adapters - used)), token_s)
        return self._pages_s + credit * unit_s + begun * (machine.prompt * token_s + 2 * STEP_S)
