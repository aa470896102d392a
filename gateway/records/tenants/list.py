"""Lists of tenants: filters, order and pages, with each tenant's spend in the periods of budgets and its forecast."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from sqlalchemy import (
    ColumnElement,
    Float,
    Row,
    Select,
    Subquery,
    and_,
    case,
    cast,
    extract,
    func,
    literal,
    or_,
    select,
)

from gateway.errors import BadRequest
from gateway.limits.kinds import BUDGET, BY_LETTER, PERIOD_BY_LETTER
from gateway.records.cooperative_rows import in_pieces, read_rows
from gateway.records.cursors import check_moment, decode_cursor, encode_cursor
from gateway.records.sql.database import Database
from gateway.records.sql.tables import UtcDateTime, api_keys, tenants
from gateway.records.tenants.limits import limit_value
from gateway.records.tenants.month_sums import DAY, FORECAST_DAYS, month_sums, periods
from gateway.records.tenants.tenants import Tenant, read_tenant
from gateway.records.usage.tenant_sums import TenantSums

CursorSort = Literal["name", "spend", "requests", "created"]
# The values of the other orders change with time, so their pages have offsets and no cursors.
Sort = CursorSort | Literal["plan", "forecast", "last_used_at"]
SORTS = get_args(CursorSort)
# Place of tenants that were never used in the order of the last use.
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class TenantFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that all must hold; None: any. plan: "" means without a plan. over_budget: least part of any budget of
    the tenant that is spent; tenants without a budget never match. q: a part of the name, display name, external id or
    contact, in any case. idle_days: days for which the tenant has existed without a use of a key.
    """

    plan: str | None = None
    tag: str | None = None
    suspended: bool | None = None
    over_budget: float | None = None
    q: str | None = None
    idle_days: int | None = None


