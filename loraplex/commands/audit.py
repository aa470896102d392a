"""The `loraplex audit` command: the audit log of changes, with actor, time and address."""

import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import Moment, given

COLUMNS = ("id", "at", "action", "target", "tenant", "actor", "address", "request_id", "detail", "own")
# Length of request ids in the table: enough to find one in a log.
SHORT_CHARS = 12


@click.command(
    epilog=examples(
        "loraplex audit --since 7d",
        "loraplex audit --tenant acme --action key",
        "loraplex audit --actor bootstrap --limit 1000 --json",
        "loraplex audit --since 2026-11-01 --limit 1000 --csv > november.csv",
    )
)
@click.option("--tenant", help="Only changes of this tenant's objects; also accepts a deleted tenant.")
@click.option("--actor", help="Only changes by the key with this id; `bootstrap` is LORAPLEX_ADMIN_KEY.")
@click.option("--action", help="Only this action, such as `key.revoke`, or all of a kind: tenant, key, adapter, price.")
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum entries.")
@click.option("--after", help="Only entries older than the one with this id: the next page.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all fields; the detail is JSON.")
@json_option
@admin_options
def audit(as_csv: bool, as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show the audit log, newest changes first, with the key and address of each."""
    if as_csv and as_json:
        raise click.UsageError("give either --csv or --json")
    answer = gateway.run(lambda client: client.audit(**given(query)))
    if as_json:
        print_json(answer)
        return
    if as_csv:
        _print_csv(answer["data"])
    else:
        rows = [_shown(row) for row in answer["data"]]
        print_table(rows, ("changed_at", "action", "target", "actor", "address", "request", "detail"))
    if answer["has_more"]:
        click.echo(f"older entries: --after {answer['data'][-1]['id']}", err=True)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    detail = " ".join(f"{name}={_value(value)}" for name, value in row["detail"].items())
    request = (row["request_id"] or "").removeprefix("req_")[:SHORT_CHARS]
    return {**row, "changed_at": row["at"], "request": request, "detail": detail}


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(
        {**row, "detail": json.dumps(row["detail"]), "own": json.dumps(row.get("own", False))} for row in rows
    )
