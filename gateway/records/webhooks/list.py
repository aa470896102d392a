"""List of webhooks with the state of their deliveries: filters, order and pages."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, func, or_, select

from gateway.records.events.tables import event_deliveries, webhooks
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants
from gateway.records.webhooks.targets import Webhook, read_webhook, select_webhooks

State = Literal["failing", "waiting", "works", "unused"]
STATES: tuple[State, ...] = get_args(State)
Sort = Literal["name", "tenant", "waiting", "failures", "delivered_at", "created_at"]
SORTS: tuple[Sort, ...] = get_args(Sort)


class TargetFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of webhooks; None: any. tenant: its name; "" for the operators' own. q: part of the name."""

    tenant: str | None = None
    state: State | None = None
    q: str | None = None


class ListedWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook and its deliveries. waiting: number of pending deliveries. given_up: number of events
    of the last 90 days that were not delivered within a day.
    """

    webhook: Webhook
    waiting: int
    given_up: int

    @property
    def state(self) -> State:
        if self.webhook.failures:
            return "failing"
        if self.waiting:
            return "waiting"
        return "unused" if self.webhook.delivered_at is None else "works"


class TargetLists:
    """Queries of webhooks. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(
        self, criteria: TargetFilter, *, sort: Sort = "name", descending: bool = False, limit: int = 50, offset: int = 0
    ) -> tuple[list[ListedWebhook], int]:
        """Return a page of the matching webhooks, and their number. Webhooks without the sort's value come last."""
        waiting, given_up = _number("pending"), _number("failed")
        orders: Mapping[str, ColumnElement[Any]] = {"tenant": tenants.c.name, "waiting": waiting}
        order = orders.get(sort, webhooks.c.get(sort))
        assert order is not None
        conditions = _conditions(criteria, waiting)
        query = select_webhooks().add_columns(waiting.label("waiting"), given_up.label("given_up")).where(*conditions)
        query = query.order_by(order.is_(None), order.desc() if descending else order, webhooks.c.name)
        joined = webhooks.outerjoin(tenants, tenants.c.id == webhooks.c.tenant_id)
        counted = select(func.count()).select_from(joined).where(*conditions)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.limit(limit).offset(offset))).all()
            total = (await connection.execute(counted)).scalar_one()
        return [
            ListedWebhook(webhook=read_webhook(row), waiting=row.waiting, given_up=row.given_up) for row in rows
        ], total

    async def get(self, webhook: Webhook) -> ListedWebhook:
        """Return a webhook with its deliveries."""
        query = select(_number("pending"), _number("failed")).where(webhooks.c.id == webhook.id)
        async with self._database.read() as connection:
            waiting, given_up = (await connection.execute(query)).one_or_none() or (0, 0)
        return ListedWebhook(webhook=webhook, waiting=waiting, given_up=given_up)

    async def sums(self) -> dict[str, int]:
        """Return the number of webhooks as `targets`, of those whose last attempt failed, and of waiting events."""
        number = select(func.count()).select_from(webhooks)
        queries = {
            "targets": number,
            "failing": number.where(webhooks.c.failures > 0),
            "waiting": select(func.count()).select_from(event_deliveries).where(event_deliveries.c.state == "pending"),
        }
        async with self._database.read() as connection:
            return {name: (await connection.execute(query)).scalar_one() for name, query in queries.items()}


def _number(state: str) -> Any:
    """Count the deliveries of a state of the row's webhook; the index of the table has both columns."""
    table = event_deliveries
    query = select(func.count()).select_from(table).where(table.c.webhook_id == webhooks.c.id, table.c.state == state)
    return query.correlate(webhooks).scalar_subquery()


def _conditions(criteria: TargetFilter, waiting: ColumnElement[Any]) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if criteria.tenant is not None:
        conditions.append(tenants.c.name == criteria.tenant if criteria.tenant else webhooks.c.tenant_id.is_(None))
    if criteria.q:
        mail = webhooks.c.url.startswith("mailto:") & func.lower(webhooks.c.url).contains(
            criteria.q.lower(), autoescape=True
        )
        conditions.append(or_(webhooks.c.name.contains(criteria.q.lower(), autoescape=True), mail))
    if criteria.state is not None:
        works = webhooks.c.failures == 0
        of_state: dict[State, ColumnElement[bool]] = {
            "failing": webhooks.c.failures > 0,
            "waiting": works & (waiting > 0),
            "works": works & (waiting == 0) & webhooks.c.delivered_at.is_not(None),
            "unused": works & (waiting == 0) & webhooks.c.delivered_at.is_(None),
        }
        conditions.append(of_state[criteria.state])
    return conditions
