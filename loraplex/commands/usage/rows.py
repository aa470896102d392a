"""The `loraplex usage export | prune | partition` commands on the ledger's rows."""

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, admin_options, again, database_url, examples, one_line, run
from loraplex.commands.programs.backups import database_errors
from loraplex.commands.values import Moment, given
from wire.money import exact_money

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


def save(gateway: Gateway, path: str, query: dict[str, Any], target: Path) -> None:
    """Write the answer of a route to a file, which appears only if it is whole. Raises click.ClickException."""
    # A name of its own, because another command may write the same file at the same time.
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")

    async def download(client: "GatewayClient") -> None:
        try:
            with part.open("wb") as file:
                await client.download(path, file, params=query)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    gateway.run(download)
    click.echo(f"wrote {target}, {target.stat().st_size} bytes", err=True)


@click.group()
def ledger() -> None:
    """Export, remove and partition rows of usage."""


@ledger.command(
    "export",
    epilog=examples(
        "loraplex usage export october.parquet --parquet --since 2026-10-01 --until 2026-11-01",
        "loraplex usage export acme.csv --csv --tenant acme --since 30d",
    ),
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--parquet", "form", flag_value="parquet", help="Write Parquet; costs are decimals.")
@click.option("--csv", "form", flag_value="csv", help="Write CSV.")
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--tenant", help="Only rows of this tenant, also a deleted one.")
@admin_options
def export(file: Path, form: str | None, gateway: Gateway, **query: Any) -> None:
    """Write the rows of usage, one for each request, to FILE, the oldest first.

    Their sums are those of `loraplex usage` for the same period.
    """
    if form is None:
        raise click.UsageError("expected --parquet or --csv")
    save(gateway, "/admin/api/usage/rows", given(query) | {"format": form}, file)


@ledger.command(
    "prune",
    epilog=examples("loraplex usage prune --before 2026-01-01", "loraplex usage prune --before 2026-01-01 --yes"),
)
@click.option("--before", required=True, help="Remove rows of the days before this date (UTC): 2026-01-01.")
@click.option("--yes", is_flag=True, help="Remove them; without it, they are only counted.")
@admin_options
def prune(before: str, yes: bool, gateway: Gateway) -> None:
    """Remove the usage rows of the days before a date, and the sums by end user of these days.

    The sums by hour, day and month stay, and with them the charts. Rows of the present and the last month cannot be
    removed. Removed requests disappear from the request log and from reports by version and end user.
    """
    found = gateway.run(lambda client: _prune(client, before, dry_run=True))
    amount = f"{found['rows']} rows from before {found['before']}, with a cost of {found['cost']} {found['currency']}"
    if not found["rows"]:
        click.echo(f"there are no rows from before {found['before']}")
        return
    if not yes:
        command = again(f"loraplex usage prune --before {before} --yes")
        raise click.UsageError(f"nothing was removed: {amount}; to remove them: {command}")
    rows = micro_units = 0
    has_more = True
    while has_more:
        done = gateway.run(lambda client: _prune(client, before, dry_run=False))
        rows, micro_units, has_more = rows + done["rows"], micro_units + done["cost_micros"], done["has_more"]
        if has_more:
            click.echo(f"removed {rows} of {found['rows']} rows", err=True)
    click.echo(f"removed {rows} rows with a cost of {exact_money(micro_units)} {found['currency']}")


async def _prune(client: "GatewayClient", before: str, *, dry_run: bool) -> dict[str, Any]:
    from loraplex.client import UPLOAD_TIMEOUT

    query = {"dry_run": "true"} if dry_run else {}
    body = {"before": before}
    found: dict[str, Any] = await client.call(
        "POST", "/admin/api/usage/prune", json=body, params=query, timeout=UPLOAD_TIMEOUT
    )
    return found


@ledger.command("partition", epilog=examples("LORAPLEX_DATABASE_URL=postgresql://... loraplex usage partition"))
def partition() -> None:
    """Give the rows of usage monthly partitions, in the PostgreSQL database at LORAPLEX_DATABASE_URL.

    Gateways continue to run, also those of the previous release. No row is rewritten. Old months are then dropped as a
    whole. There is no way back to a plain table. Running it again makes missing months.
    """
    from gateway.records.partitions import partitioning
    from gateway.records.sql.database import Database

    async def partitioned() -> Any:
        database = Database(database_url(), statement_seconds=None)
        try:
            return await partitioning.partition(database, lambda line: click.echo(line, err=True))
        finally:
            await database.close()

    with database_errors(), one_line(partitioning.PartitionError):
        is_new, found = run(partitioned())
    verb = "is partitioned now" if is_new else "was partitioned already"
    click.echo(f"usage {verb}: {', '.join(each.name for each in found)}")
