"""`/v1/adapters`: a tenant's adapters, managed by the tenant or by an operator on its behalf."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

from aiohttp import web
from msgspec import Struct

from adapters.manifest import AdapterError
from adapters.store import AdapterStore
from gateway.access.auth import Authenticator
from gateway.api.adapters.caller import AdapterCaller, tenants_caller
from gateway.api.idempotency import Idempotency
from gateway.api.requests.fields import json_response
from gateway.api.scopes import PRINCIPAL
from gateway.api.uploads.blocking_calls import BlockingCalls
from gateway.api.uploads.checking import Candidates, Checked, Checker, EngineLimits
from gateway.api.uploads.copying import Copies
from gateway.api.uploads.receiving import UploadNames, UploadRules, Workplace, receive, refuse_too_large
from gateway.api.uploads.validating import Validation
from gateway.errors import BadRequest, BodyTimeout, CheckFailed, Unavailable, translate
from gateway.fleet.engines.engine import EngineRecord
from gateway.process.background import all_ended, run_to_end
from gateway.quota.quota import Quota
from gateway.quota.uploading import ReceivedBytes
from gateway.records.adapters.catalog import Adapter, Catalog
from gateway.records.adapters.rows import Reason
from gateway.records.tenants.tenants import Tenant
from gateway.settings import Settings
from wire.digests import digest_name
from wire.escaping import escaped

log = logging.getLogger(__name__)

# Used until an engine reports its own; also the default of our engine.
DEFAULT_MAX_RANK = 64
# Removed content stays in the store for the longest time that a request may use it.
UNUSED_SECONDS = 3600.0
# References are looked up in batches of this size.
COLLECT_AT_ONCE = 200
# Number of unknown adapters looked up in the audit log in one query.
SAMPLE = 20


class TenantAdapter(Struct, frozen=True, kw_only=True):
    """An adapter of a tenant, with the version that its plain name refers to. base: its base model's name."""

    object: Literal["adapter"] = "adapter"
    name: str
    version: int
    base: str | None
    digest: str
    rank: int
    size_bytes: int
    created_at: datetime
    state: str


class TenantAdapterList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[TenantAdapter]


