"""Fair share between tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024, algorithm 2).

Each admission and each prompt chunk goes to the tenant with the least service per weight, and is counted before the
next one is chosen. Independent of blocks and adapters.

A running stream of a tenant that is ahead gives way to a waiting request of one that is behind (`preemptible`), so
that no tenant's `max_tokens` bounds another tenant's wait; docs/design/step-loop.md states the bound.
"""

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter, itemgetter

from engine.scheduling.policies.policy import Locality
from engine.scheduling.policies.tenants import OnDeviceAmong, TenantPolicy, Tenants, every_adapter
from engine.scheduling.request import Request

_order_key = attrgetter("order_key")
_counter = itemgetter(0)
# A tenant's turn: its counter, the arrival of its first request, its id.
Turn = tuple[float, int, str]

# Maximum number of least served tenants compared by the locality of their requests. It bounds an admission's look-ups.
COMPARED = 16
# Maximum number of one tenant's waiting requests that a step considers. It bounds a step's time while thousands of
# requests wait for adapters that are loading.
LOOKED_AT = 64
# Number of requests for adapters off the device that a step considers, for each tenant and in all: enough to load these
# adapters in advance. After these a step considers only requests whose adapter is on the device. Without this, a loaded
# adapter would be evicted unused: its tenant pays for the load, so its request comes after those of all tenants that
# have not loaded yet.
OFF_DEVICE_LOOKED_AT, OFF_DEVICE_IN_ALL = 4, 64
# The same while no seat is free: enough to load the next requests' adapters. It must not end the step's look at the
# others, because a request whose adapter is on the device may claim a seat.
OFF_DEVICE_WITHOUT_SEAT = 8
# Factor by which a tenant's running requests per weight must exceed another tenant's for the other to be light.
HEAVIER = 2
# Target of the duration in seconds of a step with prompts, because a prompt that arrives waits for the step's end. It
# applies while several tenants use the engine: for `SHARED_S` seconds after a request whose predecessor was another
# tenant's.
STEP_S, SHARED_S = 0.15, 60.0


