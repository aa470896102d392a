"""The `loraplex tenant` commands: tenants and their limits."""

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import BUDGET, json_option, limits_text, moment, money, print_json, print_table
from loraplex.commands.values import Money, Target, TenantCommand, given, limit_names


@click.group()
def tenant() -> None:
    """Create, change, suspend and delete tenants."""


class ModelLimits(click.ParamType):
    """JSON of limits by model; budgets in money, as in `--budget-per-month`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            models = json.loads(value, parse_float=str)
        except ValueError:
            self.fail(f"{value!r} is not JSON", param, ctx)
        if not isinstance(models, dict) or not all(isinstance(limits, dict) for limits in models.values()):
            self.fail('expected an object of objects, like {"pirate": {"requests_per_minute": 10}}', param, ctx)
        for limits in models.values():
            if limits.get(BUDGET) is not None:
                limits[BUDGET] = Money().convert(str(limits[BUDGET]), param, ctx)
        return models


def _tenant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--force", is_flag=True, help="Accept --model-limits of models that do not exist yet."),
        click.option(
            "--model-limits",
            type=ModelLimits(),
            help='All limits by model, as JSON: {"pirate": {"requests_per_minute": 10, "budget_per_month": 2.50}}; '
            '"*" applies to all adapters without their own limits, together.',
        ),
        click.option(
            "--on-token-limit",
            type=click.Choice(["refuse", "shorten"]),
            help="Refuse a request that exceeds the remaining tokens, or shorten its answer.",
        ),
        click.option("--priority", type=int, help="Priority from 0 (served first) to 9 (shed first)."),
        click.option(
            "--ttft-target",
            type=Target(),
            help="Wanted time to first token in seconds, or 'none'; the engines' metrics count the answers within it.",
        ),
        click.option("--weight", type=float, help="Share of a busy engine, relative to other tenants' weights."),
    ):
        command = option(command)
    return command


@tenant.command(
    "create",
    cls=TenantCommand,
    epilog=examples(
        "loraplex tenant create acme",
        "loraplex tenant create initech --requests-per-minute 60 --tokens-per-day none --budget-per-month 12.50",
    ),
)
@click.argument("name")
@_tenant_options
@admin_options
def create(name: str, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Create the tenant NAME. Defaults: 600 requests and 200000 tokens per minute, and 32 concurrent requests."""
    gateway.run(lambda client: client.create_tenant(name, force=force, **given(fields)))
    click.echo(f"created tenant {name}; next: loraplex key create {name}")


@tenant.command("list", epilog=examples("loraplex tenant list", "loraplex tenant list --json"))
@json_option
@admin_options
def list_all(as_json: bool, gateway: Gateway) -> None:
    """List the tenants and their limits."""
    rows = gateway.run(lambda client: client.tenants())
    if as_json:
        print_json(rows)
        return
    columns = ("name", "suspended", "priority", "weight", "on_token_limit", *limit_names())
    print_table([_in_money(row) for row in rows], columns)


@tenant.command("show", epilog=examples("loraplex tenant show acme"))
@click.argument("name")
@json_option
@admin_options
def show(name: str, as_json: bool, gateway: Gateway) -> None:
    """Show the tenant NAME with all of its limits, including those of its models."""
    row = gateway.run(lambda client: client.tenant(name))
    if as_json:
        print_json(row)
        return
    fields = {field: value for field, value in _in_money(row).items() if field not in ("object", "model_limits")}
    fields |= {f"model_limits of {model}": limits_text(limits) for model, limits in row["model_limits"].items()}
    fields["created_at"] = moment(row["created_at"])
    print_table([{"field": field, "value": value} for field, value in fields.items()], ("field", "value"))


@tenant.command(
    "update",
    cls=TenantCommand,
    epilog=examples(
        "loraplex tenant update acme --tokens-per-day 1000000 --max-concurrent none",
        """loraplex tenant update acme --model-limits '{"pirate": {"requests_per_minute": 10}}'""",
    ),
)
@click.argument("name")
@_tenant_options
@admin_options
def update(name: str, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Change the tenant NAME. Only the given values change."""
    changes = given(fields)
    if not changes:
        raise click.UsageError("expected a value to change; --help lists them")
    gateway.run(lambda client: client.update_tenant(name, force=force, **changes))
    click.echo(f"updated tenant {name}: {', '.join(changes)}")


@tenant.command("suspend", epilog=examples("loraplex tenant suspend acme"))
@click.argument("name")
@admin_options
def suspend(name: str, gateway: Gateway) -> None:
    """Refuse the tenant NAME's keys and end its running streams, until resumed."""
    gateway.run(lambda client: client.update_tenant(name, suspended=True))
    click.echo(f"suspended tenant {name}; to resume it: loraplex tenant resume {name}")


@tenant.command("resume", epilog=examples("loraplex tenant resume acme"))
@click.argument("name")
@admin_options
def resume(name: str, gateway: Gateway) -> None:
    """Accept the suspended tenant NAME's keys again."""
    gateway.run(lambda client: client.update_tenant(name, suspended=False))
    click.echo(f"resumed tenant {name}")


@tenant.command("delete", epilog=examples("loraplex tenant delete acme", "loraplex tenant delete acme --yes"))
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@admin_options
def delete(name: str, yes: bool, gateway: Gateway) -> None:
    """Delete the tenant NAME with its keys and adapter names. Its usage stays on record."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nothing was deleted: without a terminal, --yes is required")
        if not click.confirm(f"Delete tenant {name} with its keys and adapters?", err=True):
            raise click.ClickException("nothing was deleted")
    gateway.run(lambda client: client.delete_tenant(name))
    click.echo(f"deleted tenant {name}")


def _in_money(row: dict[str, Any]) -> dict[str, Any]:
    return row if row[BUDGET] is None else row | {BUDGET: money(row[BUDGET])}
