"""Service of one request, for its tenant's counter and for the reports of service to engines.

An admitted request is expected to cost its whole prompt, because the next admission depends on it (VTC, algorithm 2).
The engines' reports then replace this estimate by what they have computed: cached tokens cost nothing, as in the
engine's own cost model (`engine/scheduling/cost.py`). The tenant and the engines are charged the same amounts.

| an attempt on an engine                           | prompt                     | generated tokens |
|---------------------------------------------------|----------------------------|------------------|
| answered, or cut off after its first report       | without cached tokens      | as reported      |
| cut off before it, timed out, failed (5xx) or died | whole: it may be computed | as reported      |
| refused, or ended before the request was posted   | none                       | none             |

A load of the request's adapter that fails, or whose client leaves, ends the attempt before the request is posted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gateway.fleet.calls.call import EngineGone, EngineRefused
from gateway.fleet.queueing.service_counters import ServiceCounters
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN

Charge = Callable[[float], None]
"""Adds service in cost units."""


class Reported(NamedTuple):
    """Tokens that the engine of the present attempt has computed, by its reports.

    prompt: without the cached ones; None: the engine has not said yet how many are cached. is_final: whether `prompt`
    can no longer fall: another sequence of the request may begin with cached tokens.
    """

    prompt: int | None = None
    completion: int = 0
    is_final: bool = True


class ServiceMeter:
    """The charges of one request: admit, attempts in turn, end.

    prompt_tokens: the sum of all prompts, cached or not. reported: returns the present attempt's counts.
    """

    def __init__(self, prompt_tokens: int, reported: Callable[[], Reported] = Reported) -> None:
        self._prompt = prompt_tokens * PROMPT_TOKEN
        self._reported = reported
        # Set by `admit`: the counters, and the tenant that is charged.
        self._counters: ServiceCounters
        self._tenant_id = ""
        # Charges the present attempt's engine; None between attempts.
        self._charge_engine: Charge | None = None
        # The part of the estimate that stands, and the charges of the present attempt.
        self._expected = self._charged = 0.0
        # Whether the present attempt's engine may have the request itself, not only a load of its adapter.
        self._is_posted = False

    def admit(self, counters: ServiceCounters, tenant_id: str) -> None:
        """Count the whole prompt as expected service. counters: those of the tenant, which pays."""
        self._counters, self._tenant_id = counters, tenant_id
        self._expect(self._prompt)

    @contextmanager
    def attempt(self, charge: Charge) -> Iterator[None]:
        """Begin an attempt. It ends with the block if no answer begins, else with the request.

        charge: adds service that the attempt's engine has given.
        """
        self._charge_engine, self._charged, self._is_posted = charge, 0.0, False
        try:
            yield
        except EngineGone:
            self._end_attempt(may_have_computed=True)
            raise
        except EngineRefused as error:
            self._end_attempt(may_have_computed=error.may_have_computed)
            raise

    def note_posted(self, is_posted: bool) -> None:
        """Note whether the present attempt's engine may have the request itself: see `Call.on_posted`."""
        self._is_posted = is_posted

    def update(self) -> None:
        """Charge what the engine has reported since the last call."""
        if self._charge_engine is not None:
            prompt, completion, is_final = self._reported()
            if prompt is not None and is_final:
                self._charge(_cost(prompt, completion))
                self._expect(0.0)
            else:
                self._charge(_cost(0, completion))

    def end(self) -> None:
        """End the request: its tenant has paid for what the engines computed, and for nothing else."""
        if self._charge_engine is not None:
            self._end_attempt(may_have_computed=True)
        self._expect(0.0)

    def _end_attempt(self, *, may_have_computed: bool) -> None:
        prompt, completion, _ = self._reported()
        if prompt is not None:
            self._charge(_cost(prompt, completion))
        # An engine that has generated tokens has computed the prompt.
        elif (may_have_computed and self._is_posted) or completion:
            self._charge(self._prompt + _cost(0, completion))
        self._charge_engine = None

    def _charge(self, cost: float) -> None:
        """Raise the charges of the present attempt to `cost`. A charge is never taken back: an idle tenant's counter
        may have been raised over it, so a refund would be a credit.
        """
        assert self._charge_engine is not None
        if (more := cost - self._charged) > 0:
            self._charged = cost
            self._counters.add_service(self._tenant_id, more)
            self._charge_engine(more)

    def _expect(self, cost: float) -> None:
        if cost != self._expected:
            self._counters.expect(self._tenant_id, cost - self._expected)
            self._expected = cost


def _cost(prompt: int, completion: int) -> float:
    return max(0, prompt) * PROMPT_TOKEN + completion * OUTPUT_TOKEN
