"""`/admin/api/bases`: the base models, with their engines and their adapters' versions."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from adapters.manifest import BaseShape
from gateway.access.auth import Authenticator
from gateway.api.admin.prices import NewPrice
from gateway.api.requests.fields import check_text, json_response, read_body, read_flag, read_limit
from gateway.api.scopes import ACTOR
from gateway.errors import BadRequest
from gateway.fleet.discovery.registry import Registry
from gateway.process.background import run_to_end
from gateway.records.adapters.probes import Probes
from gateway.records.bases.base import Base, BaseState, Shape
from gateway.records.bases.registry import Bases
from gateway.records.cursors import decode_cursor, encode_cursor
from gateway.records.money.prices import ALL_ADAPTERS, EVERYTHING, MODEL, Price, PriceList, Prices
from wire.digests import bare_digest, digest_name
from wire.errors import ConfigError
from wire.model_config import context_length
from wire.model_names import version_name
from wire.text.tokenizer import Tokenizer, TokenizerError

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Rows of a page, at most and by default.
MAX_ROWS = 1000
Folder = Annotated[str, Meta(min_length=1, max_length=1024)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# Fields of the base of LORAPLEX_BASE_MODEL that every gateway with this setting reads from its settings, not from the
# table, with the place where it reads them.
FROM_SETTINGS: Mapping[str, str] = {
    "context_length": "LORAPLEX_MAX_MODEL_LEN, by default from the config.json in LORAPLEX_MODEL_DIR",
    "tokenizer": "LORAPLEX_MODEL_DIR",
    "config": "the config.json in LORAPLEX_MODEL_DIR",
}


class NewBase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a base model.

    digest: digest of its weights, as engines report it; null: engines are identified by the base's name. tokenizer:
    folder on the gateways' machines with the model's tokenizer and config.json; null: engines count prompts. config:
    content of the model's config.json, if the folder is not on this machine. context_length: by default the config's.
    """

    name: str
    digest: str | None = None
    tokenizer: Folder | None = None
    config: dict[str, Any] | None = None
    context_length: Tokens | None = None
    price: NewPrice | None = None


