"""Routes of golden answers, for a tenant itself and for operators under `/admin/api/tenants`."""

import inspect
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.api.adapters.caller import AdapterCaller, find_caller, version_of
from gateway.api.golden.checking import GoldenChecks
from gateway.api.golden.requests import GoldenRequests, Question
from gateway.api.requests.fields import json_response, read_raw
from gateway.errors import BadRequest, NoEngine, translate
from gateway.fleet.engines.engine import EngineRecord
from gateway.quota.quota import Quota
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.golden import Difference, Golden, GoldenAnswer, GoldenCheck, GoldenPrompt, GoldenSet
from gateway.records.bases.base import EngineSoftware
from gateway.records.tenants.tenants import Tenant, Tenants
from wire.decoding import decode
from wire.digests import digest_name
from wire.errors import BadRequest as ProtocolError
from wire.text.tokenizer import ChatTemplateError

MAX_PROMPTS, MAX_BODY_BYTES, MAX_TOKENS = 16, 2**16, 64


class NewPrompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An evaluation prompt: either `messages` or `prompt`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 32


class NewGolden(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompts: Annotated[list[NewPrompt], Meta(min_length=1, max_length=MAX_PROMPTS)]

    def check(self) -> None:
        for i, each in enumerate(self.prompts):
            if (each.messages is None) == (each.prompt is None):
                raise ProtocolError.of(f"prompts[{i}]", "expected either messages or prompt.")


class ShownSoftware(Struct, frozen=True, kw_only=True):
    """Software of an engine. version: its release. base: digest of its weights. null: unknown."""

    kind: str
    version: str | None
    base: str | None


class ShownPrompt(Struct, frozen=True, kw_only=True):
    """A prompt and its golden answer. engine: the software that made the answer."""

    max_tokens: int
    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    answer: str
    engine: ShownSoftware


ShownDifference: Any = defstruct(
    "ShownDifference",
    [*((field.name, field.type) for field in msgspec.structs.fields(Difference)), ("golden", str)],
    frozen=True,
    kw_only=True,
    namespace={"__doc__": f"{inspect.getdoc(Difference)} golden: the golden answer."},
)


class ShownCheck(Struct, frozen=True, kw_only=True):
    """A check under an engine's software. agreement: share of the prompts whose answer is the golden one. url: the
    engine's URL, for an operator.
    """

    engine: ShownSoftware
    checked_at: datetime
    agreement: float
    differences: list[ShownDifference]
    url: str | UnsetType = UNSET


class ShownGolden(Struct, frozen=True, kw_only=True):
    """Prompts and golden answers of a version, and the last check under each engine software, the newest first."""

    object: Literal["adapter.golden"] = "adapter.golden"
    name: str
    version: int
    created_at: datetime
    prompts: list[ShownPrompt]
    checks: list[ShownCheck]


class DeletedGolden(Struct, frozen=True, kw_only=True):
    object: Literal["adapter.golden"] = "adapter.golden"
    name: str
    version: int
    deleted: bool = True


class CheckedGolden(Struct, frozen=True, kw_only=True):
    """New checks of a version's golden answers."""

    object: Literal["adapter.golden_check"] = "adapter.golden_check"
    name: str
    version: int
    checks: list[ShownCheck]


class GoldenRoutes:
    """Routes of golden answers. An absent version and another tenant's get the same answer.

    A tenant's key pays for its prompts, and needs the scope `inference` for them. An operator's prompts are free.
    """

    def __init__(
        self,
        *,
        tenants: Tenants,
        auth: Authenticator,
        catalog: Catalog,
        golden: Golden,
        requests: GoldenRequests,
        checks: GoldenChecks,
        quota: Quota,
    ) -> None:
        self._tenants = tenants
        self._auth = auth
        self._catalog = catalog
        self._golden = golden
        self._requests = requests
        self.checks = checks
        self._quota = quota

    async def get(self, request: web.Request) -> web.Response:
        """Return the prompts and golden answers of a version, and the last check under each engine software."""
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        return json_response(_describe(name, number, await self._golden.get(caller.tenant, name, number)))

    async def put(self, request: web.Request) -> web.Response:
        """Ask the prompts of the body, and keep the answers as the version's golden ones."""
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        payer = await self._payer(request, caller)
        raw = await read_raw(request, caller.owner)
        if len(raw) > MAX_BODY_BYTES:
            raise BadRequest(f"prompts: expected a body of at most {MAX_BODY_BYTES} bytes.", param="prompts")
        given = decode(NewGolden, raw)
        prompts = [GoldenPrompt(**msgspec.structs.asdict(each)) for each in given.prompts]
        found = await self._catalog.versions.get(caller.tenant, name, number)
        if not found.is_served:
            raise BadRequest(f"version: the version is {found.state}; expected a ready one.", param="version")
        await caller.count_change(request, self._quota)
        await self._golden.check_room(caller.tenant, name, number)
        questions = await self._read(caller.tenant, name, number, prompts)
        answers = [await self._requests.ask(question, payer) for question in questions]
        made = await self._golden.put(caller.tenant, name, number, prompts, answers, caller.actor)
        return json_response(_describe(name, number, made))

    async def delete(self, request: web.Request) -> web.Response:
        """Remove the prompts and golden answers of a version."""
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        await caller.count_change(request, self._quota)
        await self._golden.delete(caller.tenant, name, number, caller.actor)
        return json_response(DeletedGolden(name=name, version=number))

    async def check(self, request: web.Request) -> web.Response:
        """Ask the prompts of a version again on engines that serve its base model, and record the differences.

        A tenant's check asks one engine of each software, an operator's every engine, or that of the query.
        """
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        payer = await self._payer(request, caller)
        # Refuses a version without golden answers.
        await self._golden.get(caller.tenant, name, number)
        engines = await self.checks.engines(caller.tenant, name, number)
        if payer is not None:
            engines = [*{each.software: each for each in engines}.values()]
        elif (url := request.query.get("engine")) is not None:
            engines = _only(engines, url)
        if not engines:
            raise NoEngine
        await caller.count_change(request, self._quota)
        results = []
        for engine in engines:
            found, check = await self.checks.check(caller.tenant, name, number, engine, payer)
            results.append(_describe_check(found, check, UNSET if payer is not None else engine.url))
        return json_response(CheckedGolden(name=name, version=number, checks=results))

    async def _payer(self, request: web.Request, caller: AdapterCaller) -> TenantPrincipal | None:
        """Return the key that pays for prompts; None for an operator. Raises Forbidden if it lacks the scope."""
        if caller.principal is None:
            return None
        return await self._auth.tenant(request.headers.get("Authorization"), "inference")

    async def _read(self, tenant: Tenant, name: str, number: int, prompts: Sequence[GoldenPrompt]) -> list[Question]:
        """Return the checked prompts. An error names the prompt."""
        questions = []
        for i, prompt in enumerate(prompts):
            try:
                questions.append(await self._requests.read(tenant, name, number, prompt))
            except (BadRequest, ProtocolError, ChatTemplateError) as error:
                found = translate(error, "")
                param = f"prompts[{i}].{found.param}" if found.param else f"prompts[{i}]"
                raise BadRequest(f"prompts[{i}]: {found.message}", param=param, code=found.code) from error
        return questions


def _only(engines: Sequence[EngineRecord], url: str) -> list[EngineRecord]:
    found = [each for each in engines if each.url == url.rstrip("/")]
    if not found:
        known = ", ".join(each.url for each in engines) or "none"
        raise BadRequest(f"engine: expected an available engine of the version's base model: {known}.", param="engine")
    return found


def _describe(name: str, version: int, golden: GoldenSet) -> ShownGolden:
    pairs = zip(golden.prompts, golden.answers, strict=True)
    return ShownGolden(
        name=name,
        version=version,
        created_at=golden.created_at,
        prompts=[_describe_prompt(*pair) for pair in pairs],
        checks=[_describe_check(golden, check) for check in golden.checks],
    )


def _describe_prompt(prompt: GoldenPrompt, answer: GoldenAnswer) -> ShownPrompt:
    return ShownPrompt(
        max_tokens=prompt.max_tokens,
        messages=UNSET if prompt.messages is None else prompt.messages,
        prompt=UNSET if prompt.prompt is None else prompt.prompt,
        answer=answer.text,
        engine=_describe_software(answer.software),
    )


def _describe_check(golden: GoldenSet, check: GoldenCheck, url: str | UnsetType = UNSET) -> ShownCheck:
    num_prompts = len(golden.prompts)
    return ShownCheck(
        engine=_describe_software(check.software),
        checked_at=check.checked_at,
        agreement=(num_prompts - len(check.differences)) / num_prompts,
        differences=[
            ShownDifference(**msgspec.structs.asdict(each), golden=golden.answers[each.prompt].text)
            for each in check.differences
        ],
        url=url,
    )


def _describe_software(software: EngineSoftware) -> ShownSoftware:
    return ShownSoftware(
        kind=software.kind,
        version=software.version or None,
        base=digest_name(software.base_digest) if software.base_digest else None,
    )