class FairShare(TenantPolicy):
    """Policy that serves the tenant with the least service per weight first.

    slack: among the tenants whose counters exceed the least by at most this, the request of best locality is first; 0:
    always the least served tenant's. A tenant that begins to wait may be behind the others by as much, but by at most
    half of `preempt_behind`. preempt_behind: difference of counters from which a stream gives way to a waiting request.
    preempt_after: seconds of waiting after which any difference suffices, if the request's tenant has nothing running.
    """

    def __init__(self, slack: float = 0.0, preempt_behind: float = 512.0, preempt_after: float = 0.25) -> None:
        # With a credit of `preempt_behind`, each return of a tenant would preempt others' streams at once.
        super().__init__(credit=min(slack, preempt_behind / 2))
        self._slack = slack
        self._preempt_behind = preempt_behind
        self._preempt_after = preempt_after
        self._last_entered: str | None = None
        self._shared_until = 0.0

    def enter(self, request: Request, now: float, on_device_among: OnDeviceAmong = every_adapter) -> None:
        if request.tenant_id != self._last_entered:
            self._shared_until = 0.0 if self._last_entered is None else now + SHARED_S
            self._last_entered = request.tenant_id
        request.order_key = (1, request.due, request.arrival_number)
        self._tenants.enter(request, now, on_device_among)

    def put_back(self, request: Request, now: float) -> None:
        request.order_key = (0, 0.0, request.arrival_number)
        self._tenants.push(self._tenants.accounts[request.tenant_id], request, now)

    def turns(self, in_progress: Iterable[Request], locality: Locality | None, *, has_seat: bool = True) -> "FairTurns":
        if has_seat:
            return FairTurns(self._tenants, in_progress, locality, self._slack)
        return FairTurns(self._tenants, in_progress, locality, 0.0, OFF_DEVICE_WITHOUT_SEAT)

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the newest stream of the tenant furthest ahead; streams that have had their quantum come first."""
        return max(running, key=lambda r: (r.had_quantum, self.counter(r.tenant_id), r.arrival_number))

    def preemptible(
        self, claimant: Request, running: Sequence[Request], now: float, *, keeps_blocks: bool
    ) -> list[Request]:
        """Return streams of tenants that are ahead, if they have had their quantum: furthest ahead first, then newest.

        While the claimant's tenant has streams of its own, a stream gives way only if it keeps its blocks, or if its
        tenant is so far ahead that computing it again is at most a quarter of the difference.
        """
        seats = {r.tenant_id for r in running}
        is_idle, threshold = claimant.tenant_id not in seats, self.counter(claimant.tenant_id)
        ahead = {t: counter for t in seats if (counter := self.counter(t)) > threshold}
        if not is_idle or now - claimant.queued_at < self._preempt_after:
            threshold += self._preempt_behind
            heavier = self.heavier(claimant, running) if ahead else ()
            ahead = {t: counter for t, counter in ahead.items() if counter > threshold or t in heavier}
        if not ahead:
            return []
        streams = [
            r
            for r in running
            if r.tenant_id in ahead
            and r.tenant_id != claimant.tenant_id
            and r.had_quantum
            and (is_idle or keeps_blocks or ahead[r.tenant_id] - 4 * r.num_computed / r.weight > threshold)
        ]
        return sorted(streams, key=lambda r: (ahead[r.tenant_id], r.arrival_number), reverse=True)

    def gives_way(self, tenant_id: str, claimant: str) -> bool:
        return self.counter(tenant_id) > self.counter(claimant)

    def heavier(self, request: Request, running: Sequence[Request]) -> set[str]:
        """Return the tenants beside which the request's tenant is light: those that are ahead of it and have at least
        twice its running requests per weight, this request included.
        """
        seats = Counter([r.tenant_id for r in running])
        own = seats.pop(request.tenant_id, 0) + (request.seat < 0)
        weights, counter = {r.tenant_id: r.weight for r in running}, self.counter(request.tenant_id)
        return {
            tenant_id
            for tenant_id, held in seats.items()
            if held * request.weight >= HEAVIER * own * weights[tenant_id] and self.counter(tenant_id) > counter
        }

    def step_target(self, now: float) -> float | None:
        return STEP_S if now < self._shared_until else None


class FairTurns:
    """Turns of one step. Each tenant's prompts in progress come before its queue."""

    def __init__(
        self,
        tenants: Tenants,
        in_progress: Iterable[Request],
        locality: Locality | None,
        slack: float,
        most_off_device: int = OFF_DEVICE_IN_ALL,
    ) -> None:
        """most_off_device: limit of the requests for adapters off the device."""
        self._tenants, self._most_off_device = tenants, most_off_device
        self._locality = locality
        self._slack = slack
        self._prompts: dict[str, list[Request]] = {}
        for request in in_progress:
            self._prompts.setdefault(request.tenant_id, []).append(request)
        for prompts in self._prompts.values():
            prompts.sort(key=_order_key, reverse=True)
        self._running = [(tenants.counter(t), p[-1].arrival_number, t) for t, p in self._prompts.items()]
        heapify(self._running)
        # Heap of the waiting tenants, built on the first admission, and the rest of each one's queue.
        self._waiting: list[Turn] | None = None
        # The least served of them, in order, taken out of the heap: among these the request of best locality is chosen.
        self._compared: list[Turn] = []
        self._num_compared = COMPARED if locality is not None and slack else 1
        self._queues: dict[str, list[Request]] = {}
        # Number of requests returned by `next` whose adapter is off the device.
        self._num_off_device: Counter[str] = Counter()
        self._total_off_device = 0
        # Tenants whose queues contain only requests for adapters on the device, and the order key of each tenant's last
        # returned request.
        self._on_device_only: set[str] = set()
        self._last_order_key: dict[str, tuple[int, float, int]] = {}
        self._keys: dict[Request, tuple[bool, bool]] = {}
        self._last: str | None = None

    def next(self, *, admits: bool) -> Request | None:
        if admits and self._waiting is None:
            self._waiting = [
                (a.counter, a.queue[0].arrival_number, t)
                for t, a in self._tenants.waiting.items()
                if t not in self._prompts
            ]
            heapify(self._waiting)
        self._put_last_back()
        if admits:
            self._compare_least_served()
        if self._running and not (admits and self._compared and self._compared[0] < self._running[0]):
            self._last = heappop(self._running)[2]
            return self._prompts[self._last].pop()
        if not admits or not self._compared:
            return None
        self._last = self._take_most_local()
        request = self._queues[self._last].pop()
        self._last_order_key[self._last] = request.order_key
        if self._locality is not None and self._locality.lacks_adapter(request):
            self._num_off_device[self._last] += 1
            self._total_off_device += 1
            if self._total_off_device == self._most_off_device:
                self._drop_off_device_tenants(self._locality)
        return request

    def pass_over(self) -> None:
        self._last = None

    def _drop_off_device_tenants(self, locality: Locality) -> None:
        """Remove the tenants from the heap that wait only for adapters off the device."""
        tenants_of = self._tenants.waiting_for
        ready = set().union(*(tenants_of[adapter] for adapter in locality.on_device_among(tenants_of.keys())))
        self._waiting = [turn for turn in (*self._compared, *(self._waiting or ())) if turn[2] in ready]
        self._compared.clear()
        heapify(self._waiting)

    def _put_last_back(self) -> None:
        """Put the tenant of the last request back into its heap, by its present counter."""
        tenant_id, self._last = self._last, None
        if tenant_id is None:
            return
        prompts = self._prompts.get(tenant_id)
        if prompts:
            heappush(self._running, (self._tenants.counter(tenant_id), prompts[-1].arrival_number, tenant_id))
        elif self._waiting is not None and (queue := self._queue(tenant_id)):
            heappush(self._waiting, (self._tenants.counter(tenant_id), queue[-1].arrival_number, tenant_id))

    def _compare_least_served(self) -> None:
        """Move the least served tenants from the heap to `_compared`."""
        waiting, compared = self._waiting or [], self._compared
        while waiting and (len(compared) < self._num_compared or waiting[0] < compared[-1]):
            turn = heappop(waiting)
            if self._queue(turn[2]):  # else its requests have left during the step
                insort(compared, turn)
                if len(compared) > self._num_compared:
                    heappush(waiting, compared.pop())

    def _take_most_local(self) -> str:
        """Take the tenant whose first request has the best locality, among those within the slack of the least served;
        the least served of several with equal locality.
        """
        compared, locality = self._compared, self._locality
        if locality is None or len(compared) == 1:
            return compared.pop(0)[2]
        most = bisect_right(compared, compared[0][0] + self._slack, key=_counter)
        keys = [self._key(locality, self._queues[tenant_id][-1]) for _, _, tenant_id in compared[:most]]
        return compared.pop(keys.index(min(keys)))[2]

    def _key(self, locality: Locality, request: Request) -> tuple[bool, bool]:
        key = self._keys.get(request)
        if key is None:
            key = self._keys[request] = locality.key(request)
        return key

    def _queue(self, tenant_id: str) -> list[Request]:
        """Return the tenant's next waiting requests in reverse order; it may contain requests that have left."""
        queue = self._queues.get(tenant_id)
        if queue is None:
            account = self._tenants.waiting.get(tenant_id)
            queue = self._queues[tenant_id] = [] if account is None else account.queue[LOOKED_AT - 1 :: -1]
        if self._locality is None or tenant_id in self._on_device_only:
            return queue
        if self._num_off_device[tenant_id] >= OFF_DEVICE_LOOKED_AT or self._total_off_device >= self._most_off_device:
            self._on_device_only.add(tenant_id)
            queue = self._queues[tenant_id] = self._on_device_queue(tenant_id, self._locality)
        return queue

    def _on_device_queue(self, tenant_id: str, locality: Locality) -> list[Request]:
        """Return the tenant's next waiting requests for adapters on the device, in reverse order."""
        account = self._tenants.waiting.get(tenant_id)
        if account is None:
            return []
        last, found = self._last_order_key.get(tenant_id), list[Request]()
        for adapter in locality.on_device_among(account.by_adapter.keys()):
            requests = account.by_adapter[adapter]
            start = 0 if last is None else bisect_right(requests, last, key=_order_key)
            found += requests[start : start + LOOKED_AT]
        return sorted(found, key=_order_key)[LOOKED_AT - 1 :: -1]