class BaseChanges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for changes of a base model. An absent field does not change. digest: digest of new weights, which replace
    the present ones; the engines and adapters of the present ones stay in service.
    """

    state: BaseState | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    tokenizer: Folder | UnsetType | None = UNSET
    config: dict[str, Any] | UnsetType = UNSET
    context_length: Tokens | UnsetType = UNSET


class BoundVersion(Struct, frozen=True, kw_only=True):
    """A version that is bound to a base model. name: tenant/name@version."""

    name: str
    state: str


class ShownBase(Struct, frozen=True, kw_only=True):
    """A base model. digest: the digest of its weights; null: engines are identified by the base's name. is_former:
    whether these weights were replaced. tokenizer: its folder on the gateways' machines.
    """

    object: Literal["base"] = "base"
    name: str
    digest: str | None
    is_former: bool
    state: BaseState
    tokenizer: str | None
    context_length: int
    created_at: datetime | None
    updated_at: datetime | None


class ListedBase(Struct, frozen=True, kw_only=True):
    """Weights of a base model, as in ShownBase, with the engines that serve them (URLs) and the versions bound to them.

    Engines without a base model on record have a row whose name is null, without the fields of a base model.
    """

    object: Literal["base"] = "base"
    name: str | None
    digest: str | None
    is_former: bool | UnsetType = UNSET
    state: BaseState | UnsetType = UNSET
    tokenizer: str | UnsetType | None = UNSET
    context_length: int | UnsetType = UNSET
    created_at: datetime | UnsetType | None = UNSET
    updated_at: datetime | UnsetType | None = UNSET
    engines: list[str]
    versions: list[BoundVersion]


class BaseList(Struct, frozen=True, kw_only=True):
    """Page of rows. total: their number on all pages. next: `after` of the next page; null on the last one."""

    object: Literal["list"] = "list"
    data: list[ListedBase]
    total: int
    next: str | None


class _Place(NamedTuple):
    """Place of a row in the list: the bases on record, the oldest first, each with its present weights first. Then
    engines without a base. added: seconds since the epoch. is_other: not the present weights. A cursor is the place of
    its page's last row.
    """

    is_lost: bool
    added: float
    id: str
    is_other: bool
    digest: str


class AdminBases:
    """Operator's routes for base models. The response to a change waits until every gateway knows it."""

    def __init__(
        self,
        bases: Bases,
        registry: Registry,
        probes: Probes,
        prices: Prices,
        known: PriceList,
        auth: Authenticator,
    ) -> None:
        self._bases = bases
        self._registry = registry
        self._probes = probes
        self._prices = prices
        self._known = known
        self._auth = auth

    async def list(self, request: web.Request) -> web.Response:
        """List the base models with one row per digest of their weights: the engines that serve these weights now, and
        the versions bound to them. Engines without a base model on record have rows without a name.
        """
        limit, after = read_limit(request, MAX_ROWS, MAX_ROWS), _read_cursor(request.query.get("after"))
        rows = await self._rows()
        places = [place for place in sorted(rows) if after is None or place > after]
        shown = places[:limit]
        data = [rows[place] for place in shown]
        following = encode_cursor(shown[-1]) if len(places) > limit else None
        return json_response(BaseList(data=data, total=len(rows), next=following))

    async def _rows(self) -> dict[_Place, ListedBase]:
        """Return all rows of the list by their places."""
        engines: dict[tuple[str | None, str | None], list[str]] = defaultdict(list)
        versions: dict[tuple[str | None, str | None], list[BoundVersion]] = defaultdict(list)
        for engine in self._registry.engines:
            if engine.is_up or engine.base is None:
                engines[engine.base, engine.state.base_digest].append(engine.url)
        for bound in await self._probes.bound():
            name = f"{bound.tenant}/{version_name(bound.name, bound.version)}"
            versions[bound.base, bound.base_digest].append(BoundVersion(name=name, state=bound.state))
        rows = {}
        for base in self._bases.all:
            found = {digest for base_id, digest in (*engines, *versions) if base_id == base.id} | base.digests
            added = 0.0 if base.created_at is None else base.created_at.timestamp()
            for digest in found or {None}:
                shown = msgspec.structs.asdict(describe_base(base, digest))
                urls = sorted(engines[base.id, digest])
                place = _Place(False, added, base.id, digest != base.digest, digest or "")
                rows[place] = ListedBase(**shown, engines=urls, versions=versions[base.id, digest])
        for (base_id, digest), urls in engines.items():
            if base_id is None:
                lost = ListedBase(name=None, digest=_named(digest), engines=sorted(urls), versions=[])
                rows[_Place(True, 0.0, "", False, digest or "")] = lost
        return rows

    async def add(self, request: web.Request) -> web.Response:
        """Add a base model and return 201."""
        base = await self.add_base(await read_body(request, NewBase), request[ACTOR])
        return json_response(describe_base(base, base.digest), status=201)

    async def change(self, request: web.Request) -> web.Response:
        """Drain, resume, retire or replace a base model, or change its tokenizer."""
        given, force = await read_body(request, BaseChanges), read_flag(request, "force")
        base = await self.change_base(request.match_info["name"], given, request[ACTOR], force=force)
        return json_response(describe_base(base, base.digest))

    async def add_base(self, new_base: NewBase, actor: str) -> Base:
        """Add a base model and return it. Raises BadRequest, Conflict, NameTaken."""
        name = new_base.name
        check_text(name, "name")
        if not MODEL.fullmatch(name) or name in (EVERYTHING, ALL_ADAPTERS):
            raise BadRequest("name: expected 1 to 256 characters, not '*' or '*/*'.", param="name")
        digest = None if new_base.digest is None else _bare(new_base.digest)
        folder = await asyncio.to_thread(_read_folder, new_base.tokenizer)
        config = folder if new_base.config is None else new_base.config
        if config is None:
            raise BadRequest(
                "config: expected the content of the model's config.json, or its folder on this machine as tokenizer.",
                param="config",
            )
        base = Base(
            name=name,
            digest=digest,
            tokenizer=new_base.tokenizer,
            shape=_shape(config),
            context_length=new_base.context_length or _context(config),
        )
        return await run_to_end(self._add(base, None if new_base.price is None else new_base.price.price(), actor))

    async def _add(self, base: Base, price: Price | None, actor: str) -> Base:
        base = await self._bases.add(base, actor)
        if price is not None:
            await self._prices.put(base.name, price, actor)
            await self._known.refresh()
        await self._auth.catch_up()
        return base

    async def change_base(
        self, name: str, changed_fields: BaseChanges, actor: str, *, force: bool = False, seen: Base | None = None
    ) -> Base:
        """Change a base model and return it. seen: the base model on which the change is based.

        Raises BadRequest, Conflict, NameTaken, RecordNotFound, Changed.
        """
        changes = {
            field: value for field, value in msgspec.structs.asdict(changed_fields).items() if value is not UNSET
        }
        own = self._bases.own if self._bases.own is not None and self._bases.own.name == name else None
        if own is not None:
            _check_settings(own, changes)
        if "digest" in changes:
            changes["digest"] = _bare(changes["digest"])
        config = changes.pop("config", None)
        if changes.get("tokenizer") is not None:
            folder = await asyncio.to_thread(_read_folder, changes["tokenizer"])
            config = folder if config is None else config
        if config is not None:
            changes["shape"] = _shape(config)
            if own is None:
                changes.setdefault("context_length", _context(config))
        if not changes:
            raise BadRequest("Expected a field to change: state, digest, tokenizer, config or context_length.")
        return await self._bases.change(name, changes, actor, force=force, seen=seen)


