"""Account of an admitted request: updated while the request runs, settled and recorded however it ends."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from gateway.access.auth import TenantPrincipal
from gateway.billing.charges import Charge, Ending, Used, charge
from gateway.billing.count_limits import CountLimits
from gateway.billing.estimates import Speeds, is_clients_cause
from gateway.billing.inference_request import InferenceRequest
from gateway.billing.ledger import Ledger
from gateway.billing.queue_times import QueueTimes
from gateway.billing.rate_end import RateEnd
from gateway.billing.targets import is_met, target_of
from gateway.billing.usage_log_client import UsageLogClient
from gateway.billing.used_engines import UsedEngines
from gateway.error_codes import code_of, known_code
from gateway.errors import AdapterMismatch, ClientGone, Forbidden, InvalidKey, Unavailable
from gateway.fleet.calls.answers import Choice, Fields, Usage, decode_choices, decode_progress, read_usage
from gateway.fleet.calls.receipts import matches, served_digest
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.service_meter import Reported
from gateway.metrics import Metrics
from gateway.process.outage import Outage
from gateway.quota.quota import Quota
from gateway.quota.reservation import LeaseEnd, Reservation
from gateway.records.adapters.catalog import Model
from gateway.records.money.prices import Price
from gateway.usage_row import MAX_REASON_CHARS, UsageRow, encode, printable, shown_user
from wire.responses import FinishedRequest

log = logging.getLogger(__name__)

# Maximum wait for the settlement at the end of an answer, so that the client's next request sees the released slot. A
# slower settlement continues in the background.
SETTLE_PATIENCE_SECONDS = 1.0
# Maximum wait for an engine's final count after an answer was cut off: the engine stops within a step, or was killed
# and is restarted. After it `LeaseRecovery` settles the request: it waits longer, with the tenant's slot released.
OUTCOME_PATIENCE_SECONDS = 10.0


class Account:
    """Costs of a request so far. Token counts are the engine's if it sends them. base: name of the base model."""

    def __init__(
        self,
        principal: TenantPrincipal,
        reservation: Reservation,
        endpoint: str,
        model: Model,
        price: Price,
        asked: InferenceRequest,
        arrived: float,
        base: str | None = None,
    ) -> None:
        self.principal, self.reservation = principal, reservation
        self.endpoint, self.model, self.price, self.base = endpoint, model, price, base
        self.asked_prompt = asked.prompt_tokens
        self.weights = asked.weights
        self.choices, self.is_whole = asked.choices, not asked.stream
        self.limits = CountLimits.of(asked, reservation.max_tokens)
        self._shares_prompts = (asked.body.get("n") or 1) > 1
        self.target = target_of(asked, principal.tenant)
        self.hold = reservation.hold
        if self.hold is not None:
            self.hold.weight = asked.weights.completion
        self.rate_end = RateEnd()
        # Indices of the choices with an event, and of those that have ended.
        self.begun_choices, self.ended_choices = set[int](), set[int]()
        self.used_engines = UsedEngines()
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        # Whether the engine has reported counts, of cached tokens and of the completion, that a request can have.
        self._knows_cached = self.is_counted = False
        self.finish_reason: str | None = None
        # The engine's receipt; None if it sent none.
        self.served_digest: str | None = None
        self.ending = Ending.BROKEN
        self.end_user = shown_user(asked.body.get("user"))
        # Code of the error sent to the client, and whether the client's request caused it (`is_clients_cause`).
        self.error_code: str | None = None
        self.is_clients_cause = False
        self.queue_times = QueueTimes()
        # The tokens of the usage row, once the account is closed.
        self.billed: Used | None = None
        self.settlement: asyncio.Task[None] | None = None
        self.on_progress: Callable[[Reservation, str, int, int], None] | None = None
        self.arrived, self._admitted = arrived, time.monotonic()
        self._first_token: float | None = None

    @property
    def used(self) -> Used:
        """Return the tokens so far, or those of the usage row once the account is closed."""
        return self.billed or Used(self.prompt_tokens, self.completion_tokens, self.cached_tokens)

    @property
    def reported(self) -> Reported:
        """Return the tokens that the engine has computed. The count of cached ones is final once all choices begin."""
        computed = self.prompt_tokens - self.cached_tokens if self._knows_cached else None
        is_final = self.is_whole or len(self.begun_choices) >= self.choices
        return Reported(computed, self.completion_tokens, is_final)

    @property
    def cost(self) -> int:
        """Return the cost of the tokens so far, in micro-units."""
        used = self.used
        return self.price.cost(used.prompt, used.completion, used.cached)

    @property
    def is_beyond_hold(self) -> bool:
        """Return whether the answer needs more tokens than its hold, and this has not been handled yet."""
        if self.hold is None or self.rate_end.is_handled:
            return False
        return self.rate_end.by_engine or self.hold.pace.is_used_up

    @property
    def status(self) -> str:
        return self.ending.status

    @property
    def first_token_seconds(self) -> float | None:
        """Return the seconds from the request's arrival to a stream's first token."""
        return None if self._first_token is None else self._first_token - self.arrived

    def is_target_met(self) -> bool | None:
        """Return whether the ended request met its target; see `targets.is_met`."""
        return is_met(self.target, self.ending, self.first_token_seconds, time.monotonic() - self.arrived)

    def queued(self, seconds: float) -> None:
        """Record the wait in the gateway's queue."""
        self.queue_times.gateway = seconds

    def failed(self, code: str) -> None:
        """Record the code of the request's error. Only the first call has an effect."""
        self.error_code = self.error_code or known_code(code)

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        """Record that the engine has the prompt. From then on the request costs tokens, even if its client leaves."""
        self.used_engines.sent(engine)
        self.prompt_tokens, self.completion_tokens, self.is_counted = prompt_tokens, 0, False

    def unsent(self) -> None:
        """Undo the last `sent`: the request did not reach that engine."""
        self.used_engines.unsent()
        self.prompt_tokens = 0

    def lost(self) -> None:
        """Record that the engine of the last `sent` died with the request, perhaps after work on it."""
        self.used_engines.died()

    def observe_receipt(self, receipt: Any) -> None:
        """Store the receipt of our engine. Raises AdapterMismatch if it is not of the request's adapter."""
        if isinstance(receipt, str) and self.used_engines.remembers:
            self.served_digest = served_digest(receipt)
            if not matches(self.served_digest, self.model.digest):
                raise AdapterMismatch

    def observe_report(self, completion_tokens: int) -> None:
        """Record the completion tokens so far of a whole answer. Raises Unavailable if another gateway settled it."""
        self.set_completion(completion_tokens)
        self.is_counted = True
        self._progressed()

    def observe_answer(self, answer: Fields) -> None:
        """Read the counts of a whole answer. Raises UpstreamFailed, AdapterMismatch, Unavailable."""
        self._observe(answer)

    def observe_event(self, event: Fields) -> None:
        """Read the counts of a stream event and the time of the first token.

        Raises UpstreamFailed, AdapterMismatch, Unavailable.
        """
        before = self.completion_tokens
        self._observe(event)
        if self._first_token is None and self.completion_tokens > before:
            self._first_token = time.monotonic()

    def _observe(self, event: Fields) -> None:
        # Only our engines report their progress.
        progress = decode_progress(event) if self.used_engines.remembers else None
        self.queue_times.observe(None if progress is None else progress.queue_seconds)
        reason = None if progress is None else progress.finish_reason
        # Our engine says the reason of a whole answer, whose choices may be large.
        choices = [Choice(finish_reason=reason)] if isinstance(reason, str) else decode_choices(event)
        if progress is not None:
            self.observe_receipt(progress.adapter_digest)
            self.rate_end.by_engine = progress.ended_by_allowance is True
        counts = read_usage(event) or (None if progress is None else progress.usage)
        if counts is not None:
            self._count(counts := self.limits.checked(counts))
        if counts is None or counts.completion_tokens is None:
            # vLLM may send no counts before its last event, a server impossible ones: a piece of text is one token.
            self.set_completion(self.completion_tokens + sum(choice.has_text for choice in choices))
            if self.is_whole:
                self.limits = self.limits.of_answer(event)
        self._progressed()
        for choice in choices:
            index = choice.index if choice.index in range(self.choices) else 0
            self.begun_choices.add(index)
            if isinstance(choice.finish_reason, str):
                self.finish_reason = printable(choice.finish_reason, MAX_REASON_CHARS)
                self.ended_choices.add(index)

    def _progressed(self) -> None:
        if self.on_progress is not None and self.used_engines.engine is not None:
            self.on_progress(self.reservation, self.used_engines.engine, self.prompt_tokens, self.completion_tokens)
        if self.hold is not None:
            self.hold.use(self.completion_tokens)

    def set_completion(self, tokens: int) -> None:
        """Set the completion tokens so far, of all choices; within the limits."""
        self.completion_tokens = min(max(tokens, 0), self.limits.completion)

    def charge(self, final: FinishedRequest | None) -> Charge:
        """Return the charge of the request. final: the engine's final count, if the answer was not read to the end."""
        known = None if final is None else Used(final.prompt_tokens, final.completion_tokens, final.cached_tokens)
        if final is not None:
            self.finish_reason = self.finish_reason or final.finish_reason
        return charge(self.ending, self.asked_prompt, self.used, known, self.weights)

    def row(self, charged: Charge, ended: float) -> UsageRow:
        """Return the usage row. ended: on the clock of `arrived`."""
        billed, first = charged.billed, self.first_token_seconds
        return UsageRow(
            request_id=self.reservation.request_id,
            tenant_id=self.principal.tenant.id,
            tenant=self.principal.tenant.name,
            key_id=self.principal.key_id,
            endpoint=self.endpoint,
            model=self.model.name,
            adapter_digest=self.model.digest,
            engine=self.used_engines.engine,
            prompt_tokens=billed.prompt,
            completion_tokens=billed.completion,
            cached_tokens=billed.cached,
            cost=0 if charged.is_free else self.price.cost(billed.prompt, billed.completion, billed.cached),
            latency_ms=round((ended - self.arrived) * 1000),
            ttft_ms=None if first is None else round(first * 1000),
            status=self.status,
            finish_reason=self.finish_reason,
            created_at=self.reservation.admitted_at,
            served_digest=self.served_digest,
            surcharge=charged.surcharge,
            version=self.model.version,
            admission_ms=round((self._admitted - self.arrived) * 1000),
            queue_ms=self.queue_times.milliseconds,
            reserved_tokens=self.reservation.tokens,
            end_user=self.end_user,
            error_code=self.error_code,
            base=self.base,
            limit_name=self.rate_end.limit_name,
        )

    def _count(self, counts: Usage) -> None:
        if counts.prompt_tokens is not None:
            self.prompt_tokens = counts.prompt_tokens
        if counts.completion_tokens is not None:
            self.set_completion(counts.completion_tokens)
            self.is_counted = True
        # vLLM and SGLang count tokens as cached that only another choice of the same prompt has computed.
        if counts.cached_tokens is not None and (self.used_engines.remembers or not self._shares_prompts):
            self.cached_tokens, self._knows_cached = counts.cached_tokens, True
        self.cached_tokens = min(self.cached_tokens, self.prompt_tokens)