class AdapterIntake:
    """Intake of uploads: form, checks, store and catalog. The tenant's routes and the admin API use it.

    copies: runs long copies of content that does not arrive with the request. disk_calls, store_calls: run the blocking
    calls of the spool's disk and of the store in threads.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        store: AdapterStore,
        rules: UploadRules,
        idempotency: Idempotency,
        engine_limits: Callable[[str], EngineLimits],
        validation: Validation,
    ) -> None:
        self._catalog = catalog
        self.validation = validation
        self._store = store
        self._rules = rules
        self.max_bytes = rules.max_bytes
        self._idempotency = idempotency
        self._engine_limits = engine_limits
        self._checker = Checker(rules.max_bytes, engine_limits)
        self.copies = Copies()
        self.disk_calls, self.store_calls = BlockingCalls("upload-disk"), BlockingCalls("upload-store")

    async def push(
        self,
        request: web.Request,
        caller: AdapterCaller,
        received: ReceivedBytes,
    ) -> web.Response:
        """Add the uploaded version and return 201; requests use the version from this response on. Return 202 for a
        version whose probe takes long; it is ready after the probe.

        received: counts the body's bytes. Raises BadRequest and TooLarge for the form, and what `take` raises.
        """
        refuse_too_large(request, self._rules)
        await self._catalog.check_declared(caller.tenant, request.content_length or 0)

        async def read_form(place: Workplace) -> UploadNames:
            named = await receive(request, place, self._rules, received)
            self._catalog.check_name(named.name)
            caller.check_name(named.name)
            return named

        return await self.take(request, caller, read_form)

    async def take(
        self,
        request: web.Request,
        caller: AdapterCaller,
        receive: Callable[[Workplace], Awaitable[UploadNames]],
        upload_id: str | None = None,
        added: Callable[[], Awaitable[None]] | None = None,
    ) -> web.Response:
        """Add the version that `receive` writes into a workplace, and return 201 or 202.

        receive: writes the archive or the files, and returns the names. The checks of different callers' owners take
        turns. upload_id: the id of the upload in parts that is completed; else the adapter's name, base model and
        digest identify the request for its Idempotency-Key. added: called at the end, even if the client has left.
        Raises BodyTimeout, Forbidden for a limit, AdapterError for an adapter that cannot be served, Unavailable,
        TooManyRefusedUploads before anything is received.
        """
        self._checker.check_refused(caller.owner)
        with storing(self._rules.seconds):
            opening = Workplace.open(self._store.spool(), caller.owner, self.disk_calls)
            async with asyncio.timeout(self._rules.seconds), opening as place:
                named = await receive(place)
                checked = await self._check(place, caller, named)
                content = (upload_id or f"{named.name} {checked.digest} {checked.base.id}").encode()
                add = partial(self._add, caller, named.name, checked, upload_id)

                async def finish() -> web.Response:
                    tenant_id = None if caller.principal is None else caller.tenant.id
                    answer = await self._idempotency.once(request, caller.actor, content, add, tenant_id)
                    if added is not None:
                        await added()
                    return answer

                return await place.finish(finish())

    def limits(self, caller: AdapterCaller) -> Sequence[tuple[str, EngineLimits]]:
        """Return the name and the engines' present limits of each base model that takes the caller's adapters."""
        return [(base.name, self._engine_limits(base.id)) for base in self.candidates(caller, None).bases]

    def candidates(self, caller: AdapterCaller, base: str | None) -> Candidates:
        """Return the base models that an upload may belong to. base: the name that the caller gives; None: none.

        A key that may not use a base model's name sees none of the others' names. Raises BadRequest.
        """
        bases, principal = self._catalog.bases, caller.principal
        shown = [each for each in bases.all if principal is None or principal.may_use(each.name)] or bases.all
        usable = [each for each in shown if each.state == "active"]
        if base is not None:
            chosen = next((each for each in shown if each.name == base), None)
            if chosen is not None and chosen.state == "active":
                return Candidates(bases=[chosen])
            quoted = f"'{escaped(base, 64)}'"
            fault = f"there is no base model {quoted}"
            if chosen is not None:
                fault = f"the base model {quoted} is {chosen.state} and takes no new adapters"
            names = ", ".join(f"'{each.name}'" for each in usable) or "none"
            raise BadRequest(f"base: {fault}; expected one of: {names}.", param="base")
        if not usable:
            raise BadRequest("base: no base model takes adapters at present.", param="base")
        return Candidates(bases=usable, closed=[each.name for each in shown if each.state != "active"])

    async def _check(self, place: Workplace, caller: AdapterCaller, named: UploadNames) -> Checked:
        """Check the upload. A refused one stays on record as a rejected version."""
        candidates = self.candidates(caller, named.base)
        try:
            return await self._checker.check(place, caller.owner, candidates)
        except (AdapterError, CheckFailed) as error:
            refusal = translate(error, "")
            reason = Reason(message=refusal.message, param=refusal.param, code=refusal.code)
            try:
                await self._catalog.versions.refuse(caller.tenant, named.name, [reason])
            except Unavailable as lost:
                log.warning("a refused upload is not on record: %s", lost)
            raise

    async def kept(self, request: web.Request, actor: str, content: bytes) -> web.Response | None:
        """Return the kept response of a request with an Idempotency-Key. content: identifies the request."""
        return await self._idempotency.kept(request, actor, content)

    async def _add(self, caller: AdapterCaller, name: str, checked: Checked, upload_id: str | None) -> web.Response:
        """Add the version and publish its content."""
        tenant, base = caller.tenant, checked.base
        await self._catalog.check_declared(tenant, checked.num_bytes, upload_id)
        in_thread = partial(self.store_calls.run, caller.owner)
        await in_thread(self._store.stage, checked.folder, checked.digest)

        async def publish() -> None:
            await in_thread(self._store.publish, checked.folder, checked.digest)

        adapter = await self._catalog.add_version(
            tenant,
            name,
            digest=checked.digest,
            rank=checked.rank,
            num_bytes=checked.num_bytes,
            actor=caller.actor,
            publish=publish,
            state=self.validation.first_state(base.id),
            base=base.id,
        )
        adapter = await self.validation.finish(tenant, adapter)
        return json_response(self.describe(adapter), status=202 if adapter.state == "validating" else 201)

    async def collect(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove stored content that no version has had for UNUSED_SECONDS. Returns (adapters, bytes) removed.

        dry_run: remove nothing, and return what would be removed.

        A concurrent upload is safe: it renews the timestamp of content that it finds in the store. Either its version
        is on record at the second check, or it stores the content again.
        """
        return await self._collect(await self._stored(), dry_run=dry_run)

    async def collect_if_known(self) -> tuple[int, int]:
        """Collect. If most of the stored adapters are unknown to the database, collect only the others.

        Such a database probably belongs to another store: its URL is wrong, or it replaces a lost one. Collecting by it
        would remove every tenant's adapters.
        """
        stored, known = await self._stored(), set[str]()
        for start in range(0, len(stored), COLLECT_AT_ONCE):
            known |= await self._catalog.known(stored[start : start + COLLECT_AT_ONCE])
        unknown = [digest for digest in stored if digest not in known]
        # Adapters of deleted tenants are in the audit log only.
        sample = random.sample(unknown, min(len(unknown), SAMPLE))
        if 2 * len(known) < len(stored) and 2 * await self._catalog.were_pushed(sample) < len(sample):
            log.error(
                "the database knows %d of the %d adapters in the store; the unknown ones are not removed: check "
                "LORAPLEX_DATABASE_URL and LORAPLEX_ADAPTER_STORE; `loraplex adapter collect` removes the unknown ones",
                len(known),
                len(stored),
            )
            return await self._collect(sorted(known))
        return await self._collect(stored)

    async def _stored(self) -> list[str]:
        return await asyncio.to_thread(lambda: list(self._store.list(incomplete=True)))

    async def _collect(self, stored: Sequence[str], *, dry_run: bool = False) -> tuple[int, int]:
        since = datetime.now(UTC) - timedelta(seconds=UNUSED_SECONDS)
        removed = num_bytes = 0
        for start in range(0, len(stored), COLLECT_AT_ONCE):
            some = stored[start : start + COLLECT_AT_ONCE]
            for digest in sorted(set(some) - await self._catalog.referenced(some, since)):
                if dry_run:
                    size = await asyncio.to_thread(self._store.unused_bytes, digest, UNUSED_SECONDS)
                    removed, num_bytes = removed + (size is not None), num_bytes + (size or 0)
                    continue
                # To its end, because content that is set aside must be removed or brought back.
                size = await run_to_end(self._remove(digest, since))
                removed, num_bytes = removed + (size is not None), num_bytes + (size or 0)
        if not dry_run:
            await self._catalog.collected(since)
        return removed, num_bytes

    async def _remove(self, digest: str, since: datetime) -> int | None:
        """Remove an adapter's content unless it is used. Return its bytes, None if it stays."""
        # Threads, because a bucket may take a minute.
        aside = await asyncio.to_thread(self._store.set_aside, digest, UNUSED_SECONDS)
        if aside is None:
            return None
        try:
            is_used = bool(await self._catalog.referenced([digest], since))
        except BaseException:
            await asyncio.shield(asyncio.to_thread(aside.bring_back))
            raise
        if is_used:
            await asyncio.to_thread(aside.bring_back)
            return None
        await asyncio.to_thread(aside.remove)
        return aside.num_bytes

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Clean the store before the first upload; at the end wait for work whose client has left, and until the last
        upload's folder is removed.
        """
        await asyncio.to_thread(self._store.clean)
        yield
        await all_ended()
        await Workplace.all_closed()
        self._checker.close()
        self._store.close()

    async def list(self, tenant: Tenant, may_see: Callable[[str], bool] = lambda name: True) -> web.Response:
        """Return the tenant's adapters. may_see: whether the key may see a name."""
        adapters = await self._catalog.list(tenant)
        return json_response(TenantAdapterList(data=[self.describe(each) for each in adapters if may_see(each.name)]))

    def describe(self, adapter: Adapter) -> TenantAdapter:
        """Return an adapter as the API shows it."""
        return TenantAdapter(
            name=adapter.name,
            version=adapter.version,
            base=self._catalog.bases.name_of(adapter.base),
            digest=digest_name(adapter.digest),
            rank=adapter.rank,
            size_bytes=adapter.num_bytes,
            created_at=adapter.created_at,
            state=adapter.state,
        )


