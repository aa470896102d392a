"""Load of a run: tenants, their sources of requests, and the plan of the requests, all from one seed.

A plan is a function of the load alone: two runs of one seed send the same requests at the same planned times. Each
source has random streams of its own, so that a tenant's requests do not depend on the other tenants.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from loraplex.bench.arrivals import LONGEST, Arrival, Closed, Trace
from loraplex.bench.sampling import Length, Popularity
from loraplex.bench.trace import Row

_TEXT = (
    "market harbour engine letter winter garden signal copper answer village paper silver question mountain evening "
    "record bridge kitchen station science painter island teacher window theory ladder journey"
)
WORDS = _TEXT.split()
MAX_PLANNED = 1_000_000
# Planned requests of an endless closed loop that enter the plan's hash.
HASHED = 1000
Api = Literal["completions", "chat"]


class LoadError(Exception):
    """A load that cannot be sent."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the tenant that requests it. The key stays out of `repr`, logs and reports."""

    tenant: str
    api_key: str | None = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in seconds; None: no target."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None

    @property
    def exists(self) -> bool:
        return (self.ttft, self.tpot, self.latency) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0
    slo: Slo = Slo()


@dataclass(frozen=True, slots=True)
class Source:
    """A stream of requests to some targets.

    start, stop: seconds of its first and last possible arrival, from the run's start; stop None: the run's end.
    requests: limit of their number. rows: the requests of a trace, which replace the distributions.
    """

    name: str
    targets: tuple[Target, ...]
    arrival: Arrival
    popularity: Popularity
    input: Length
    output: Length
    start: float = 0.0
    stop: float | None = None
    requests: int | None = None
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the plan.

    at: seconds from the run's start; None in a closed loop. number: its place in the source.
    """

    source: str
    number: int
    at: float | None
    target: Target
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """Everything that a run sends.

    seconds: end of the arrivals; None: the sources end by themselves. warmup: requests before the run, for each source.
    timeout: seconds for one request. drain: seconds from the arrivals' end until requests in flight are cut; None: they
    are awaited. input_weight, output_weight: service of a prompt's and of an answer's token.
    window: seconds over which service is compared; None: a quarter of the run, at most 60. round: number of the
    repetition, which changes the prompts' words and nothing else.
    """

    tenants: tuple[Tenant, ...]
    sources: tuple[Source, ...]
    seed: int = 0
    seconds: float | None = None
    warmup: int = 0
    timeout: float = 600.0
    api: Api = "completions"
    ignore_eos: bool = True
    input_weight: float = 1.0
    output_weight: float = 2.0
    window: float | None = None
    round: int = 0
    drain: float | None = None

    @property
    def longest(self) -> float | None:
        """Return the maximum duration of the run in seconds; None: no limit."""
        return None if self.seconds is None or self.drain is None else self.seconds + self.drain

    def without(self, names: Sequence[str]) -> "Load":
        """Return the load without some tenants."""
        return replace(
            self,
            tenants=tuple(tenant for tenant in self.tenants if tenant.name not in names),
            sources=tuple(source for source in self.sources if source.name not in names),
        )

    def plan(self, source: Source) -> Iterator[PlannedRequest]:
        """Yield a source's requests in the order of their times; endless for a closed loop without a limit."""
        every = self._replayed(source) if isinstance(source.arrival, Trace) else self._drawn(source)
        yield from itertools.islice(every, source.requests)

    def _drawn(self, source: Source) -> Iterator[PlannedRequest]:
        models, lengths = (Random(f"{self.seed}:{source.name}:{use}") for use in ("models", "lengths"))
        cumulated = list(itertools.accumulate(source.popularity.weights(len(source.targets))))
        for number, at in enumerate(self._times(source)):
            [target] = models.choices(source.targets, cum_weights=cumulated)
            yield PlannedRequest(
                source.name, number, at, target, source.input.draw(lengths), source.output.draw(lengths)
            )

    def _times(self, source: Source) -> Iterator[float | None]:
        if isinstance(source.arrival, Closed):
            yield from itertools.repeat(None)
        assert not isinstance(source.arrival, Closed | Trace)
        end = self._end(source)
        for offset in source.arrival.times(Random(f"{self.seed}:{source.name}:arrivals")):
            if end is not None and source.start + offset >= end:
                return
            yield source.start + offset

    def _replayed(self, source: Source) -> Iterator[PlannedRequest]:
        assert isinstance(source.arrival, Trace)
        models = Random(f"{self.seed}:{source.name}:models")
        cumulated = list(itertools.accumulate(source.popularity.weights(len(source.targets))))
        named = {target.model: target for target in source.targets}
        end = self._end(source)
        for number, row in enumerate(source.rows):
            at = source.start + row.timestamp / source.arrival.speed
            if end is not None and at >= end:
                return
            target = named[row.adapter] if row.adapter else models.choices(source.targets, cum_weights=cumulated)[0]
            yield PlannedRequest(source.name, number, at, target, row.input, row.output)

    def _end(self, source: Source) -> float | None:
        return min((end for end in (self.seconds, source.stop) if end is not None), default=None)

    def prompt(self, planned: PlannedRequest) -> str:
        """Return the request's prompt: a word for each token. Prompts share no prefix."""
        random = Random(f"{self.seed}:{self.round}:{planned.source}:{planned.number}")
        return " ".join(random.choices(WORDS, k=planned.input_tokens))

    def plan_hash(self) -> str:
        """Return the SHA-256 of the planned requests; of an endless closed loop, its first thousand count.

        A comparison compares the other conditions of a run by name: weights, targets, time-outs and the like.
        """
        # The seed stands for the prompts' words.
        lines = itertools.chain([f"{self.seed} {self.seconds} {self.api}\n"], *map(self._hashed_lines, self.sources))
        hashed = hashlib.sha256()
        for line in lines:
            # A name of a JSON file may have a lone surrogate, which UTF-8 cannot encode.
            hashed.update(line.encode(errors="backslashreplace"))
        return hashed.hexdigest()

    def _hashed_lines(self, source: Source) -> Iterator[str]:
        yield f"{source.name} {source.arrival}\n"
        for p in itertools.islice(self.plan(source), HASHED if is_endless(source) else None):
            yield f"{p.target.tenant} {p.at} {p.target.model} {p.input_tokens} {p.output_tokens}\n"

    def rows(self) -> list[Row]:
        """Return the plan of the open-loop sources as rows of a trace, in the order of their times."""
        rows = [
            Row(0, planned.at, source.name, planned.target.model, planned.input_tokens, planned.output_tokens)
            for source in self.sources
            for planned in (() if isinstance(source.arrival, Closed) else self.plan(source))
            if planned.at is not None
        ]
        return sorted(rows, key=lambda row: row.timestamp)

    def check_size(self, source: Source) -> None:
        """Raise LoadError if a source's plan is empty, has more than a million requests or is longer than a week."""
        if not is_endless(source):
            # Only the times are needed, and they take a tenth of the whole plan's time.
            is_trace = isinstance(source.arrival, Trace)
            times = (request.at for request in self._replayed(source)) if is_trace else self._times(source)
            most = MAX_PLANNED + 1 if source.requests is None else min(source.requests, MAX_PLANNED + 1)
            planned = list(itertools.islice(times, most))
            if not 0 < len(planned) <= MAX_PLANNED:
                much = "no request" if not planned else f"more than {MAX_PLANNED} requests"
                raise LoadError(f"gives {much} until the end; expected 1 to {MAX_PLANNED}")
            last = planned[-1]
            if last is not None and last > LONGEST:
                raise LoadError(f"has its last request in second {last:g}; expected at most {LONGEST}")


def is_endless(source: Source) -> bool:
    """Return whether only the run's end limits the source's plan."""
    return isinstance(source.arrival, Closed) and source.requests is None