class Accounting:
    """Accounts of this process. Background tasks close them, so that the cancellation of a handler cannot stop it."""

    def __init__(self, quota: Quota, ledger: Ledger, metrics: Metrics, usage_logs: UsageLogClient) -> None:
        self._quota, self._usage_logs = quota, usage_logs
        self._ledger, self._metrics = ledger, metrics
        # Called once for each request with its wait in seconds, when an engine has begun to answer it.
        self.on_start: Callable[[TenantPrincipal, float], None] = lambda *_: None
        self._speeds = Speeds()
        self._outage = Outage(log, "settling requests")
        self._closing: set[asyncio.Task[None]] = set()

    def check_room(self, tenant_id: str) -> None:
        """Raise Unavailable if the ledger has no room for further usage of the tenant."""
        if not self._ledger.has_room_for(tenant_id):
            raise Unavailable("The usage ledger is behind; try again shortly.", code="ledger_unavailable")

    @contextmanager
    def open(self, account: Account) -> Iterator[Account]:
        """Close the account at the end of the block, however it ends. Redis receives the progress during the block."""
        account.on_progress = self._quota.progress
        account.queue_times.on_start = partial(self.on_start, account.principal)
        try:
            yield account
        except (asyncio.CancelledError, ClientGone):
            self.close(account, Ending.CANCELLED)
            raise
        except (InvalidKey, Forbidden) as error:
            account.failed(code_of(error))
            self.close(account, Ending.REVOKED)
            raise
        except AdapterMismatch as error:
            account.failed(code_of(error))
            self.close(account, Ending.MISMATCHED)
            raise
        except Exception as error:
            account.failed(code_of(error))
            account.is_clients_cause = is_clients_cause(error)
            raise
        finally:
            self.close(account, Ending.BROKEN)

    def close(self, account: Account, ending: Ending) -> "asyncio.Task[None]":
        """Start the settlement and the usage row. Only the first call has an effect."""
        if account.settlement is None:
            account.ending = ending
            self._speeds.count_unread(account, time.monotonic())
            self._metrics.target_ended(account.principal.tenant.name, account.is_target_met())
            account.settlement = asyncio.create_task(self._close(account))
            self._closing.add(account.settlement)
            account.settlement.add_done_callback(self._closing.discard)
        return account.settlement

    async def close_and_wait(self, account: Account, ending: Ending) -> None:
        """Close the account and wait for its settlement, at most SETTLE_PATIENCE_SECONDS."""
        await asyncio.wait({self.close(account, ending)}, timeout=SETTLE_PATIENCE_SECONDS)

    async def close_ahead(self, account: Account) -> None:
        """Close the account of a successful request before its answer ends.

        The settlement is sent first, so that the client's next request sees the released slot. If Redis does not keep
        the order of calls, wait for the settlement.
        """
        settlement = self.close(account, Ending.FINISHED)
        if not self._quota.in_order:
            await asyncio.wait({settlement}, timeout=SETTLE_PATIENCE_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Wait until all accounts are closed, and cancel those that take longer than `seconds`."""
        if self._closing:
            _, late = await asyncio.wait(set(self._closing), timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _close(self, account: Account) -> None:
        ended = time.monotonic()
        outcome = None
        for engine in account.used_engines.to_ask(account.ending):
            try:
                outcome = await self._usage_logs.outcome(
                    engine, account.reservation.request_id, OUTCOME_PATIENCE_SECONDS
                )
            except TimeoutError:
                if await self._hand_over(account, engine, ended):
                    return
            if outcome is not None:
                account.used_engines.engine = engine
                break
        charged = account.charge(outcome)
        account.billed = charged.billed
        row = account.row(charged, ended)
        self._metrics.finished(row)
        if not charged.is_recorded:
            await self._quota.release(account.reservation)
            return
        entry_id = None
        try:
            entry_id = await self._quota.settle(
                account.reservation,
                tokens=charged.rate_tokens,
                cost=row.cost,
                event=encode(row),
                counts=bool(charged.requests),
            )
            self._outage.over()
        except Unavailable as error:
            # The row goes to the journal. The quota corrects the limits when Redis is back.
            self._outage.failed(str(error), "limits are corrected when redis is reachable again")
        if entry_id is None:
            await self._ledger.keep(row)
        else:
            self._ledger.settled(entry_id, row)

    async def _hand_over(self, account: Account, engine: str, ended: float) -> bool:
        """Hand the settlement over to `LeaseRecovery`, with the counts that apply if the engine stays away.

        ended: on the clock of the account's `arrived`. Returns whether that is possible.
        """
        charged = account.charge(None)
        row, billed = account.row(charged, ended), charged.billed
        end = LeaseEnd(**{name: getattr(row, name) for name in LeaseEnd.__struct_fields__})
        try:
            self._quota.progress(
                account.reservation, engine, billed.prompt, billed.completion, is_free=charged.is_free, end=end
            )
            return await self._quota.hand_over(account.reservation)
        except Unavailable as error:
            log.info("request %s is settled with the counts received so far: %s", account.reservation.request_id, error)
            return False
