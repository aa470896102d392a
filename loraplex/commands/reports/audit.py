"""The `loraplex audit` command: the audit log of changes, with actor, time and address."""

import json
from collections.abc import Sequence
from typing import Any

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import BUDGETS, json_option, print_csv, print_json, print_table
from loraplex.commands.usage.prices import AMOUNTS
from loraplex.commands.values import Moment, Words, given
from wire.money import exact_money

COLUMNS = (
    "id",
    "at",
    "action",
    "target",
    "tenant",
    "actor",
    "address",
    "request_id",
    "detail",
    "own",
    "session_id",
    "before",
    "actor_label",
)
# Last characters of request ids in the table: enough to find one in a log.
SHORT_CHARS = 12


@click.command(
    epilog=examples(
        "loraplex audit --since 7d",
        "loraplex audit --tenant acme --action key",
        "loraplex audit --since 7d --not-action adapter,key.create",
        "loraplex audit --actor bootstrap --limit 1000 --json",
        "loraplex audit --api-key lpx_...",
        "loraplex audit --since 2026-11-01 --limit 1000 --csv > november.csv",
    )
)
@click.option("--actor", help="Only changes by the key with this id; `bootstrap` is LORAPLEX_ADMIN_KEY. For operators.")
@click.option(
    "--action", help="Only this action, such as `key.revoke`, or all of a kind: tenant, plan, key, adapter, price."
)
@click.option(
    "--not-action",
    "not_action",
    type=Words(),
    help="Leave out these actions, comma separated, such as `adapter,key.create`. For operators.",
)
@click.option("--since", type=Moment(ahead=False), help="Start of the period: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="End of the period (exclusive); default: now.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum entries.")
@click.option("--after", help="Only entries older than the one with this id: the next page.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with all fields; the detail is JSON.")
@json_option
@tenant_options(or_all=True)
def audit(as_csv: bool, as_json: bool, gateway: Gateway, **query: Any) -> None:
    """Show the audit log, newest changes first: of one tenant, also a deleted one, or as an operator of all tenants."""
    if as_csv and as_json:
        raise click.UsageError("give either --csv or --json")
    asked = given(query)
    if gateway.as_tenant and (refused := asked.keys() & {"actor", "not_action"}):
        raise click.UsageError(f"--{min(refused).replace('_', '-')} is for operators")
    if "not_action" in asked:
        asked["not_action"] = ",".join(asked["not_action"])
    answer = gateway.run(lambda client: client.audit(as_tenant=gateway.as_tenant, **asked))
    if as_json:
        print_json(answer)
        return
    if as_csv:
        _print_csv(answer["data"])
    else:
        rows = [_shown(row) for row in answer["data"]]
        print_table(rows, ("changed_at", "action", "tenant", "target", "actor", "address", "request", "detail"))
    if answer["next"] if gateway.as_tenant else answer["has_more"]:
        click.echo(f"older entries: --after {answer['data'][-1]['id']}", err=True)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return an entry's cells. Changed values are `old -> new`; entries of an earlier release have only the new one."""
    names = (*BUDGETS, *AMOUNTS) if row["action"].startswith(("price.", "plan.")) else BUDGETS
    before, after = _in_money(row.get("before") or {}, names), _in_money(row["detail"], names)
    detail = " ".join(
        f"{name}={_value(before[name])} -> {_value(value)}" if name in before else f"{name}={_value(value)}"
        for name, value in {**dict.fromkeys(before), **after}.items()
        if name not in before or before[name] != value
    )
    request = (row["request_id"] or "").removeprefix("req_")[-SHORT_CHARS:]
    actor = row.get("actor_label") or row["actor"]
    return {**row, "changed_at": row["at"], "actor": actor, "request": request, "detail": detail}


def _in_money(value: Any, names: Sequence[str]) -> Any:
    """Return a detail with the amounts of these names, at any depth, as money."""
    if not isinstance(value, dict):
        return value
    return {
        name: exact_money(given) if name in names and isinstance(given, int) else _in_money(given, names)
        for name, given in value.items()
    }


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    shown = (
        {
            **row,
            "detail": json.dumps(row["detail"]),
            "own": json.dumps(row.get("own", False)),
            "before": json.dumps(row["before"]) if row.get("before") else None,
        }
        for row in rows
    )
    print_csv(shown, COLUMNS)
