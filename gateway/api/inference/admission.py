"""Admission of inference requests: the body, the model's name and the reservation of the tenant's limits."""

import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager

import msgspec
from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.api.requests.fields import read_shared
from gateway.api.requests.memory import BODY_MEMORY, BodyShare
from gateway.api.requests.prompts import Endpoint, PromptReader
from gateway.api.requests.sizes import MAX_USER_CHARS, AnyRequest
from gateway.api.requests.structured_output_forms import FORM, Forms
from gateway.api.scopes import PRINCIPAL
from gateway.billing.account import Account, Accounting
from gateway.billing.inference_request import InferenceRequest
from gateway.billing.lease_note import lease_note
from gateway.billing.targets import target_of
from gateway.errors import REQUEST_ID, RateLimited, Unavailable
from gateway.fleet.dispatch import Dispatcher
from gateway.metrics import Metrics
from gateway.quota.demand import RequestSize
from gateway.quota.quota import Quota
from gateway.quota.refusals import counted_as
from gateway.records.adapters.catalog import Catalog, Model
from gateway.records.adapters.mixtures import names_in, resolve_model
from gateway.records.money.prices import PriceList
from gateway.records.tenants.tenants import Tenant
from gateway.sharing.concurrency import ConcurrencyLimiter
from gateway.usage_row import shown_user
from wire.headers import SESSION_HEADER

# Maximum number of a tenant's requests that are checked or reserved at the same time. The rest of a burst waits, so
# that the event loop handles other tenants' requests in between: with 8, a burst of 48 added 70 ms to a chat.
ADMISSIONS_EACH = 2


class RequestedModel(msgspec.Struct, frozen=True):
    """Model and `user` of a request's body, as the client sent them."""

    model: str
    user: str | None


# Set once a request's body is checked, for the request log.
REQUESTED_MODEL = web.RequestKey("asked", RequestedModel)


class Admission:
    """Admission of requests to the engines. forms: the structured output forms that it refuses on their behalf."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        prompts: PromptReader,
        quota: Quota,
        prices: PriceList,
        dispatcher: Dispatcher,
        accounting: Accounting,
        metrics: Metrics,
    ) -> None:
        self._catalog = catalog
        self._prompts = prompts
        self._quota = quota
        self._prices = prices
        self._dispatcher = dispatcher
        self._accounting = accounting
        self._metrics = metrics
        self._limiter = ConcurrencyLimiter(sys.maxsize, ADMISSIONS_EACH)
        self.forms = Forms()

    async def admit(
        self, request: web.Request, endpoint: Endpoint, held: ExitStack
    ) -> tuple[InferenceRequest, Account]:
        """Admit the request. Returns the request, and its account with the granted tokens."""
        arrived = time.monotonic()
        principal = request[PRINCIPAL]
        tenant = principal.tenant
        share = held.enter_context(request.config_dict[BODY_MEMORY].share(tenant.id))
        raw = await read_shared(request, share)
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._limiter.place(tenant.id))
            parsed, model = await self._check(request, endpoint, principal, raw, share)
            asked = await self._measure(parsed, raw, share, model, tenant, place)
            account = await self.reserve(principal, model, asked, endpoint, request[REQUEST_ID], arrived)
        share.admitted()
        return asked, account

    async def _measure(
        self, parsed: AnyRequest, raw: bytes, share: BodyShare, model: Model, tenant: Tenant, place: AsyncExitStack
    ) -> InferenceRequest:
        """Return a body with its token counts. The place is given back while an engine counts."""
        base = self._catalog.bases.of_model(model.base)
        if not await self._prompts.counts_here(base):
            await place.aclose()
        count = await self._prompts.counter(parsed, raw, share, base, tenant)
        return await self._prompts.measure(parsed, raw, share, base, count)

    async def _check(
        self, request: web.Request, endpoint: Endpoint, principal: TenantPrincipal, raw: bytes, share: BodyShare
    ) -> tuple[AnyRequest, Model]:
        """Return the checked body and the model that it names."""
        tenant = principal.tenant
        if (form := await self.forms.read(tenant.id, raw, share)) is not None:
            request[FORM] = form
        parsed = await self._prompts.parse(raw, endpoint, share)
        request[REQUESTED_MODEL] = RequestedModel(parsed.model, parsed.user)
        for name in names_in(parsed.model, self._catalog.bases):
            principal.check_model(name)
        user = parsed.user or request.headers.get(SESSION_HEADER)
        # The choice of a version hashes it.
        user = user and user[:MAX_USER_CHARS]
        return parsed, await resolve_model(self._catalog, tenant, parsed.model, user)

    async def read(
        self, tenant: Tenant, raw: bytes, endpoint: Endpoint, share: BodyShare
    ) -> tuple[Model, InferenceRequest]:
        """Return the model and the checked form of a request that the gateway itself makes for a tenant."""
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._limiter.place(tenant.id))
            parsed = await self._prompts.parse(raw, endpoint, share)
            model = await resolve_model(self._catalog, tenant, parsed.model)
            asked = await self._measure(parsed, raw, share, model, tenant, place)
        share.admitted()
        return model, asked

    async def reserve(
        self,
        principal: TenantPrincipal,
        model: Model,
        asked: InferenceRequest,
        endpoint: Endpoint,
        request_id: str,
        arrived: float,
    ) -> Account:
        """Reserve a request's amounts on the tenant's limits. A refusal counts as a missed `ttft_target`."""
        tenant = principal.tenant
        with self._refusals_counted(tenant, asked):
            await self._dispatcher.check(tenant.id, model, asked.named, asked.choices)
            self._accounting.check_room(tenant.id)
            base = self._catalog.bases.name_of(model.base)
            price, weights = self._prices.price(tenant.name, model, tenant.plan), asked.weights
            reservation = await self._quota.acquire(
                principal,
                model,
                request_id,
                RequestSize(
                    asked.prompt_tokens * weights.prompt,
                    asked.max_tokens,
                    choices=asked.choices * weights.completion,
                    price=weights.price(price),
                    grows=asked.stream or self._dispatcher.keeps_allowances(model.base),
                    currency=self._prices.currency,
                    by_default=asked.has_default_length,
                ),
                lease_note(principal, endpoint.name, model, price, weights, shown_user(asked.body.get("user")), base),
            )
        return Account(principal, reservation, endpoint.name, model, price, asked, arrived, base)

    @contextmanager
    def _refusals_counted(self, tenant: Tenant, asked: InferenceRequest) -> Iterator[None]:
        try:
            yield
        except (RateLimited, Unavailable) as refusal:
            if isinstance(refusal, RateLimited):
                self._metrics.refused(tenant.name, counted_as(refusal))
            if target_of(asked, tenant) is not None:
                self._metrics.target_ended(tenant.name, is_met=False)
            raise
