"""The `loraplex tenant bulk` command: one change to all tenants that match a filter."""

import json
import sys
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import BUDGETS
from loraplex.commands.tenants.filter import filter_options, read_filter
from loraplex.commands.tenants.terms import Tags, term_names
from loraplex.commands.values import NO_LIMIT, Words
from wire.money import exact_money


@click.command(
    "bulk",
    epilog=examples(
        "loraplex tenant bulk --plan free --set-plan pro --dry-run",
        "loraplex tenant bulk --over-budget 120% --suspend --yes",
        "loraplex tenant bulk --tag trial --add-tags customer --remove-tags trial",
    ),
)
@filter_options
@click.option("--everyone", is_flag=True, help="Change all tenants; required without a filter.")
@click.option("--set-plan", help="Give the tenants this plan, or 'none'.")
@click.option("--inherit", type=Words(), help="Terms that the tenants inherit again, or 'all'.")
@click.option("--suspend/--resume", "suspend", default=None, help="Suspend the tenants, or resume them.")
@click.option("--add-tags", type=Tags(), help="Tags to add, comma separated.")
@click.option("--remove-tags", type=Tags(), help="Tags to remove, comma separated.")
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@admin_options
def bulk(
    everyone: bool, dry_run: bool, yes: bool, set_plan: str | None, suspend: bool | None, gateway: Gateway, **rest: Any
) -> None:
    """Change all tenants that match. The changes are shown first and must be confirmed."""
    body: dict[str, Any] = {name: value for name in ("add_tags", "remove_tags") if (value := rest.pop(name))}
    if inherit := rest.pop("inherit"):
        body["inherit"] = term_names(inherit)
    if set_plan is not None:
        body["plan"] = None if set_plan == NO_LIMIT else set_plan
    if suspend is not None:
        body["suspended"] = suspend
    if not body:
        raise click.UsageError(
            "expected a change: --set-plan, --inherit, --suspend, --resume, --add-tags, --remove-tags"
        )
    which = read_filter(rest)
    if not which and not everyone:
        raise click.UsageError("expected a filter, or --everyone")
    body["filter"] = which
    planned = gateway.run(lambda client: client.change_tenants(body, dry_run=True))
    for row in planned["data"]:
        click.echo(f"tenant {row['tenant']}: {_changes(row)}")
    count = planned["count"]
    if count > len(planned["data"]):
        click.echo(f"... and {count - len(planned['data'])} more")
    counted = f"{count} tenant" + "s" * (count != 1)
    if dry_run or not count:
        click.echo(f"{counted} would change")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nothing was changed: without a terminal, --yes is required")
        if not click.confirm(f"Change {counted}?", err=True):
            raise click.ClickException("nothing was changed")
    done = gateway.run(lambda client: client.change_tenants(body | {"expect": count}, dry_run=False))
    click.echo(f"changed {done['count']} tenant" + "s" * (done["count"] != 1))


def _changes(row: dict[str, Any]) -> str:
    before, after = row["before"], row["after"]
    return ", ".join(
        f"{name} {field_text(name, before.get(name))} -> {field_text(name, after[name])}" for name in after
    )


def field_text(name: str, value: Any) -> str:
    """Return a field's value for display: budgets in currency units, no limit as `none`."""
    match value:
        case None | "" | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int() if name in BUDGETS:
            return exact_money(value)
        case dict() if name in ("model_limits", "prices"):
            amounts = (*BUDGETS, "input", "cached", "output")
            text = {
                model: {key: exact_money(v) if key in amounts and isinstance(v, int) else v for key, v in each.items()}
                for model, each in value.items()
            }
            return json.dumps(text, separators=(",", ":"))
        case list():
            return ",".join(map(str, value))
    return str(value)