def describe_base(base: Base, digest: str | None) -> ShownBase:
    """Return a base model with some weights as the API shows it."""
    return ShownBase(
        name=base.name,
        digest=_named(digest),
        is_former=digest is not None and base.digest is not None and digest != base.digest,
        state=base.state,
        tokenizer=base.tokenizer,
        context_length=base.context_length,
        created_at=base.created_at,
        updated_at=base.updated_at,
    )


def _read_cursor(cursor: str | None) -> _Place | None:
    """Return the place in a cursor; None without one. Raises BadRequest."""
    if cursor is None:
        return None
    try:
        place: _Place = decode_cursor(cursor, _Place)
    except ValueError as error:
        raise BadRequest("after: expected the `next` of another page.", param="after") from error
    return place


def _is_as_set(base: Base, field: str, value: Any) -> bool:
    if field == "config":
        return value is None or _shape(value) == base.shape
    return bool(value == getattr(base, field))


def _check_settings(base: Base, changes: Mapping[str, Any]) -> None:
    """Raise BadRequest for a change that would have no effect at gateways that read the field from their settings.

    Folder and config of new weights come with their digest; they are on record for gateways without the setting.
    """
    for field, place in FROM_SETTINGS.items():
        is_of_weights = field != "context_length" and "digest" in changes
        if field in changes and not is_of_weights and not _is_as_set(base, field, changes[field]):
            raise BadRequest(
                f"{field}: '{base.name}' is the base model of LORAPLEX_BASE_MODEL, so gateways read it from {place}. "
                "Change it there and restart them.",
                param=field,
            )


def _named(digest: str | None) -> str | None:
    return None if digest is None else digest_name(digest)


def _bare(digest: str) -> str:
    match = _DIGEST.fullmatch(bare_digest(digest))
    if match is None:
        raise BadRequest("digest: expected 64 hexadecimal digits, as an engine's /state has them.", param="digest")
    return match[0]


def _read_folder(folder: str | None) -> dict[str, Any] | None:
    """Return the config.json of a tokenizer's folder; None if it is not on this machine. Raises BadRequest."""
    if folder is None:
        return None
    try:
        # RuntimeError: `~name` without such a person. OSError: a path that the system refuses, such as a longer one.
        path = Path(folder).expanduser()
        if not path.is_dir():
            return None
        Tokenizer.from_dir(path)
        config = json.loads((path / "config.json").read_text("utf-8"))
    except (TokenizerError, OSError, ValueError, RuntimeError) as error:
        raise BadRequest(f"tokenizer: {error}.", param="tokenizer") from error
    return config if isinstance(config, dict) else None


def _shape(config: Mapping[str, Any]) -> Shape:
    try:
        return Shape.of(BaseShape.from_config(config))
    except ValueError as error:
        raise BadRequest(f"config: {error}.", param="config") from error


def _context(config: Mapping[str, Any]) -> int:
    if not isinstance(config.get("max_position_embeddings"), int):
        raise BadRequest(
            "context_length: is required, because the config has no max_position_embeddings.", param="context_length"
        )
    try:
        return context_length(dict(config))
    except ConfigError as error:
        raise BadRequest(f"config: {error}.", param="config") from error
