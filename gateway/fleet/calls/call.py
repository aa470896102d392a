"""Request to an engine of any kind, and the errors of its attempts."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.errors import BadRequest, GatewayError, RankNotServed, Unavailable, UpstreamFailed
from wire.telemetry.spans import NO_SPAN, Span

if TYPE_CHECKING:
    # Imported for type checking only: settings import the engine kinds, and these modules import settings.
    from gateway.fleet.engines.engine import EngineRecord
    from gateway.fleet.engines.own_requests import NamedBody
    from gateway.quota.growing_hold import Hold
    from gateway.records.adapters.catalog import Model
    from gateway.records.tenants.tenants import Tenant


class EngineGone(Exception):
    """The engine could not be reached, or closed the connection before it answered. Another engine may be tried.

    may_have_read: whether the engine may have read the request, so that the request may have made the engine die.
    reason: why the engine counts as down; None if it does not.
    """

    def __init__(self, may_have_read: bool, reason: str | None = None) -> None:
        super().__init__(may_have_read)
        self.may_have_read = may_have_read
        self.reason = reason


class EngineRefused(Exception):
    """No engine began to answer.

    error: for the client. status: the last engine's response status, None without a response. broken: whether the
    engine failed independently of the request. unsupported: whether engines of this kind do not support such requests,
    so that it was not sent.
    """

    def __init__(
        self, error: GatewayError, status: int | None = None, *, broken: bool = False, unsupported: bool = False
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status
        self.broken = broken
        self.unsupported = unsupported

    @property
    def may_still_run(self) -> bool:
        """Return whether the engine may still be working on the request, because it gave no answer in time."""
        return self.status is None

    @property
    def may_have_computed(self) -> bool:
        """Return whether an engine to which the request was posted may have computed tokens of it: the engine failed,
        or gave no answer in time.
        """
        return isinstance(self.error, UpstreamFailed) and (self.status is None or self.status >= 500)

    @property
    def failed(self) -> bool:
        """Return whether the response is the engine's own fault: a redirect, or a 5xx not about load or an adapter."""
        if self.status is None or isinstance(self.error, Unavailable | BadRequest):
            return False
        return self.status >= 500 or 300 <= self.status < 400

    @property
    def may_succeed_elsewhere(self) -> bool:
        """Return whether another engine may serve the request: this one failed, lacks the adapter or has no room
        for its rank, or is of a kind that does not support such requests.
        """
        return self.unsupported or isinstance(self.error, RankNotServed | UpstreamFailed | Unavailable)


class EngineWithdrew(EngineRefused):
    """The engine takes no requests at present, for example because it drains. It counts as absent."""

    reason = "it refused a request, because it accepts none at present"


def _ignore(*_: object) -> None:
    pass


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Request to an engine of any kind. body: in OpenAI's form; the kind replaces its model.

    named: the body by which the quarantine names the request.
    prompt_tokens: tokens of all prompts.
    arrived: time at which this gateway began to read it, in seconds of `time.monotonic`.
    sequences: number of choices of all prompts.
    span: the parent of the engine's spans.
    trace: the W3C headers that carry the span.
    hold: the tokens that may be generated for now.
    on_progress: called with the completion tokens so far of a whole answer.
    on_sent: called before the first byte goes to an engine, or before a load of the adapter is sent.
    on_posted: called with True before the first byte of the request itself goes to an engine, and with False once the
        engine has refused it because it lacks the adapter.
    engine: the only engine that may serve it; None for any.
    """

    request_id: str
    path: str
    body: dict[str, Any]
    named: "NamedBody"
    model: "Model"
    tenant: "Tenant"
    prompt_tokens: int
    arrived: float
    sequences: int = 1
    span: Span = NO_SPAN
    trace: dict[str, str] = {}
    hold: "Hold | None" = None
    on_progress: Callable[[int], None] = _ignore
    on_sent: Callable[[], None] = _ignore
    on_posted: Callable[[bool], None] = _ignore
    engine: "EngineRecord | None" = None

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))
