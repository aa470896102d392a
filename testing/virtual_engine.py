"""The real engine on a simulated device in virtual time: minutes of serving take seconds and are always the same."""

import heapq
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.core.step_thread import MIN_SPARE_S, SPARE_POLL_S
from engine.scheduling.request import NewRequest, SamplingParams
from testing.tiny_engines import Make

# Virtual seconds of the host's work for each step, and between an answer's end and the next request of a closed loop.
HOST_S, THINK_S = 0.001, 0.005


@dataclass
class VirtualClock:
    """Clock that stands still between the calls of `sleep` and `sleep_until`."""

    seconds: float = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += max(0.0, seconds)

    def sleep_until(self, seconds: float) -> None:
        self.seconds = max(self.seconds, seconds)


@dataclass(frozen=True, order=True)
class Arrival:
    """A request that arrives. is_closed: whether another one follows at its end."""

    at: float
    number: int
    tenant: str = field(compare=False)
    prompt: int = field(compare=False)
    max_tokens: int = field(compare=False)
    is_closed: bool = field(compare=False)


class VirtualEngine:
    """An engine that is stepped as `StepThread` steps it. Times are seconds since the start.

    sampling: further fields of `SamplingParams` of all later arrivals. waits: arrivals and times to first token of each
    tenant's answered requests. service: prompt tokens plus twice the output tokens of each tenant. num_steps: steps so
    far.
    """

    def __init__(self, make_engine: Make, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        """options: fields of `EngineConfig`."""
        clock = self._clock = VirtualClock()
        for name, function in (("perf_counter", clock.now), ("monotonic", clock.now), ("sleep", clock.sleep)):
            monkeypatch.setattr(time, name, function)
        self._engine, _ = make_engine(**options)
        monkeypatch.setattr(self._engine.scheduler, "_clock", clock.now)
        self._rng = random.Random(1)
        self._due: list[Arrival] = []
        self._asked: dict[str, Arrival] = {}
        self._number = 0
        self.waits: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self.service: defaultdict[str, int] = defaultdict(int)
        self.num_steps = 0
        self.sampling: dict[str, Any] = {}

    @property
    def now(self) -> float:
        return self._clock.seconds

    def arrive(self, at: float, tenant: str, prompt: int, max_tokens: int, *, is_closed: bool = False) -> None:
        """Let a request of a tenant arrive. prompt: its tokens."""
        self._number += 1
        heapq.heappush(self._due, Arrival(at, self._number, tenant, prompt, max_tokens, is_closed))

    def arrive_randomly(self, until: float, rate: float, tenant: str, prompt: int, max_tokens: int) -> None:
        """Let a tenant's requests arrive as a Poisson process of `rate` a second."""
        at = self.now
        while (at := at + self._rng.expovariate(rate)) < until:
            self.arrive(at, tenant, prompt, max_tokens)

    def run(self, until: float) -> None:
        """Serve until then."""
        engine, clock = self._engine, self._clock
        while self.now < until:
            self._add_arrived()
            spare = engine.spare_seconds
            if not engine.has_work():
                clock.sleep_until(self._due[0].at if self._due else until)
            elif spare > MIN_SPARE_S:
                clock.sleep_until(
                    min([self.now + min(spare, SPARE_POLL_S), *(arrival.at for arrival in self._due[:1])])
                )
            else:
                self._step()

    def _add_arrived(self) -> None:
        while self._due and self._due[0].at <= self.now:
            arrival = heapq.heappop(self._due)
            request_id = f"{arrival.tenant}-{arrival.number}"
            self._asked[request_id] = arrival
            tokens = [self._rng.randrange(3, 380) for _ in range(arrival.prompt)]
            params = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True, **self.sampling)
            self._engine.add_request(NewRequest(request_id, tokens, params, tenant_id=arrival.tenant))

    def _step(self) -> None:
        self._clock.sleep(HOST_S)
        outputs = self._engine.step()
        self.num_steps += 1
        for output in outputs:
            assert output.error is None
            arrival = self._asked[output.request_id]
            if output.num_output_tokens == len(output.token_ids) > 0:
                self.waits[arrival.tenant].append((arrival.at, self.now - arrival.at))
                self.service[arrival.tenant] += arrival.prompt
            self.service[arrival.tenant] += 2 * len(output.token_ids)
            if output.finish_reason and arrival.is_closed:
                self.arrive(self.now + THINK_S, arrival.tenant, arrival.prompt, arrival.max_tokens, is_closed=True)
