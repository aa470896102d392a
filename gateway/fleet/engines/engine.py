"""Record of an engine in a gateway process: address, kind, reported state, health and load."""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gateway.fleet.engines.breaker import Breakers
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.engines.own_requests import InFlight, OwnRequests, Prefetched
from gateway.fleet.engines.traits import LORAPLEX, Traits
from gateway.records.bases.base import FIRST, Binding, EngineSoftware
from gateway.usage_row import printable
from wire.digests import bare_digest
from wire.responses import Preempted, StepSecond, TenantFairShare

if TYPE_CHECKING:
    from gateway.records.adapters.catalog import Model

log = logging.getLogger(__name__)

AdapterTier = Literal["device", "host", "none"]

# Assumed until an engine reports its own number.
DEFAULT_SLOTS = 32
MISMATCH = "it answered with another adapter than the request's; restart it and report its log"
DEFAULT_LOAD_SECONDS = 0.05
# Minimum, because an engine measures its loads only into host memory, without the copy to the device.
MIN_LOAD_SECONDS = 0.02
# Characters of a release or a base digest that are kept on record.
MAX_VERSION_CHARS = 64
# Levels of the log lines about engines that get no requests.
LEVELS = {Health.MISCONFIGURED: logging.ERROR, Health.ASLEEP: logging.INFO}


@dataclass(frozen=True, slots=True)
class Address:
    """Address of one item of `LORAPLEX_ENGINES`.

    url: `http(s)://host:port`, or `dns://name:port`, which stands for an engine at each address of the name. wake: URL
    of the supervisor that stops and starts an engine of ours; None: it never sleeps. The other fields are for foreign
    servers, which do not report them. adapters: maximum adapters kept loaded; 0: it gets base-model requests only.
    requests: maximum sequences in flight. max_rank: largest rank of an adapter; 0: unknown until it refuses one.
    key: its API key. any_version: whether releases that are known to mix up tenants or adapters are used too.
    prefill: URL of the server that computes prompts for this one; None: this one does.
    """

    url: str
    traits: Traits = LORAPLEX
    adapters: int = 64
    requests: int = 64
    key: str | None = field(default=None, repr=False)
    any_version: bool = False
    prefill: str | None = None
    wake: str | None = None
    max_rank: int = 0

    @property
    def bearer(self) -> dict[str, str]:
        """Return the header with a foreign server's own key, never with the internal token."""
        return {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}


class EngineState(msgspec.Struct, kw_only=True):
    """State that an engine reports, in the form of `GET /state` (`EngineStateResponse`). Missing fields are unknown.

    version: release of the engine. adapters_host: adapters in its host memory; None if unchanged.
    finds_adapters: whether a foreign server loads an adapter by itself when a request names its digest. no_base_reason:
    None, or the reason, for operators, why the engine gets no base-model requests: it may give them an adapter's
    weights. reported: the report as sent, without `adapters_host`, for operators.
    """

    instance: str | None = None
    revision: int = 0
    readings: int | None = None
    model: str | None = None
    max_model_len: int = 0
    adapters_resident: list[str] = []
    adapters_activated: frozenset[str] = frozenset()
    adapters_host: list[str] | None = None
    adapter_pages_total: int = 0
    adapter_pages_free: int = 0
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 0
    max_lora_rank: int = 0
    max_adapter_bytes: int = 0
    adapter_load_seconds: float = 0.0
    draining: bool = False
    keeps_allowances: bool = False
    probes: bool = False
    version: str | None = None
    base_digest: str | None = None
    finds_adapters: bool = False
    no_base_reason: str | None = None
    tenants: list[TenantFairShare] = []
    preempted: list[Preempted] = []
    recent_steps: list[StepSecond] = []
    reported: dict[str, Any] = {}


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Drain of an engine by an operator. by: id of the operator's key."""

    by: str
    at: datetime