class Adapters:
    """Routes for a tenant's own adapters."""

    def __init__(self, *, auth: Authenticator, catalog: Catalog, intake: AdapterIntake, quota: Quota) -> None:
        self._auth = auth
        self._quota = quota
        self._catalog = catalog
        self._intake = intake

    async def push(self, request: web.Request) -> web.Response:
        caller, size, most = tenants_caller(request), request.content_length, self._intake.max_bytes
        async with caller.uploading(request, self._auth, self._quota, size=size, most=most) as received:
            return await self._intake.push(request, caller, received)

    async def list(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        return await self._intake.list(principal.tenant, principal.may_use)

    async def get(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        name = request.match_info["name"]
        principal.check_model(name)
        return json_response(self._intake.describe(await self._catalog.get(principal.tenant, name)))


@contextmanager
def storing(seconds: float) -> Iterator[None]:
    """Translate the failures of an upload: raises BodyTimeout for a time-out, Unavailable for the store's OSError."""
    begun = time.monotonic()
    try:
        yield
    except TimeoutError as error:
        if time.monotonic() - begun < seconds:
            raise
        raise BodyTimeout(f"The upload exceeded the time limit of {seconds:g} s.") from error
    except OSError as error:
        # The error's full message names paths of this machine, so only `strerror` is logged.
        log.warning("an upload could not be stored: %s", error.strerror)
        raise Unavailable("The adapter store cannot be written.", code="adapter_store_unavailable") from error


def upload_rules(settings: Settings) -> UploadRules:
    """Return the limits of an upload."""
    return UploadRules(
        max_bytes=settings.max_upload_bytes,
        seconds=settings.upload_timeout,
        read_seconds=settings.body_timeout,
        min_rate=settings.min_upload_rate,
        grace_seconds=settings.body_timeout,
    )


def engine_limits(engines: Sequence[EngineRecord], max_rank: int | None, base: str) -> EngineLimits:
    """Return the largest rank and adapter size that the engines of a base model (its id) serve.

    max_rank: the operator's setting, which takes precedence over the engines' rank. An engine that reports no rank may
    serve DEFAULT_MAX_RANK, whatever the others serve.
    """
    states = [engine.state for engine in engines if engine.base == base and engine.takes_adapters]
    served_rank = max((state.max_lora_rank or DEFAULT_MAX_RANK for state in states), default=DEFAULT_MAX_RANK)
    return EngineLimits(
        max_rank=max_rank or served_rank,
        max_adapter_bytes=max((state.max_adapter_bytes for state in states), default=0),
    )
