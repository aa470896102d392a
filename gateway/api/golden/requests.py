"""Requests of the gateway itself: golden prompts, with the same checks, queue and engines as clients' requests.

A tenant pays for the prompts that its key asks. Requests of the operator and of background checks have no account: they
count for the tenant's fair share, at the lowest priority, but for no quota and no price.
"""

import time
import uuid
from typing import Any, Protocol

import msgspec

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.api.inference.admission import Admission
from gateway.api.inference.time_limit import while_allowed
from gateway.api.requests.memory import BodyMemory
from gateway.api.requests.prompts import CHAT, COMPLETIONS, Endpoint
from gateway.billing.account import Account, Accounting
from gateway.billing.charges import Ending, ending_of
from gateway.billing.count_limits import CountLimits
from gateway.billing.inference_request import InferenceRequest
from gateway.errors import AdapterMismatch, RateLimited, UpstreamFailed
from gateway.fleet.calls import receipts
from gateway.fleet.calls.answers import Fields, decode_progress, read_answer, read_usage
from gateway.fleet.calls.call import Call, EngineRefused
from gateway.fleet.dispatch import AttemptLog, Dispatcher
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.service_meter import Reported
from gateway.fleet.queueing.waiting import CHECKS_PRIORITY
from gateway.metrics import Metrics
from gateway.records.adapters.catalog import Model
from gateway.records.adapters.golden import GoldenAnswer, GoldenPrompt
from gateway.records.tenants.tenants import Tenant
from wire.deadlines import MAX_PRIORITY
from wire.headers import RECEIPT_HEADER
from wire.model_names import version_name

# Priority of free requests among the tenant's own requests. Their priority among tenants is CHECKS_PRIORITY.
LAST_OWN = MAX_PRIORITY
MAX_ANSWER_BYTES = 2**18


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A checked prompt for a version of the tenant's adapter."""

    tenant: Tenant
    endpoint: Endpoint
    model: Model
    asked: InferenceRequest


class _CheckedLog(AttemptLog, Protocol):
    def observe_receipt(self, receipt: Any) -> None: ...
    def observe_answer(self, answer: Fields) -> None: ...


class FreeAttemptLog:
    """Log of a free request. It checks the receipt and the counts, as an `Account` does. digest: the adapter's, without
    prefix. limits: those of the counts.
    """

    def __init__(self, digest: str | None, limits: CountLimits) -> None:
        self._digest = digest
        self._limits = limits
        self.reported = Reported()
        self._is_ours = False

    def queued(self, seconds: float) -> None:
        pass

    def sent(self, engine: EngineRecord, prompt_tokens: int) -> None:
        self._is_ours = engine.address.traits.has_usage_log

    def unsent(self) -> None:
        pass

    def lost(self) -> None:
        pass

    def observe_receipt(self, receipt: Any) -> None:
        """Raise AdapterMismatch for our engine's receipt of another adapter."""
        is_receipt = self._is_ours and isinstance(receipt, str)
        if is_receipt and not receipts.matches(receipts.served_digest(receipt), self._digest):
            raise AdapterMismatch

    def observe_answer(self, answer: Fields) -> None:
        """Read the numbers of computed tokens, which the fair share counts. Raises AdapterMismatch."""
        # Only our engines report their progress.
        if self._is_ours and (progress := decode_progress(answer)) is not None:
            self.observe_receipt(progress.adapter_digest)
        if (usage := read_usage(answer)) is not None:
            prompt, completion, cached = self._limits.checked(usage)
            if completion is not None:
                computed = None if prompt is None or cached is None else prompt - cached
                self.reported = Reported(computed, completion)