@dataclass(slots=True, eq=False, weakref_slot=True)
class EngineRecord:
    """An engine as this gateway process sees it.

    requests: this process's requests there.
    resident: digests (no prefix) of the adapters that it holds.
    host: adapters in its host memory, for operators only.
    other_processes_load: number of other gateways' sequences.
    last_other_processes_load: the same when a DOWN engine was last up.
    slots: number of sequences that it runs at once.
    load_seconds: time to load an adapter.
    prefetched: adapters in its host memory by hints.
    request_seconds: time of a request.
    state: its last report.
    observed_at: time of its last report that differed from the one before (monotonic).
    read_at: time of its last report, or of this record's start.
    mismatched: the instance that answered with another adapter than the request's.
    drained: an operator's drain, whatever its health.
    is_listed: whether discovery lists it.
    is_ending: whether its instance is being stopped on purpose.
    base: id of its base model; None if it is not on record.
    died_at: time of its last death that this process saw.
    may_die: whether its present instance served requests and has not died.
    on_end: called when its instance has died.
    on_death: called with the reason when an instance that served requests has died, before another one reports.
    on_mismatch: called with the instance of each answer with another adapter than the request's.
    """

    address: Address
    condition: Condition = field(default_factory=Condition)
    requests: OwnRequests = field(default_factory=OwnRequests)
    resident: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()
    other_processes_load: int = 0
    last_other_processes_load: int = 0
    slots: int = DEFAULT_SLOTS
    load_seconds: float = DEFAULT_LOAD_SECONDS
    prefetched: Prefetched = field(default_factory=Prefetched)
    request_seconds: float = 1.0
    state: EngineState = field(default_factory=EngineState)
    observed_at: float = 0.0
    read_at: float = field(default_factory=time.monotonic)
    mismatched: str | None = None
    breaker: Breakers = field(default_factory=Breakers)
    drained: Drained | None = None
    is_listed: bool = True
    is_ending: bool = False
    base: str | None = FIRST
    died_at: datetime | None = None
    may_die: bool = False
    on_end: "Callable[[EngineRecord], None]" = lambda _: None
    on_death: "Callable[[EngineRecord, str], None]" = lambda record, reason: None
    on_mismatch: "Callable[[EngineRecord, str | None], None]" = lambda record, instance: None

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def load(self) -> int:
        """Return the number of sequences on this engine, including the known ones of other gateways."""
        return self.requests.sequences + self.other_processes_load

    @property
    def max_in_flight(self) -> int:
        """Return the maximum number of sequences in flight on the engine."""
        return self.address.traits.batches_in_flight * self.slots

    @property
    def max_sequences(self) -> float:
        """Return the maximum number of a request's sequences: half of those that run at once, so that no request takes
        them all. It is infinite for an engine that orders tenants itself, and unknown before the first report.
        """
        is_bounded = self.state.max_num_seqs and not self.address.traits.orders_tenants
        return max(1, self.max_in_flight // 2) if is_bounded else math.inf

    def fullness(self, sequences: int = 1) -> int:
        """Return 0 if there is a place for each of a request's sequences. If not, return 1 for an engine that queues
        further requests, else 2.
        """
        if self.load + sequences <= self.max_in_flight:
            return 0
        return 1 if self.address.traits.orders_tenants else 2

    @property
    def keeps_allowances(self) -> bool:
        """Return whether the engine stays within a request's allowance and reports whole answers that need more."""
        return self.state.keeps_allowances

    @property
    def is_up(self) -> bool:
        return self.condition.health is Health.UP

    @property
    def available(self) -> bool:
        return self.is_up and self.is_listed and self.drained is None and self.breaker.allows_some

    @property
    def fault(self) -> str | None:
        """Return the reason why the engine gets no requests, or no base-model requests; None if it gets all."""
        if not self.is_up:
            return f"{self.condition.health}: {self.condition.reason}"
        if self.drained is not None:
            return "drained: an operator drained it; `loraplex engine resume` sends requests again"
        if not self.breaker.allows_some:
            return "up, but its requests fail: its circuit breaker is open"
        return f"up, for adapters only: {self.state.no_base_reason}" if self.state.no_base_reason else None

    def is_present(self, instance: str | None) -> bool:
        """Return whether `instance` is the one that reported last. None (unknown) counts as it."""
        return instance in (None, self.state.instance)

    @property
    def software(self) -> EngineSoftware:
        """Return the software whose change may change answers, in a form that the database takes."""
        state = self.state
        return EngineSoftware(
            kind=self.address.traits.name,
            version=printable(state.version or "", MAX_VERSION_CHARS),
            base_digest=printable(state.base_digest or "", MAX_VERSION_CHARS),
        )

    def serves(self, binding: Binding) -> bool:
        """Return whether a model with this binding may run here. An engine without a digest is trusted."""
        own = self.state.base_digest
        return self.base == binding.base and (own is None or all(digest == own for digest in binding.digests))

    @property
    def takes_adapters(self) -> bool:
        """Return whether requests for adapters may run here."""
        return self.address.adapters > 0

    def takes(self, model: "Model") -> bool:
        """Return whether a model's requests may run here: as `serves`, and within the engine's limits to adapters."""
        if not self.serves(model.binding):
            return False
        return self.takes_adapters if model.adapters else not self.state.no_base_reason

    def serves_only(self, tenant_id: str) -> bool:
        """Return whether no other tenant has a request here, running or detached, as far as this process knows."""
        return not self.other_processes_load and self.requests.tenants <= {tenant_id}

    def holds(self, digest: str) -> bool:
        """Return whether the engine has the adapter, or loads it for a request of this process."""
        return digest in self.resident or self.requests.by_digest[digest] > 0

    def tier_of(self, digest: str) -> AdapterTier:
        """Return the memory that has an adapter: the device's, the host's, or none."""
        if digest in self.resident:
            return "device"
        return "host" if digest in self.host or self.prefetched.has(digest) else "none"

    @property
    def adapter_room(self) -> int | None:
        """Return about how many adapters fit on the device at once, by the size of those there; None if unknown."""
        if self.address.traits.has_own_secret:
            return self.address.adapters
        total, number = self.state.adapter_pages_total, len(self.state.adapters_resident)
        if not total:
            return None
        pages_each = max(1.0, (total - self.state.adapter_pages_free) / number) if number else 1.0
        return max(1, int(total / pages_each))

    def has_room_for(self, digest: str) -> bool:
        """Return whether the adapter fits on the device beside those of this process's requests."""
        room = self.adapter_room
        return room is None or self.holds(digest) or self.requests.num_adapters < room

    def observe_resident(self, digests: Iterable[str]) -> None:
        """Apply the list of adapters that the engine holds."""
        self.resident = frozenset(digests)
        self.requests.loading -= self.resident

    def observe_request(self, seconds: float) -> None:
        """Update the mean time of a request, weighted towards the most recent ones."""
        self.request_seconds += 0.1 * (seconds - self.request_seconds)

    def note_sent(self, in_flight: InFlight) -> None:
        """Note that bytes of a request go to the engine's present instance from now on."""
        in_flight.instance = self.state.instance
        in_flight.sent()

    def note_end(self) -> None:
        """Report the death of the engine's instance, unless it drained or slept, and forget its detached requests."""
        if not (self.state.draining or self.is_ending):
            self.on_end(self)
        self.requests.forget_detached()
        self.is_ending = False

    def note_death(self, reason: str) -> None:
        """Report the death of the instance that served requests, once, unless its end is intended."""
        if self.may_die and not (self.state.draining or self.is_ending or self.drained is not None):
            self.died_at = datetime.now(UTC)
            self.on_death(self, reason)
        self.may_die = False

    def observe_state(self, state: EngineState, own: int) -> None:
        """Apply the engine's state, unless a newer one is known. own: this process's sequences there at the query."""
        self.read_at = time.monotonic()
        if state.instance == self.state.instance and state.revision < self.state.revision:
            return
        if state.instance != self.state.instance:
            if self.state.instance is not None:
                # Else this is the first report of an engine whose health was known before its state.
                self.note_death("another instance answers")
            self.note_end()
        self.last_other_processes_load = 0
        if state.readings is None or state.readings != self.state.readings:
            # A state that repeats the last one shows that the core's step has not ended.
            self.observed_at = self.read_at
            self.requests.survived()
        if state.adapters_host is not None:
            self.host = frozenset(bare_digest(digest) for digest in state.adapters_host)
        elif state.instance != self.state.instance:
            self.host = frozenset()
        self.state = state
        self.observe_resident(bare_digest(digest) for digest in state.adapters_resident)
        self.other_processes_load = max(0, state.running + state.waiting - own)
        self.slots = state.max_num_seqs or self.slots
        if state.adapter_load_seconds > 0:
            self.load_seconds = max(state.adapter_load_seconds, MIN_LOAD_SECONDS)

    def mark_down(self, reason: str, health: Health = Health.DOWN) -> None:
        """Stop sending requests to the engine. health: DOWN, SILENT, DRAINING or ASLEEP."""
        self._change(health, reason)
        self.last_other_processes_load = self.other_processes_load or self.last_other_processes_load
        self.other_processes_load = 0

    def mark_gone(self, instance: str | None, reason: str) -> None:
        """Stop sending requests to the engine because of its instance, unless another one has reported since."""
        if self.is_present(instance):
            self.mark_down(reason)

    def mark_misconfigured(self, reason: str) -> None:
        """Stop sending requests to the engine until the operator has corrected the reason."""
        self._change(Health.MISCONFIGURED, reason)

    def mark_mismatched(self, instance: str | None) -> None:
        """Report an instance's answer with another adapter, and stop sending requests to it."""
        self.on_mismatch(self, instance)
        if self.is_present(instance):
            self.mismatched = str(self.state.instance)
            self.mark_misconfigured(MISMATCH)

    def mark_up(self) -> None:
        """Send requests to the engine, unless its present instance answered with another adapter than the request's."""
        if self.mismatched is not None and self.mismatched == str(self.state.instance):
            self.mark_misconfigured(MISMATCH)
            return
        self.mismatched = None
        if not self.is_up:
            # Earlier failures do not count against an engine that comes back.
            self.breaker = Breakers()
        self._change(Health.UP, "")
        self.may_die = True

    def note_missed_check(self, reason: str) -> None:
        """Count an unanswered health check."""
        if self.condition.miss(reason):
            self.mark_down(reason, Health.SILENT)

    def _change(self, health: Health, reason: str) -> None:
        """Set the health, and log a change of the health or its reason."""
        if self.condition.change(health, reason):
            if health is Health.UP:
                log.info("engine %s is up", self.url)
                if self.state.no_base_reason:
                    log.warning("engine %s gets no base-model requests: %s", self.url, self.state.no_base_reason)
            else:
                level = LEVELS.get(health, logging.WARNING)
                log.log(level, "engine %s is %s: %s", self.url, health, reason)
        if health in (Health.DRAINING, Health.ASLEEP):
            # Its end is intended, so it is no death. Its detached requests may be the cause of broken ones until then.
            self.is_ending = True
        if health is Health.UP:
            self.is_ending = False
        else:
            self.resident = self.host = frozenset()
            self.prefetched = Prefetched()
