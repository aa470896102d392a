"""Recovery of requests whose gateway died, or whose engine died and stays away: a gateway settles them with the
engine's token counts or, after ENGINE_PATIENCE_SECONDS, with the last reported progress.
"""

import asyncio
import logging
import random
from datetime import UTC, datetime, timedelta

import msgspec

from gateway.billing.lease_note import note_extension
from gateway.billing.ledger import Ledger
from gateway.billing.own_engines import OwnEngines
from gateway.billing.stream import UsageStream
from gateway.billing.usage_log_client import UsageLogClient
from gateway.errors import Unavailable
from gateway.metrics import Metrics
from gateway.quota.quota import Quota
from gateway.quota.reservation import ExpiredLease
from gateway.records.money.prices import Price
from gateway.usage_row import UsageRow, encode
from wire.responses import FinishedRequest

log = logging.getLogger(__name__)

# The jitter has its own generator, so that it never changes the state of Python's shared one.
JITTER = random.Random()

# Maximum wait for a request's final counts. Our engine may come back with them; behind other engines only the gateway
# that sent the request has them. After it the last progress counts.
ENGINE_PATIENCE_SECONDS = 60.0
# Time that live gateways get, after Redis was away, to settle the requests that ended during the outage.
RETURN_SECONDS = 5.0
# Tenants that are swept in each round although none of their leases has ended, so that paid-off states are dropped.
IN_TURN = 10

Answers = dict[str, dict[str, FinishedRequest] | None]
"""By engine's URL: what it knows by request id; None where it could not be asked."""


class LeaseRecovery:
    """Settlement of expired leases."""

    def __init__(
        self,
        quota: Quota,
        stream: UsageStream,
        ledger: Ledger,
        metrics: Metrics,
        usage_logs: UsageLogClient,
        engines: OwnEngines,
        every_seconds: float,
    ) -> None:
        self._quota = quota
        self._stream = stream
        self._ledger = ledger
        self._metrics = metrics
        self._usage_logs = usage_logs
        self._engines = engines
        self._every_seconds = every_seconds
        self._turn = 0

    async def run(self) -> None:
        """Settle expired leases periodically until cancelled, one process at a time. Run it as a task."""
        while True:
            # Jitter, so that no process always gets the turn.
            pause = self._every_seconds * JITTER.uniform(0.75, 1.25)
            await asyncio.sleep(max(pause, RETURN_SECONDS - self._quota.answers_for))
            self._engines.refresh()
            if self._quota.answers_for < RETURN_SECONDS:
                continue
            try:
                if await self._quota.is_first(self._every_seconds / 2):
                    await self.settle_all()
            except Unavailable as error:
                # The part that is away logs its own outage.
                log.debug("requests of dead gateways are not settled yet: %s", error)
            except Exception:
                # A bug must not end the task, because other requests wait.
                log.exception("settling the requests of dead gateways failed; the gateway retries")

    async def settle_all(self) -> None:
        """Settle the expired leases of all tenants once. Raises Unavailable."""
        tenants = await self._stream.tenants()
        self._turn = self._turn % max(1, len(tenants))
        in_turn = tenants[self._turn : self._turn + IN_TURN]
        self._turn += IN_TURN
        for tenant_id in {*await self._quota.with_expired(tenants), *in_turn}:
            try:
                await self._settle_of(tenant_id)
            except Unavailable as error:
                if self._quota.away:
                    raise
                log.error("expired leases of tenant %s are not settled yet: %s", tenant_id, error.__cause__)
            except Exception:
                # An error of one tenant must not stop the others.
                log.exception("settling the expired leases of tenant %s failed; the gateway retries", tenant_id)

    async def _settle_of(self, tenant_id: str) -> None:
        expired = await self._quota.expired(tenant_id)
        # This process extends its own leases again, after a suspension of the machine too.
        leases = [lease for lease in expired if not self._quota.runs(lease.reservation)]
        if not leases:
            return
        answers = await self._ask(leases)
        for lease in leases:
            patient = datetime.now(UTC) - lease.ended < timedelta(seconds=ENGINE_PATIENCE_SECONDS)
            outcome = find_outcome(lease, answers, patient=patient)
            if outcome is not None:
                await self._settle(lease, outcome)

    async def _ask(self, leases: list[ExpiredLease]) -> Answers:
        ids = [lease.reservation.request_id for lease in leases]
        urls = self._engines.to_ask(lease.progress.engine_url for lease in leases if lease.progress is not None)
        answers = await asyncio.gather(*(self._usage_logs.ask(url, ids) for url in urls))
        return dict(zip(urls, answers, strict=True))

    async def _settle(self, lease: ExpiredLease, outcome: FinishedRequest) -> None:
        try:
            row = abandoned_row(lease, outcome)
        except (KeyError, TypeError, msgspec.ValidationError):
            # The note has another form, perhaps a newer gateway's. Settle it with an event that is set aside for the
            # operator, so that nothing stays held.
            log.critical("the lease of request %s, left by a dead gateway, is malformed", lease.reservation.request_id)
            event = msgspec.json.encode({**lease.note, "request_id": lease.reservation.request_id, "outcome": outcome})
            tokens = lease.reservation.tokens
            await self._quota.settle(lease.reservation, tokens=tokens, cost=0, event=event, is_abandoned=True)
            return
        used = row.prompt_tokens + row.completion_tokens + row.surcharge
        entry_id = await self._quota.settle(
            lease.reservation, tokens=used, cost=row.cost, event=encode(row), is_abandoned=True
        )
        if entry_id is not None:
            log.warning("abandoned request %s is settled with %d tokens", row.request_id, used)
            self._metrics.finished(row)
            self._ledger.settled(entry_id, row)


