"""State of a request's attempts on engines in turn: what they have shown, and which engines are left for it."""

from dataclasses import dataclass, field

from gateway.fleet.calls.call import Call, EngineRefused
from gateway.fleet.engines.engine import EngineRecord

# After this many deaths and failures of engines, a request gets no further engine, because it may be the cause. If
# another tenant's request may be the cause, the request gets one more engine, apart from that tenant. If another
# tenant's request is known to be the cause, the request may get every engine that is left.
MAX_FAILURES = 2


@dataclass(slots=True)
class RetryState:
    """State of one request's attempts.

    prefix: key of its conversation. engines: those tried, in order. refusal: the last engine's. refusing: engines that
    refused it for good. unsupported_on: the engine kinds that do not support such requests. died: number of engines
    that died with the request. failed: number of engines that failed it otherwise. was_suspected: whether any attempt
    found it suspected; is_apart: whether the last one did. passes: as in `Place`.
    """

    prefix: bytes
    engines: list[EngineRecord] = field(default_factory=list)
    refusal: EngineRefused | None = None
    refusing: list[EngineRecord] = field(default_factory=list)
    unsupported_on: set[str] = field(default_factory=set)
    died: int = 0
    failed: int = 0
    was_suspected: bool = False
    is_apart: bool = False
    passes: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Return whether the request may be the cause of the failures, so that no further engine gets it."""
        return self.died + self.failed >= MAX_FAILURES

    def may_serve(self, call: Call, engine: EngineRecord) -> bool:
        """Return whether the engine, available or not, may serve the request, as far as the attempts have shown."""
        return (
            call.engine in (None, engine)
            and engine not in self.refusing
            and engine.address.traits.name not in self.unsupported_on
            and engine.takes(call.model)
            and call.sequences <= engine.max_sequences
        )

    def allow(self, call: Call, engine: EngineRecord) -> bool:
        """Return whether the engine may get the request next."""
        is_untried = engine not in self.engines
        return is_untried and engine.breaker.allows(call.tenant.id) and self.may_serve(call, engine)
