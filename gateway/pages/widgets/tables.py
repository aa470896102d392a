"""Tables of the pages: sorting, filtering and paging by the URL's query, and the same rows as CSV."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

from gateway.api.reports.files import csv_parts, send_file
from gateway.api.requests.fields import read_number, read_sort
from wire.csv_cells import csv_lines

ROWS = 50
# Maximum rows of a CSV file, and those that are read and encoded at a time: a few ms of the event loop.
MAX_CSV, CSV_AT_ONCE = 10_000, 100

ReadRows = Callable[..., Awaitable[tuple[Sequence[Any], int]]]
"""Reader of the rows from `offset` on, `limit` at most, and of the number of all rows."""


class Column(NamedTuple):
    """Column of a table. key: its name in `sort` and in the CSV's head. value: its value in a row, for sorting in
    memory and for CSV; None: the row's field or attribute `key`. hint: an explanation on hover.
    """

    key: str
    title: str
    numeric: bool = False
    sortable: bool = True
    value: Callable[[Any], Any] | None = None
    hint: str = ""

    def of(self, row: Any) -> Any:
        if self.value is not None:
            return self.value(row)
        return row[self.key] if isinstance(row, Mapping) else getattr(row, self.key)


@dataclass(slots=True)
class Table:
    """Rows of one page of a table, as `templates/widgets/table.html` shows them.

    sort: the column's key. total: number of all rows; None if unknown. has_more: whether rows follow although
    their number is unknown. page: number of the page, from 1. next_link, previous_link: URLs for tables whose pages are
    found by a cursor; previous_title: the text of the link back. formats: the formats of exports beside CSV. is_second:
    whether it is below another table. It then has one page only, and its own parameters (`order`, `part`).
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Any] = ()
    sort: str = ""
    descending: bool = False
    page: int = 1
    total: int | None = None
    has_more: bool = False
    next_link: str | None = None
    previous_link: str | None = None
    previous_title: str = "Previous"
    csv: bool = True
    formats: Sequence[str] = ()
    sums: Mapping[str, Any] = field(default_factory=dict)
    is_second: bool = False

    @property
    def order(self) -> str:
        """Return the query parameter of its order."""
        return f"{self.name}_sort" if self.is_second else "sort"

    @property
    def part(self) -> Mapping[str, str]:
        """Return the parameters that choose its file among those of the page."""
        return {"table": self.name} if self.is_second else {}

    @property
    def first(self) -> int:
        return (self.page - 1) * ROWS + 1 if self.rows else 0

    @property
    def last(self) -> int:
        return (self.page - 1) * ROWS + len(self.rows)

    @property
    def has_next(self) -> bool:
        return self.has_more or (self.total is not None and self.last < self.total)

    @property
    def offset(self) -> int:
        return (self.page - 1) * ROWS


def read_table(request: web.Request, name: str, columns: Sequence[Column], sort: str) -> Table:
    """Return an empty table with the request's order and page. sort: the default, `-key` for descending.

    Raises BadRequest for a column or page that does not exist.
    """
    key, descending = read_sort(request, [column.key for column in columns if column.sortable], sort)
    page = read_number(request, "page", 1, 1_000_000) or 1
    return Table(name, columns, sort=key, descending=descending, page=page)


def read_second(request: web.Request, name: str, columns: Sequence[Column], sort: str) -> Table:
    """Return an empty table that is below another one, with the request's order. sort: as in `read_table`.

    Raises BadRequest for a column that does not exist.
    """
    table = Table(name, columns, is_second=True)
    keys = [column.key for column in columns if column.sortable]
    table.sort, table.descending = read_sort(request, keys, sort, table.order)
    return table


def fill(table: Table, rows: Iterable[Any]) -> Table:
    """Sort the rows in memory, and keep those of the page; all rows of a second table."""
    column = next(column for column in table.columns if column.key == table.sort)
    ordered = sorted(rows, key=lambda row: _order(column.of(row)), reverse=table.descending)
    if table.is_second:
        table.rows = ordered
        return table
    table.total = len(ordered)
    table.rows = ordered[table.offset : table.offset + ROWS]
    return table


async def read_page(table: Table, read: ReadRows) -> Table:
    """Read the rows of the table's page, and the number of all rows."""
    table.rows, table.total = await read(limit=ROWS, offset=table.offset)
    return table


async def send_csv(request: web.Request, name: str, columns: Sequence[Column], read: ReadRows) -> web.StreamResponse:
    """Stream all rows as a CSV file, MAX_CSV at most. Raises an error of the first `read`."""
    first, _ = await read(limit=CSV_AT_ONCE, offset=0)
    parts = csv_parts([column.key for column in columns], _csv_pages(first, columns, read))
    return await send_file(request, f"{name}.csv", "text/csv", parts)


async def _csv_pages(rows: Sequence[Any], columns: Sequence[Column], read: ReadRows) -> AsyncIterator[list[list[Any]]]:
    for offset in range(CSV_AT_ONCE, MAX_CSV + 1, CSV_AT_ONCE):
        yield [[column.of(row) for column in columns] for row in rows]
        if len(rows) < CSV_AT_ONCE or offset == MAX_CSV:
            return
        rows, _ = await read(limit=CSV_AT_ONCE, offset=offset)


def csv_response(name: str, columns: Sequence[Column], rows: Iterable[Any]) -> web.Response:
    """Return rows as a CSV file."""
    head = [column.key for column in columns]
    text = csv_lines([head, *([column.of(row) for column in columns] for row in rows)])
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.csv"',
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(text=text, content_type="text/csv", charset="utf-8", headers=headers)


def _order(value: Any) -> tuple[bool, Any]:
    """Return a sort key. Missing values come first in ascending order."""
    return value is not None, value.casefold() if isinstance(value, str) else 0 if value is None else value