class GoldenRequests:
    """Sender of golden prompts. request_timeout: limit of a request in seconds."""

    def __init__(
        self,
        *,
        body_memory: BodyMemory,
        admission: Admission,
        accounting: Accounting,
        auth: Authenticator,
        dispatcher: Dispatcher,
        metrics: Metrics,
        request_timeout: float,
    ) -> None:
        self._body_memory = body_memory
        self._admission = admission
        self._accounting = accounting
        self._auth = auth
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._request_timeout = request_timeout

    async def read(self, tenant: Tenant, name: str, version: int, prompt: GoldenPrompt) -> Question:
        """Return a checked prompt for an adapter's version. Raises the errors of a request's body."""
        endpoint = COMPLETIONS if prompt.messages is None else CHAT
        body = {**msgspec.to_builtins(prompt), "model": version_name(name, version), "temperature": 0}
        raw = msgspec.json.encode(body)
        with self._body_memory.share(tenant.id) as share:
            share.take(len(raw))
            model, asked = await self._admission.read(tenant, raw, endpoint, share)
        return Question(tenant=tenant, endpoint=endpoint, model=model, asked=asked)

    async def ask(
        self, question: Question, payer: TenantPrincipal | None = None, engine: EngineRecord | None = None
    ) -> GoldenAnswer:
        """Return the greedy answer.

        payer: the tenant's key that pays; None for a free request. engine: the only engine to ask; None: any engine.
        Raises AdapterMismatch, RateLimited, UpstreamFailed and other errors of a request.
        """
        arrived, request_id = time.monotonic(), f"golden-{uuid.uuid4().hex}"
        tenant, model, asked = question.tenant, question.model, question.asked
        call = Call(
            request_id=request_id,
            path=question.endpoint.path,
            body=asked.body,
            named=asked.named,
            model=model,
            tenant=tenant,
            prompt_tokens=asked.prompt_tokens,
            sequences=asked.choices,
            arrived=arrived,
            engine=engine,
        )
        if payer is not None:
            # A shortened answer could not be compared.
            whole = msgspec.structs.replace(payer.tenant, on_token_limit="refuse")
            payer = msgspec.structs.replace(payer, tenant=whole)
            account = await self._admission.reserve(payer, model, asked, question.endpoint, request_id, arrived)
            return await self._answer_billed(call, account)
        last = msgspec.structs.replace(tenant, priority=CHECKS_PRIORITY)
        call = msgspec.structs.replace(call, tenant=last, body={**asked.body, "priority": LAST_OWN})
        try:
            async with while_allowed(self._auth, None, arrived, self._request_timeout):
                return await self._answer(call, FreeAttemptLog(model.digest, CountLimits.of(asked, asked.max_tokens)))
        except EngineRefused as refusal:
            raise refusal.error from refusal

    async def _answer_billed(self, call: Call, account: Account) -> GoldenAnswer:
        call = msgspec.structs.replace(call, hold=account.hold, on_progress=account.observe_report)
        with self._accounting.open(account):
            try:
                async with while_allowed(self._auth, account.principal, account.arrived, self._request_timeout):
                    answer = await self._answer(call, account)
                    if account.is_beyond_hold:
                        assert account.hold is not None
                        raise await account.hold.refused_at_end()
            except RateLimited as refusal:
                account.rate_end.handle(refusal)
                self._metrics.refused(account.principal.tenant.name, refusal.kind)
                await self._accounting.close_and_wait(account, Ending.LIMITED)
                raise
            except EngineRefused as refusal:
                await self._accounting.close_and_wait(account, ending_of(refusal))
                raise refusal.error from refusal
            await self._accounting.close_ahead(account)
        return answer

    async def _answer(self, call: Call, attempt_log: _CheckedLog) -> GoldenAnswer:
        async with self._dispatcher.open(call, attempt_log) as answering:
            engine = answering.engine
            software = engine.software
            try:
                attempt_log.observe_receipt(answering.response.headers.get(RECEIPT_HEADER))
                answer = await read_answer(answering.response, MAX_ANSWER_BYTES, _no_reservation)
                answering.end()
                attempt_log.observe_answer(answer)
            except AdapterMismatch:
                engine.mark_mismatched(answering.instance)
                raise
        return GoldenAnswer(text=_text(answer), software=software)


async def _no_reservation(_: int) -> None:
    """Reserve no memory: MAX_ANSWER_BYTES bounds the answer."""


def _text(answer: Fields) -> str:
    """Return the text of an answer with one choice. Raises UpstreamFailed."""
    try:
        [choice] = msgspec.json.decode(answer["choices"], type=list[_Choice])
    except (KeyError, ValueError, RecursionError) as error:
        raise UpstreamFailed("The engine's answer does not have the expected form.") from error
    return (choice.text if choice.message is None else choice.message.content) or ""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