class TenantMonth(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of a tenant in this calendar month (UTC). spend, forecast: in micro-units.

    spent: spend in the present periods of budgets, by the period's name. forecast: the expected spend at the month's
    end if the coming days cost as much as the mean of the last ones. last_used_at: the last use of any of its keys,
    exact to a minute.
    """

    requests: int = 0
    spend: int = 0
    spent: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PERIOD_BY_LETTER.values(), 0))
    forecast: int = 0
    last_used_at: datetime | None = None


class BudgetUse(NamedTuple):
    """Spend of a tenant's budget, in micro-units. period: "month" and the like."""

    period: str
    spent: int
    budget: int


class TenantPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tenants. total: number of tenants on all pages. next: the cursor of the next page; None after the last
    page.
    """

    rows: list[tuple[Tenant, TenantMonth]]
    total: int
    next: str | None


class TenantLists:
    """Queries of tenants. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tenant_sums = TenantSums(database)

    async def page(
        self,
        criteria: TenantFilter,
        *,
        sort: Sort = "name",
        descending: bool = False,
        limit: int = 50,
        after: str | None = None,
        offset: int = 0,
    ) -> TenantPage:
        """Return a page of the matching tenants. after: the previous page's `next`; offset: skipped tenants instead.

        Raises BadRequest for a cursor of another order.
        """
        now = datetime.now(UTC)
        sums = await self._sums(now)
        found, order = _matching(criteria, sort, now, sums, self._database.dialect)
        query = found.order_by(order.desc() if descending else order, tenants.c.name).limit(limit + 1).offset(offset)
        if after is not None:
            query = query.where(_behind(after, sort, descending, order))
        # The count needs no order, whose sums of all tenants take longest.
        counted, _ = _matching(criteria, "name", now, sums, self._database.dialect)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            total = (await connection.execute(select(func.count()).select_from(counted.subquery()))).scalar_one()
        shown = await in_pieces(rows[:limit], read_tenant)
        months = await self.months(shown, now)
        last = rows[limit - 1] if len(rows) > limit and sort in SORTS else None
        return TenantPage(
            rows=[(tenant, months[tenant.id]) for tenant in shown],
            total=total,
            next=None if last is None else encode_cursor([sort, descending, last.sorted_by, last.name]),
        )

    async def all(self, criteria: TenantFilter) -> list[Tenant]:
        """Return all matching tenants, in the order of their ids."""
        now = datetime.now(UTC)
        found, _ = _matching(criteria, "name", now, await self._sums(now), self._database.dialect)
        async with self._database.read() as connection:
            return await read_rows(connection, found.order_by(tenants.c.id), read_tenant)

    async def months(self, listed: Sequence[Tenant], now: datetime | None = None) -> dict[str, TenantMonth]:
        """Return the month of each tenant by its id."""
        now = now or datetime.now(UTC)
        ids = [tenant.id for tenant in listed]
        sums, used = await self._sums(now, ids), _used(api_keys.c.tenant_id.in_(ids))
        async with self._database.read() as connection:
            spent = {row.tenant_id: row for row in (await connection.execute(select(sums))).all()}
            uses = {row.tenant_id: row.used_at for row in (await connection.execute(select(used))).all()}
        made = await in_pieces(listed, lambda each: (each.id, _month(each, spent.get(each.id), uses.get(each.id), now)))
        return dict(made)

    async def over_budget(self, part: float, limit: int) -> list[tuple[str, BudgetUse]]:
        """Return the names of tenants that have spent the greatest parts of any budget, with that budget.

        part: the minimum. Suspended tenants are left out.
        """
        sums = await self._sums(datetime.now(UTC))
        kinds = sorted(BUDGET)
        shares = [_share(sums, kind) for kind in kinds]
        greatest = func.greatest if self._database.dialect == "postgresql" else func.max
        columns = [
            column.label(f"{name}_{kind}")
            for kind in kinds
            for name, column in (("spent", sums.c[f"spent_{kind}"]), ("budget", limit_value(BY_LETTER[kind].name)))
        ]
        query = select(tenants.c.name, *columns).join(sums, sums.c.tenant_id == tenants.c.id)
        query = query.where(tenants.c.suspended.is_(False), or_(*(share >= part for share in shares)))
        async with self._database.read() as connection:
            rows = await connection.execute(query.order_by(greatest(*shares).desc(), tenants.c.name).limit(limit))
            return [(row.name, _tightest([_use(row, kind) for kind in kinds])) for row in rows]

    async def _sums(self, now: datetime, ids: Sequence[str] | None = None) -> Subquery:
        """Select the sums of each tenant, or of those of some ids."""
        complete = await self._tenant_sums.complete()
        return month_sums(now, ids, self._database.dialect, by_tenant=complete)


def tightest_budget(tenant: Tenant, month: TenantMonth) -> BudgetUse | None:
    """Return the tenant's budget of which the largest part is spent; None without a budget."""
    found = [
        BudgetUse(period, month.spent.get(period, 0), budget)
        for kind, period in PERIOD_BY_LETTER.items()
        if (budget := getattr(tenant.limits, BY_LETTER[kind].name))
    ]
    return _tightest(found) if found else None


def _tightest(uses: Sequence[BudgetUse]) -> BudgetUse:
    return max(uses, key=lambda use: use.spent / use.budget if use.budget else 0)


def _use(row: Row[Any], kind: str) -> BudgetUse:
    return BudgetUse(PERIOD_BY_LETTER[kind], getattr(row, f"spent_{kind}"), getattr(row, f"budget_{kind}") or 0)


def _matching(
    criteria: TenantFilter, sort: Sort, now: datetime, sums: Subquery, dialect: str
) -> tuple[Select[Any], ColumnElement[Any]]:
    """Select the matching tenants, and return the column that orders them, which is also labelled `sorted_by`."""
    source: Any = tenants
    conditions: list[ColumnElement[bool]] = []
    orders: dict[str, ColumnElement[Any]] = {"created": tenants.c.created_at, "plan": func.coalesce(tenants.c.plan, "")}
    order = orders.get(sort, tenants.c.name)
    if sort in ("spend", "requests", "forecast") or criteria.over_budget is not None:
        # Only this filter or sort needs the sums of all tenants. The sums shown on a page are read by its tenants' ids.
        source = source.outerjoin(sums, sums.c.tenant_id == tenants.c.id)
        if sort in ("spend", "requests"):
            order = func.coalesce(sums.c[sort], 0)
        if sort == "forecast":
            order = func.coalesce(_forecast(sums, now, dialect), 0)
        if criteria.over_budget is not None:
            conditions.append(or_(*(_over(sums, kind, criteria.over_budget) for kind in sorted(BUDGET))))
    if criteria.idle_days is not None or sort == "last_used_at":
        used = _used()
        source = source.outerjoin(used, used.c.tenant_id == tenants.c.id)
        if sort == "last_used_at":
            order = func.coalesce(used.c.used_at, LONG_AGO, type_=used.c.used_at.type)
    if criteria.idle_days is not None:
        since = now - timedelta(days=criteria.idle_days)
        conditions += [tenants.c.created_at <= since, or_(used.c.used_at.is_(None), used.c.used_at <= since)]
    if criteria.plan is not None:
        conditions.append(tenants.c.plan == criteria.plan if criteria.plan else tenants.c.plan.is_(None))
    if criteria.tag is not None:
        conditions.append(tenants.c.tags.contains(f",{criteria.tag},", autoescape=True))
    if criteria.suspended is not None:
        conditions.append(tenants.c.suspended.is_(criteria.suspended))
    if criteria.q:
        texts = (tenants.c.name, tenants.c.display_name, tenants.c.external_id, tenants.c.contact)
        conditions.append(or_(*(func.lower(text).contains(criteria.q.lower(), autoescape=True) for text in texts)))
    return select(tenants, order.label("sorted_by")).select_from(source).where(*conditions), order


def _forecast(sums: Subquery, now: datetime, dialect: str) -> ColumnElement[Any]:
    """Return the forecast of `_month` as SQL."""
    month, _, today = periods(now)
    left = ((month + 32 * DAY).replace(day=1) - now) / DAY
    days = _days_before(today, dialect)
    whole = case((days > FORECAST_DAYS, float(FORECAST_DAYS)), else_=days)
    rate = case((days >= 1, sums.c.recent / whole), else_=sums.c.today)
    return sums.c.spend + rate * left


def _days_before(at: datetime, dialect: str) -> ColumnElement[Any]:
    """Return the days from a tenant's creation to a given time."""
    if dialect == "postgresql":
        return extract("epoch", literal(at, UtcDateTime()) - tenants.c.created_at) / 86400.0
    return func.julianday(literal(at, UtcDateTime())) - func.julianday(tenants.c.created_at)


def _share(sums: Subquery, kind: str) -> ColumnElement[Any]:
    """Return the part of a tenant's budget that is spent, 0 without one. kind: the budget's letter."""
    return func.coalesce(cast(sums.c[f"spent_{kind}"], Float) / func.nullif(limit_value(BY_LETTER[kind].name), 0), 0.0)


def _over(sums: Subquery, kind: str, part: float) -> ColumnElement[bool]:
    """Return the condition that a part of a tenant's budget is spent. kind: the budget's letter."""
    budget, spent = limit_value(BY_LETTER[kind].name), func.coalesce(sums.c[f"spent_{kind}"], 0)
    return and_(budget.is_not(None), spent >= budget * part)


def _used(*criteria: ColumnElement[bool]) -> Subquery:
    used_at = func.max(api_keys.c.last_used_at, type_=api_keys.c.last_used_at.type).label("used_at")
    query = select(api_keys.c.tenant_id, used_at).where(api_keys.c.tenant_id.is_not(None), *criteria)
    return query.group_by(api_keys.c.tenant_id).subquery("used")


def _month(tenant: Tenant, sums: Any, used_at: datetime | None, now: datetime) -> TenantMonth:
    if sums is None:
        return TenantMonth(last_used_at=used_at)
    month, recent, today = periods(now)
    following = (month + 32 * DAY).replace(day=1)
    age = today - max(recent, tenant.created_at)
    # Without a whole day to average over, each coming day costs as much as today so far: a rate by the hours of a first
    # day would multiply its first requests by hundreds.
    rate = sums.recent / (age / DAY) if age >= DAY else sums.today
    forecast = sums.spend + rate * ((following - now) / DAY)
    return TenantMonth(
        requests=sums.requests,
        spend=sums.spend,
        spent={period: getattr(sums, f"spent_{kind}") for kind, period in PERIOD_BY_LETTER.items()},
        forecast=round(forecast),
        last_used_at=used_at,
    )


_Sum = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_VALUES: Mapping[str, Any] = {"name": str, "spend": _Sum, "requests": _Sum, "created": datetime}


def _behind(cursor: str, sort: str, descending: bool, order: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the condition for tenants that come after the cursor. Raises BadRequest."""
    kind = tuple.__class_getitem__((Literal[sort], bool, _VALUES[sort], str))
    try:
        _, direction, value, name = decode_cursor(cursor, kind)
        if isinstance(value, datetime):
            check_moment(value)
    except ValueError as error:
        raise BadRequest("after: expected the `next` of an answer in the same order.", param="after") from error
    if direction != descending or not (name.isprintable() and str(value).isprintable()):
        raise BadRequest("after: expected the `next` of an answer in the same order.", param="after")
    return or_(order < value if descending else order > value, and_(order == value, tenants.c.name > name))
