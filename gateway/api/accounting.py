"""What one admitted request costs: followed while it runs, settled and written down however it ends."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.responses import FinishedRequest
from gateway.admission.auth import TenantPrincipal
from gateway.admission.quota import Quota
from gateway.admission.reservation import Reservation
from gateway.errors import Forbidden, InvalidKey, Unavailable
from gateway.fleet.finished import FinishedClient
from gateway.fleet.registry import EngineRecord
from gateway.metrics import Metrics
from gateway.outage import Outage
from gateway.records.catalog import Model
from gateway.records.ledger import Ledger
from gateway.records.prices import Price
from gateway.records.usage import UsageRow, encode

log = logging.getLogger(__name__)

# How long the end of an answer may wait for its settlement, so that a client that asks again at once finds its slot
# free. A slower settlement goes on behind the answer.
SETTLE_PATIENCE_SECONDS = 1.0
# How long an engine that was left gets to say what it generated: it stops within a step, or was killed and comes back.
# After it the request is left to `abandoned`, which waits longer while the tenant has its place back.
OUTCOME_PATIENCE_SECONDS = 10.0


class ClientGone(Exception):
    """The client closed the connection, or took no byte for too long."""


class Account:
    """One request's costs so far. Token counts are the engine's where it says them."""

    def __init__(
        self,
        principal: TenantPrincipal,
        reservation: Reservation,
        endpoint: str,
        model: Model,
        price: Price,
        arrived: float,
    ) -> None:
        self.principal = principal
        self.reservation = reservation
        self.endpoint = endpoint
        self.model = model
        self.price = price
        self.engine: str | None = None
        # Whether the engine can be asked what it did: ours can.
        self.engine_remembers = False
        self._before: tuple[str | None, bool] = None, False
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.status = "error"
        # Against the limit of requests.
        self.counts = True
        # No engine was there for it: unless one says that it worked, it is none of the tenant's requests.
        self.unserved = False
        self.settlement: asyncio.Task[None] | None = None
        self.tell: Callable[[Reservation, str, int, int], None] | None = None
        self.arrived = arrived
        self._first_token: float | None = None

    @property
    def first_token_seconds(self) -> float | None:
        """From the request's arrival; of streams."""
        return None if self._first_token is None else self._first_token - self.arrived

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        """The engine has the prompt; from here on it costs, whoever leaves."""
        self._before = self.engine, self.engine_remembers
        self.engine, self.prompt_tokens = engine.url, prompt_tokens
        self.engine_remembers = engine.address.kind == "loraplex"

    def unsent(self) -> None:
        """It never came to that engine, which has nothing to tell of it."""
        self.engine, self.engine_remembers = self._before
        self.prompt_tokens = 0

    def refused(self, *, counts: bool = True) -> None:
        """The engine did nothing with it. counts: whether it still is one of the tenant's requests."""
        self.prompt_tokens, self.counts = 0, counts

    def observe_answer(self, answer: dict[str, Any]) -> None:
        """Reads the counts of a whole answer."""
        self._observe(answer)

    def observe_event(self, event: dict[str, Any]) -> None:
        """Reads the counts of one event of a stream; the first with a token is the client's first."""
        before = self.completion_tokens
        self._observe(event)
        if self._first_token is None and self.completion_tokens > before:
            self._first_token = time.monotonic()

    def _observe(self, event: dict[str, Any]) -> None:
        progress, usage = event.get("loraplex"), event.get("usage")
        choices = event.get("choices") or []
        if isinstance(usage, dict):
            self._count(usage, (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        elif isinstance(progress, dict):
            self._count(progress, progress.get("cached_tokens"))
        else:
            # An engine that doesn't say how far it is (vLLM): until its last event, a piece of text is one token.
            self.completion_tokens += sum(_has_text(choice) for choice in choices)
        if self.tell is not None and self.engine is not None:
            self.tell(self.reservation, self.engine, self.prompt_tokens, self.completion_tokens)
        for choice in choices:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def correct(self, outcome: FinishedRequest) -> None:
        """The engine's last word, where its answer was not heard to its end."""
        self.prompt_tokens, self.completion_tokens = outcome.prompt_tokens, outcome.completion_tokens
        self.cached_tokens = outcome.cached_tokens
        self.finish_reason = self.finish_reason or outcome.finish_reason

    def row(self, ended: float) -> UsageRow:
        """ended: on the clock of `arrived`."""
        first = self.first_token_seconds
        return UsageRow(
            request_id=self.reservation.request_id,
            tenant_id=self.principal.tenant.id,
            tenant=self.principal.tenant.name,
            key_id=self.principal.key_id,
            endpoint=self.endpoint,
            model=self.model.name,
            adapter_digest=self.model.digest,
            engine=self.engine,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            cost=self.price.cost(self.prompt_tokens, self.completion_tokens, self.cached_tokens),
            latency_ms=round((ended - self.arrived) * 1000),
            ttft_ms=None if first is None else round(first * 1000),
            status=self.status,
            finish_reason=self.finish_reason,
            created_at=self.reservation.admitted_at,
        )

    def _count(self, counts: dict[str, Any], cached: Any) -> None:
        self.prompt_tokens = _int(counts.get("prompt_tokens"), self.prompt_tokens)
        self.completion_tokens = _int(counts.get("completion_tokens"), self.completion_tokens)
        self.cached_tokens = _int(cached, self.cached_tokens)


def lease_note(principal: TenantPrincipal, endpoint: str, model: Model, price: Price) -> dict[str, Any]:
    """What settles a request whose gateway died, beside its progress: the usage row's fields that do not change."""
    return {
        "tenant": principal.tenant.name,
        "key_id": principal.key_id,
        "endpoint": endpoint,
        "model": model.name,
        "adapter_digest": model.digest,
        "price": price,
    }


class Accounting:
    """Opens accounts and closes them in the background, where no cancelled handler can stop it."""

    def __init__(self, quota: Quota, ledger: Ledger, metrics: Metrics, finished: FinishedClient) -> None:
        self._quota = quota
        self._finished = finished
        self._ledger = ledger
        self._metrics = metrics
        self._outage = Outage(log, "settling requests")
        self._closing: set[asyncio.Task[None]] = set()

    def check_room(self) -> None:
        """Raises Unavailable when usage could not be written down."""
        if not self._ledger.has_room:
            raise Unavailable("The usage ledger is behind; try again shortly.", code="ledger_unavailable")

    @contextmanager
    def open(self, account: Account) -> Iterator[Account]:
        """Closes the account on the way out, whatever happened inside. Redis is told how far it is, now and then."""
        account.tell = self._quota.progress
        try:
            yield account
        except (asyncio.CancelledError, ClientGone):
            self.close(account, "cancelled")
            raise
        except (InvalidKey, Forbidden):
            self.close(account, "revoked")
            raise
        finally:
            self.close(account, "error")

    def close(self, account: Account, status: str) -> "asyncio.Task[None]":
        """Starts writing down and settling; only the first call's status counts."""
        if account.settlement is None:
            account.status = status
            account.settlement = asyncio.create_task(self._close(account))
            self._closing.add(account.settlement)
            account.settlement.add_done_callback(self._closing.discard)
        return account.settlement

    async def close_and_wait(self, account: Account, status: str) -> None:
        """Closes, and waits for it as long as a client may be kept waiting."""
        await asyncio.wait({self.close(account, status)}, timeout=SETTLE_PATIENCE_SECONDS)

    async def close_ahead(self, account: Account) -> None:
        """Closes a request that ended well. Its settlement is asked for before anything that its client may ask of this
        process next, which so finds the slot free; where Redis keeps no order it is waited for."""
        settlement = self.close(account, "ok")
        if not self._quota.in_order:
            await asyncio.wait({settlement}, timeout=SETTLE_PATIENCE_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Waits until every account that was opened is closed; cuts short what takes longer than `seconds`."""
        if self._closing:
            _, late = await asyncio.wait(set(self._closing), timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _close(self, account: Account) -> None:
        ended = time.monotonic()
        outcome = None
        if account.status != "ok" and account.engine is not None and account.engine_remembers:
            request_id = account.reservation.request_id
            try:
                outcome = await self._finished.outcome(account.engine, request_id, OUTCOME_PATIENCE_SECONDS)
            except TimeoutError:
                if await self._leave(account, account.engine):
                    return
            if outcome is not None:
                account.correct(outcome)
        row = account.row(ended)
        self._metrics.finished(row)
        used = row.prompt_tokens + row.completion_tokens
        if account.unserved and outcome is None and not used:
            await self._quota.release(account.reservation)
            return
        entry_id = None
        try:
            entry_id = await self._quota.settle(
                account.reservation, tokens=used, cost=row.cost, event=encode(row), counts=account.counts
            )
            self._outage.over()
        except Unavailable as error:
            # The row goes to the journal; the quota sees to the rest.
            self._outage.failed(str(error), "what requests took of their limits is corrected when redis is back")
        if entry_id is None:
            await self._ledger.keep(row)
        else:
            self._ledger.settled(entry_id, row)

    async def _leave(self, account: Account, engine: str) -> bool:
        """To whoever settles for dead gateways, if that is possible: what was heard of it counts now otherwise."""
        self._quota.progress(account.reservation, engine, account.prompt_tokens, account.completion_tokens)
        try:
            return await self._quota.leave(account.reservation)
        except Unavailable as error:
            log.info("request %s is settled by what was heard of it: %s", account.reservation.request_id, error)
            return False


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice.get("message") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("tool_calls"))


def _int(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise
