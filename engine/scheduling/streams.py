"""Streams: the running requests that decode, whose counts are arrays by seat.

A step plans the next token of all streams at once. Only the requests that begin or stop decoding between two plans are
read one by one, so a step costs little for each of the others. The scheduler's loop over the running requests is
the twin of `Streams.plan`: both plan the same tokens and blocks. A tenant's service is equal up to rounding,
because the loop divides the cost of each request by the weight, and `Streams` divides the sum. The sums are exactly
equal if the weights are powers of two.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.scheduling.cost import CONTEXT_TOKENS, step_cost
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.policies.policy import Policy
from engine.scheduling.request import Request
from engine.scheduling.seats import Seats


class StreamRows(NamedTuple):
    """The streams of a plan, one token of each.

    requests: in the order in which they started. The next plan has the same list if all running requests are these and
    none has ended. seats: their seats, int64 `[n]`. ends: tokens of each whose keys and values are computed after the
    plan, int64 `[n]`. changed: those that were not in the plan before, or have a new block. number: the plan's number.
    """

    requests: list[Request]
    seats: np.ndarray
    ends: np.ndarray
    changed: list[Request]
    number: int


class Streams:
    """The streams of an engine. `Request` has the same counts."""

    def __init__(self, num_seats: int, seats: Seats, cache: KVCache, policy: Policy) -> None:
        self._seats, self._cache, self._policy = seats, cache, policy
        # Rows: computed tokens after the plan, tokens that fit into the blocks, output tokens left, index of the payer.
        # `_costs`: cost of the plan's token. Both are kept by seat, and in the order of the last plan.
        self._counts_by_seat = np.zeros((4, num_seats), np.int64)
        self._costs_by_seat = np.zeros(num_seats)
        self._counts, self._costs = self._counts_by_seat[:, :0], self._costs_by_seat[:0]
        # A request of each tenant and weight. Those of tenants without streams stay until there are too many.
        self._payers: list[Request] = []
        self._payer_of: dict[tuple[str, float], int] = {}
        self._most_payers = 2 * num_seats
        self._last: StreamRows | None = None
        self._ending: list[Request] = []  # streams that reach `max_tokens` with the last plan
        self._num_moves = 0  # of the seats, after the last plan
        self._is_launched = False
        self._number = 0
        self._planned: list[Request] = []  # streams of the last plan, if their service can be returned
        self._planned_costs: dict[Request, float] | None = None

    def plan(self, most: int) -> tuple[StreamRows, list[Request]] | None:
        """Plan the next token of each stream: allocate its blocks, add its service to its tenant. Return the streams,
        and the running requests whose prompts are in progress. Return None, without effect, if too few blocks are free
        or more than `most` requests are running.
        """
        last = self._take_last()
        running, cache = self._seats.running, self._cache
        if len(running) > most:
            return None
        if last is not None and self._are_all_running(last) and not self._ending:
            requests, seats, joined, prompts = last.requests, last.seats, list[Request](), list[Request]()
        else:
            if last is not None:
                self._counts_by_seat[:, last.seats], self._costs_by_seat[last.seats] = self._counts, self._costs
            stay = set() if last is None else set(last.requests).difference(self._ending)
            joined, prompts = self._read([request for request in running if request not in stay])
            stay.update(joined)
            requests = [request for request in running if request in stay]
            seats = np.array([request.seat for request in requests], np.int64)
            self._counts, self._costs = self._counts_by_seat[:, seats], self._costs_by_seat[seats]
        ends, room, left, payers = self._counts
        ends += 1
        short = (ends > room).nonzero()[0]
        if len(short) > cache.num_free:
            return None
        grown = [requests[i] for i in short.tolist()]
        for request, end in zip(grown, ends[short].tolist(), strict=True):
            cache.grow(request, end)
        room[short] += cache.block_size
        left -= 1
        self._ending = [requests[i] for i in (left == 0).nonzero()[0].tolist()]
        self._add_service(payers)
        self._planned, self._planned_costs = requests, None
        self._number += 1
        return StreamRows(requests, seats, ends.copy(), joined + grown, self._number), prompts

    def take_cost(self, request: Request) -> float:
        """Return the cost of a request's token in a plan that was not launched, once; 0.0 if there is none."""
        if self._planned_costs is None:
            self._planned_costs = dict(zip(self._planned, self._costs.tolist(), strict=True)) if self._planned else {}
        return self._planned_costs.pop(request, 0.0)

    def keep(self, rows: StreamRows | None) -> None:
        """Record the streams of a complete plan; None if it differs from that of `plan`: requests were left out or
        preempted, or have drafts.
        """
        self._last, self._num_moves = rows, self._seats.num_moves

    def record_launch(self, rows: StreamRows | None) -> None:
        """Record that the step of a plan was launched, and samples a token for each stream that keeps its seat.

        Otherwise the next plan reads the counts of all requests again.
        """
        self._is_launched = rows is not None and rows is self._last
        self._planned, self._planned_costs = [], None

    def _take_last(self) -> StreamRows | None:
        """Return the streams of the last plan, if their counts are known."""
        last = self._last if self._is_launched else None
        self._last, self._is_launched = None, False
        self._planned, self._planned_costs = [], None
        if last is None or len(self._payers) > self._most_payers:
            self._payers.clear()
            self._payer_of.clear()
            self._ending = []
            return None
        return last

    def _are_all_running(self, last: StreamRows) -> bool:
        """Return whether the streams of the last plan are all running requests."""
        return self._num_moves == self._seats.num_moves and len(last.requests) == len(self._seats.running)

    def _read(self, requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
        """Read the counts of requests that decode. Return these, and the requests whose prompts are in progress. A
        request whose last token is in flight is neither.
        """
        streams, prompts, block_size = list[Request](), list[Request](), self._cache.block_size
        for request in requests:
            if not request.is_decoding:
                prompts.append(request)
            elif (left := request.params.max_tokens - request.num_output_tokens) > 0:
                payer = self._payer_of.setdefault((request.tenant_id, request.weight), len(self._payers))
                if payer == len(self._payers):
                    self._payers.append(request)
                self._payers[payer] = request
                self._counts_by_seat[:, request.seat] = (
                    request.num_computed,
                    len(request.blocks) * block_size,
                    left,
                    payer,
                )
                self._costs_by_seat[request.seat] = step_cost(request, 1) - 1 / CONTEXT_TOKENS
                streams.append(request)
        return streams, prompts

    def _add_service(self, payers: np.ndarray) -> None:
        """Add the service of each stream's next token to its tenant."""
        self._costs += 1 / CONTEXT_TOKENS
        sums = np.bincount(payers, self._costs)
        for payer in sums.nonzero()[0].tolist():
            self._policy.add_service(self._payers[payer], float(sums[payer]))
