"""Webhooks and e-mail addresses that receive events, and the deliveries that wait for them."""

import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import Row, Select, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.events.tables import event_deliveries, events, webhooks
from gateway.records.sql.database import Database
from gateway.records.sql.name_locks import lock_creation
from gateway.records.sql.tables import tenants
from gateway.records.tenants.tenants import Tenant
from gateway.records.unchanged import check_unchanged

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NO_WEBHOOK = "There is no webhook of this name."
# Age at which a delivery is given up.
GIVEN_UP = timedelta(days=1)
# Seconds until the next attempt, by the number of failures since the last delivery; the last value repeats.
BACKOFF = (5, 15, 60, 300, 900, 1800, 3600)
MAX_OPERATORS, MAX_OF_TENANT = 100, 5
ALL_TYPES = "*"


def shown_url(url: str) -> str:
    """Return a URL without its path and query, which often hold a secret."""
    if url.startswith("mailto:"):
        return url
    parts = urlsplit(url)
    rest = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return f"{parts.scheme}://{parts.netloc}/{'...' if len(rest) > 1 else ''}"


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """A target of events.

    url: https://, http:// to an allowed host, or mailto:. tenant: name of the tenant whose events it receives;
    None for operators' webhooks, which receive all. types: None for all. failures: failed attempts since the last
    delivery. error: the last attempt's error, None if it was delivered.
    """

    name: str
    id: str
    tenant: str | None
    url: str
    types: tuple[str, ...] | None
    created_at: datetime
    failures: int
    retry_at: datetime | None
    delivered_at: datetime | None
    error: str | None

    @property
    def is_mail(self) -> bool:
        return self.url.startswith("mailto:")


class Pending(NamedTuple):
    """A delivery that is due."""

    webhook: Webhook
    event_id: str
    type: str
    tenant: str | None
    data: dict[str, Any]
    created_at: datetime