def find_outcome(lease: ExpiredLease, answers: Answers, *, patient: bool) -> FinishedRequest | None:
    """Return the final counts of an abandoned request, None to decide later.

    That is the case if the request still runs (its gateway lives after all), or if `patient` and its engine is away or
    is not asked, because it is no engine of ours. A request without progress may have been sent to any engine.
    """
    request_id, progress = lease.reservation.request_id, lease.progress
    known = [record for answer in answers.values() if answer and (record := answer.get(request_id)) is not None]
    if any(record.finish_reason is None for record in known):
        return None
    if known:
        # The request was tried on several engines; the one with the most tokens served it.
        return max(known, key=lambda record: record.completion_tokens)
    may_know = list(answers.values()) if progress is None else [answers.get(progress.engine_url)]
    if patient and (not may_know or None in may_know):
        return None
    if progress is None:
        return FinishedRequest(request_id, "abort", 0, 0, 0)
    return FinishedRequest(request_id, "abort", progress.prompt_tokens, progress.completion_tokens, 0)


def abandoned_row(lease: ExpiredLease, outcome: FinishedRequest) -> UsageRow:
    """Return the usage row of an abandoned request. `lease_note` made its note, maybe in a newer release."""
    progress = lease.progress
    fields = {name: value for name, value in lease.note.items() if name in UsageRow.__struct_fields__}
    price = msgspec.convert(lease.note["price"], Price)
    extension = note_extension(lease.note)
    prompt, completion = outcome.prompt_tokens, outcome.completion_tokens
    is_free = progress is not None and progress.is_free
    if progress is not None and progress.end is not None:
        fields |= msgspec.structs.asdict(progress.end)
    # A dead gateway's last sign of life is the last extension of the lease, at most a third of a lease before it died.
    latency_ms = max(0, round((lease.last_extended - lease.reservation.admitted_at).total_seconds() * 1000))
    created_at = lease.reservation.admitted_at
    return UsageRow(
        **{"version": extension.version, "status": "abandoned", "latency_ms": latency_ms, "ttft_ms": None, **fields},
        request_id=lease.reservation.request_id,
        tenant_id=lease.reservation.tenant_id,
        engine=None if progress is None else progress.engine_url,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=outcome.cached_tokens,
        cost=0 if is_free else price.cost(prompt, completion, outcome.cached_tokens),
        surcharge=extension.tokens(prompt, completion) - prompt - completion,
        finish_reason=outcome.finish_reason,
        created_at=created_at,
        reserved_tokens=lease.reservation.tokens,
        end_user=extension.end_user,
        base=extension.base,
    )
