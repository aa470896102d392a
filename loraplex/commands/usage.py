"""The `loraplex usage` command: usage and cost of one tenant or all; as a table, as CSV for billing, or as JSON."""

import csv
import sys
from collections.abc import Sequence
from typing import Any

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, moment, money, print_json, print_table
from loraplex.commands.values import Moment, Words, given

SUMMED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
# Columns added by each `--by` group; the tenant is always shown.
COLUMNS = {
    "tenant": (),
    "model": ("model",),
    "version": ("model", "version"),
    "key": ("key_id", "key"),
    "day": ("day",),
}


@click.command(
    epilog=examples(
        "loraplex usage --since 2026-11-01",
        "loraplex usage --tenant acme --by model,day --since 30d",
        "loraplex usage --since 2026-11-01 --until 2026-12-01 --by tenant --csv > november.csv",
        "loraplex usage --api-key lpx_... --json",
    )
)
@click.option(
    "--since",
    type=Moment(ahead=False),
    help="Start of the period: 2026-11-01 (UTC), 2026-11-01T00:00+01:00, or 30d, 12h, ... ago.",
)
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option(
    "--by",
    type=Words(*COLUMNS),
    default="model",
    show_default=True,
    help="Grouping besides tenants, comma separated: tenant,model,version,key,day. An adapter is a model; "
    "version needs --since.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with exact costs, without a row of totals.")
@json_option
@tenant_options(or_all=True)
def usage(
    since: str | None,
    until: str | None,
    by: list[str],
    as_csv: bool,
    as_json: bool,
    tenant: str | None,
    gateway: Gateway,
) -> None:
    """Show usage and cost in a period: of one tenant, or as an operator of all tenants.

    Days, and moments without a zone, are in UTC. A finished request counts at the moment it was admitted.
    """
    if as_csv and as_json:
        raise click.UsageError("give either --csv or --json")
    query = given({"tenant": tenant, "since": since, "until": until, "group_by": ",".join(by)})
    answer = gateway.run(lambda client: client.own_usage(**query) if gateway.tenants_own else client.usage(**query))
    rows = [_shown(row) for row in answer["data"]]
    told_apart = list(dict.fromkeys(column for group in by for column in COLUMNS[group]))
    if as_json:
        print_json(answer)
    elif as_csv:
        _print_csv(rows, ("tenant", "deleted", *told_apart, *SUMMED))
    else:
        ends = (moment(since) if since else "the beginning", moment(until) if until else "now")
        click.echo(f"usage from {ends[0]} to {ends[1]}", err=True)
        for row in rows:
            row["tenant"] += " (deleted)" if row["deleted"] else ""
        total = {"tenant": "TOTAL"} | _shown(answer["total"])
        print_table([*rows, total], ("tenant", *told_apart, *SUMMED))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    more = {"cost": money(row["cost"]), "deleted": row.get("deleted", False)}
    if "day" in row:
        more["day"] = row["day"][:10]
    return row | more


def _print_csv(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row | {"deleted": str(row["deleted"]).lower()} for row in rows)
