"""The `loraplex usage` command: usage and cost of one tenant or all; as a table, as CSV for billing, or as JSON."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from loraplex.commands.access.whoami import budget_text
from loraplex.commands.common import Gateway, WithSubcommands, examples, tenant_options
from loraplex.commands.output import json_option, moment, print_csv, print_json, print_table
from loraplex.commands.usage.rows import ledger, save
from loraplex.commands.values import Moment, Words, given

SUMMED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
# Columns added by each `--by` group; the tenant is always shown.
COLUMNS = {
    "tenant": (),
    "model": ("model",),
    "version": ("model", "version"),
    "key": ("key_id", "key"),
    "end_user": ("end_user",),
    "hour": ("hour",),
    "day": ("day",),
    "month": ("month",),
}
FORMATS = ("csv", "json", "parquet")
# Characters of a period's start in ISO 8601 that are shown.
PERIODS = {"hour": 13, "day": 10, "month": 7}

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cost": lambda row: -row["cost_micros"],
    "requests": lambda row: -row["requests"],
    "tokens": lambda row: -row["prompt_tokens"] - row["completion_tokens"],
    "tenant": lambda row: row["tenant"],
}


@click.command(
    cls=WithSubcommands,
    epilog=examples(
        "loraplex usage --since 2026-11-01",
        "loraplex usage --since 7d --by tenant --top 10",
        "loraplex usage --tenant acme --by model,day --since 30d",
        "loraplex usage --since 2026-11-01 --until 2026-12-01 --by tenant --csv > november.csv",
        "loraplex usage --since 2026-11-01 --by tenant,day --export parquet --out november.parquet",
        "loraplex usage --api-key lpx_... --json",
    ),
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
    help="Grouping besides tenants, comma separated: tenant,model,version,key,end_user,hour,day,month. An adapter is "
    "a model; version and end_user need --since.",
)
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    help="Order of the rows, largest first, or by tenant. Default: by cost for all tenants; with periods, as grouped.",
)
@click.option("--top", type=click.IntRange(1), help="Only the first rows, by cost unless --sort is given.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with exact costs, without a row of totals.")
@click.option(
    "--export",
    type=click.Choice(FORMATS),
    help="Write all groups to the file of --out, in bounded memory; for operators.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for --export.")
@json_option
@tenant_options(or_all=True)
def usage(
    since: str | None,
    until: str | None,
    by: list[str],
    gateway: Gateway,
    tenant: str | None,
    **shown: Any,
) -> None:
    """Show usage and cost in a period: of one tenant, or as an operator of all tenants.

    `loraplex usage export` writes the ledger's rows, `loraplex usage prune` removes old ones, and `loraplex usage
    partition` divides them into months.

    Days, and times without a zone, are in UTC. A finished request counts at the time of its admission.
    """
    if shown["as_csv"] and shown["as_json"]:
        raise click.UsageError("give either --csv or --json")
    query = given({"tenant": tenant, "since": since, "until": until, "group_by": ",".join(by)})
    if shown["export"] is not None or shown["out"] is not None:
        _export(gateway, query, shown)
        return
    answer = gateway.run(lambda client: client.own_usage(**query) if gateway.as_tenant else client.usage(**query))
    is_overview = tenant is None and not gateway.as_tenant and not PERIODS.keys() & set(by) and not shown["as_csv"]
    order = shown["sort"] or ("cost" if shown["top"] or is_overview else None)
    if order is not None:
        answer["data"].sort(key=SORTS[order])
    del answer["data"][shown["top"] or len(answer["data"]) :]
    rows = [_shown(row, answer["currency"]) for row in answer["data"]]
    told_apart = list(dict.fromkeys(column for group in by for column in COLUMNS[group]))
    if shown["as_json"]:
        print_json(answer)
    elif shown["as_csv"]:
        shown_rows = (row | {"deleted": str(row["deleted"]).lower()} for row in rows)
        print_csv(shown_rows, ("tenant", "deleted", *told_apart, *SUMMED, "currency"))
    else:
        ends = (moment(since) if since else "the beginning", moment(until) if until else "now")
        click.echo(f"usage from {ends[0]} to {ends[1]}", err=True)
        for row in rows:
            row["tenant"] += " (deleted)" if row["deleted"] else ""
        total = {"tenant": "TOTAL"} | _shown(answer["total"], answer["currency"])
        print_table([*rows, total], ("tenant", *told_apart, *SUMMED[:-1], f"cost_{answer['currency']}"))
        budget = gateway.run(lambda client: client.own_key())["budget"] if gateway.as_tenant else None
        if budget is not None:
            click.echo(budget_text(budget), err=True)


def _export(gateway: Gateway, query: dict[str, Any], shown: dict[str, Any]) -> None:
    """Write the groups to a file. shown: the options of the output. Raises click.UsageError."""
    if shown["export"] is None or shown["out"] is None:
        raise click.UsageError("--export and --out need each other")
    if others := [name for name in ("as_csv", "as_json", "sort", "top") if shown[name]]:
        raise click.UsageError(f"--{others[0].removeprefix('as_')} does not apply to --export")
    if gateway.as_tenant:
        raise click.UsageError("--export is for operators; a tenant's key has --csv and --json")
    save(gateway, "/admin/api/usage/export", query | {"format": shown["export"]}, shown["out"])


def _shown(row: dict[str, Any], currency: str) -> dict[str, Any]:
    more = {"currency": currency, f"cost_{currency}": row["cost"], "deleted": row.get("deleted", False)}
    more |= {name: row[name][:length] for name, length in PERIODS.items() if name in row}
    return row | more


usage.subcommands = ledger