class Webhooks:
    """The table of webhooks. Raises RecordNotFound, BadRequest and Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> list[Webhook]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select_webhooks().order_by(webhooks.c.name))).all()
        return [read_webhook(row) for row in rows]

    async def get(self, name: str) -> Webhook:
        async with self._database.read() as connection:
            return await _get(connection, name)

    async def put(
        self,
        name: str,
        url: str,
        types: Sequence[str] | None,
        tenant: Tenant | None,
        actor: str,
        *,
        seen: Webhook | None = None,
    ) -> tuple[Webhook, bool]:
        """Add or change a webhook. Return it and whether it is new. Deliveries to a changed webhook are tried at once.

        A webhook never changes its tenant: a secret that one tenant knows must not sign the events of another.
        seen: the webhook on which the change is based. Raises BadRequest, Changed.
        """
        if not NAME.fullmatch(name):
            raise BadRequest(
                "Expected a name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', starting with a letter or digit.",
                param="name",
            )
        tenant_id = None if tenant is None else tenant.id
        values: dict[str, Any] = {"url": url, "types": _as_text(types)}
        values |= {"failures": 0, "retry_at": None, "error": None}
        async with self._database.write() as connection:
            # All names share a lock, because the number of webhooks is bounded too.
            await lock_creation(connection, "webhooks")
            this = webhooks.c.name == name
            before = (await connection.execute(select(webhooks).where(this).with_for_update())).one_or_none()
            if seen is not None:
                check_unchanged(before and (before.url, before.types), (seen.url, _as_text(seen.types)))
            if before is not None and before.tenant_id != tenant_id:
                raise BadRequest("tenant: a webhook cannot change its tenant; delete it first.", param="tenant")
            if before is None:
                await _check_room(connection, tenant_id)
                new = {"name": name, "id": uuid.uuid4().hex, "tenant_id": tenant_id, "created_at": datetime.now(UTC)}
                await connection.execute(insert(webhooks).values(**new, **values))
            else:
                await connection.execute(update(webhooks).where(this).values(**values))
            of, detail = None if tenant is None else tenant.name, {"url": shown_url(url), "types": types}
            old = None if before is None else {"url": shown_url(before.url), "types": _read_types(before.types)}
            await record_change(connection, actor, "webhook.put", name, detail, before=old, tenant=of)
            return await _get(connection, name), before is None

    async def delete(self, name: str, actor: str) -> None:
        """Delete a webhook with its pending deliveries."""
        async with self._database.write() as connection:
            found = await _get(connection, name)
            await connection.execute(delete(webhooks).where(webhooks.c.name == name))
            await record_change(connection, actor, "webhook.delete", name, tenant=found.tenant)

    async def due(self) -> list[Pending]:
        """Return at most one due delivery of each webhook: the one with the fewest attempts, then the oldest.

        So an event that a target keeps refusing does not block the target's other events.
        """
        now = datetime.now(UTC)
        table = event_deliveries
        rank = func.row_number().over(
            partition_by=table.c.webhook_id, order_by=(table.c.attempts, table.c.created_at, table.c.event_id)
        )
        ranked = select(table.c.event_id, table.c.webhook_id, rank.label("place")).where(table.c.state == "pending")
        first = ranked.subquery()
        query = select_webhooks().add_columns(
            events.c.id.label("event_id"),
            events.c.type.label("event_type"),
            events.c.tenant.label("event_tenant"),
            events.c.data.label("event_data"),
            events.c.created_at.label("event_at"),
        )
        query = query.join(first, first.c.webhook_id == webhooks.c.id).join(events, events.c.id == first.c.event_id)
        query = query.where(first.c.place == 1, (webhooks.c.retry_at.is_(None)) | (webhooks.c.retry_at <= now))
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [
            Pending(
                read_webhook(row),
                row.event_id,
                row.event_type,
                row.event_tenant,
                msgspec.json.decode(row.event_data),
                row.event_at,
            )
            for row in rows
        ]

    async def attempted(self, pending: Pending, error: str | None) -> None:
        """Record an attempt. error: None if the event was delivered. A failed one is tried again until GIVEN_UP.

        A webhook that was changed during a failed attempt is as it was before its first attempt.
        """
        now, webhook = datetime.now(UTC), pending.webhook
        table = event_deliveries
        this = (table.c.event_id == pending.event_id) & (table.c.webhook_id == webhook.id)
        tried = (webhooks.c.id == webhook.id) & (webhooks.c.url == webhook.url)
        if error is None:
            state = "delivered"
            changes: dict[str, Any] = {"failures": 0, "retry_at": None, "delivered_at": now, "error": None}
        else:
            state = "failed" if now - pending.created_at > GIVEN_UP else "pending"
            wait = BACKOFF[min(webhook.failures, len(BACKOFF) - 1)]
            changes = {"failures": webhook.failures + 1, "retry_at": now + timedelta(seconds=wait)}
            changes["error"] = error[:256]
            tried &= webhooks.c.failures == webhook.failures
        async with self._database.write() as connection:
            await connection.execute(update(webhooks).where(tried).values(**changes))
            await connection.execute(update(table).where(this).values(state=state, attempts=table.c.attempts + 1))


async def _check_room(connection: AsyncConnection, tenant_id: str | None) -> None:
    limit = MAX_OPERATORS if tenant_id is None else MAX_OF_TENANT
    number = select(func.count()).select_from(webhooks).where(webhooks.c.tenant_id.is_not_distinct_from(tenant_id))
    if (await connection.execute(number)).scalar_one() >= limit:
        whose = "operators have" if tenant_id is None else "a tenant has"
        raise BadRequest(f"name: {whose} at most {limit} webhooks.", param="name")


def _as_text(types: Sequence[str] | None) -> str:
    """Return the column of the types of events; None: all."""
    return ALL_TYPES if types is None else f",{','.join(types)},"


async def _get(connection: AsyncConnection, name: str) -> Webhook:
    # Databases refuse a NUL in a text.
    row = None
    if NAME.fullmatch(name):
        row = (await connection.execute(select_webhooks().where(webhooks.c.name == name))).one_or_none()
    if row is None:
        raise RecordNotFound(NO_WEBHOOK, param="name")
    return read_webhook(row)


def select_webhooks() -> Select[Any]:
    return select(webhooks, tenants.c.name.label("tenant")).outerjoin(tenants, tenants.c.id == webhooks.c.tenant_id)


def _read_types(text: str) -> tuple[str, ...] | None:
    return None if text == ALL_TYPES else tuple(text.strip(",").split(","))


def read_webhook(row: Row[Any]) -> Webhook:
    types = _read_types(row.types)
    names = ("name", "id", "tenant", "url", "created_at", "failures", "retry_at", "delivered_at", "error")
    return Webhook(types=types, **{name: getattr(row, name) for name in names})
