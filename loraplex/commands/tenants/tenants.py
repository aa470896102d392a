"""The `loraplex tenant` commands: tenants and their limits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loraplex.commands.access.whoami import print_left
from loraplex.commands.common import Gateway, admin_options, again, confirm, examples, yes_option
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.tenants.filter import filter_options, read_filter
from loraplex.commands.tenants.terms import Tags, in_money, print_fields, term_names, term_options
from loraplex.commands.values import TenantCommand, Words, given, limit_names
from wire.error_codes import UNKNOWN_URL
from wire.money import exact_money

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


@click.group()
def tenant() -> None:
    """Create, change, suspend and delete tenants."""


def _tenant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--force", is_flag=True, help="Accept --model-limits of models that do not exist yet."),
        click.option("--tags", type=Tags(), help="All tags, comma separated, or 'none'."),
        click.option("--note", help="Note for operators; '' removes it, and likewise the three above."),
        click.option("--contact", help="Person or address to write to."),
        click.option("--external-id", help="Id of the tenant in another system, such as billing; unique."),
        click.option("--display-name", help="Name shown to people."),
        click.option("--plan", help="Plan whose terms apply where the tenant has none of its own, or 'none'."),
    ):
        command = option(command)
    return term_options(command)


@tenant.command(
    "create",
    cls=TenantCommand,
    epilog=examples(
        "loraplex tenant create acme",
        "loraplex tenant create initech --requests-per-minute 60 --tokens-per-day none --budget-per-month 12.50",
        "loraplex tenant create hooli --plan pro --external-id cus_81 --tags eu,trial",
    ),
)
@click.argument("name")
@_tenant_options
@admin_options
def create(name: str, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Create the tenant NAME. Defaults: 600 requests and 200000 tokens per minute, and 32 concurrent requests."""
    gateway.run(lambda client: client.create_tenant(name, force=force, **given(fields)))
    click.echo(f"created tenant {name}; next: {again(f'loraplex key create {name}')}")


@tenant.command(
    "list",
    epilog=examples(
        "loraplex tenant list",
        "loraplex tenant list --plan pro --over-budget 80% --suspended --sort spend",
        "loraplex tenant list --tag eu --idle 30d --json",
    ),
)
@filter_options
@click.option(
    "--sort", type=click.Choice(["name", "spend", "requests", "created"]), help="Order; descending, except for names."
)
@json_option
@admin_options
def list_all(sort: str | None, as_json: bool, gateway: Gateway, **which: Any) -> None:
    """List tenants with their plan, the month's spend and its forecast, and their limits."""
    query = {name: _in_query(value) for name, value in given(read_filter(which) | {"sort": sort}).items()}
    rows = gateway.run(lambda client: client.tenants(**query))
    if as_json:
        print_json(rows)
        return
    columns = ("name", "plan", "suspended", "spend", "forecast", "priority", "weight", "on_token_limit", "tags")
    print_table([in_money(row) | _month(row) for row in rows], (*columns, *limit_names()))


def _in_query(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _month(row: dict[str, Any]) -> dict[str, Any]:
    month = row.get("month")
    return {} if month is None else {name: exact_money(month[name]) for name in ("spend", "forecast")}


@tenant.command("show", epilog=examples("loraplex tenant show acme"))
@click.argument("name")
@json_option
@admin_options
def show(name: str, as_json: bool, gateway: Gateway) -> None:
    """Show the tenant NAME with all of its limits, including those of its models, and what is left of them."""

    async def read(client: "GatewayClient") -> tuple[dict[str, Any], dict[str, Any] | None]:
        return await client.tenant(name), await _left(client, name)

    row, left = gateway.run(read)
    if as_json:
        print_json(row | {"left": left})
    else:
        print_fields(row)
    if left is None:
        click.echo("warning: this gateway is too old to report what is left of the limits", err=True)
    elif left and not as_json:
        click.echo()
        print_left({None: left})


async def _left(client: "GatewayClient", name: str) -> dict[str, Any] | None:
    """Return what is left of a tenant's limits, or None if the gateway's release does not have the route."""
    from loraplex.client import GatewayError

    try:
        return (await client.call("GET", f"/admin/api/tenants/{quote(name, safe='')}/limits"))["limits"]
    except GatewayError as error:
        if error.code != UNKNOWN_URL:
            raise
        return None


@tenant.command("models", epilog=examples("loraplex tenant models acme"))
@click.argument("name")
@json_option
@admin_options
def models(name: str, as_json: bool, gateway: Gateway) -> None:
    """List the values of `model` in requests of the tenant NAME."""
    rows = gateway.run(lambda client: client.listed(f"/admin/api/tenants/{quote(name, safe='')}/models"))
    if as_json:
        print_json(rows)
    else:
        print_table(rows, ("id", "kind", "means"))


@tenant.command(
    "update",
    cls=TenantCommand,
    epilog=examples(
        "loraplex tenant update acme --tokens-per-day 1000000 --max-concurrent none",
        "loraplex tenant update acme --plan pro --inherit all",
        """loraplex tenant update acme --model-limits '{"pirate": {"requests_per_minute": 10}}'""",
    ),
)
@click.argument("name")
@click.option("--inherit", type=Words(), help="Terms that the tenant inherits again, comma separated, or 'all'.")
@_tenant_options
@admin_options
def update(name: str, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Change the tenant NAME. Only the given values change."""
    changes = given(fields)
    if "inherit" in changes:
        changes["inherit"] = term_names(changes["inherit"])
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
    click.echo(f"suspended tenant {name}; to resume it: {again(f'loraplex tenant resume {name}')}")


@tenant.command("resume", epilog=examples("loraplex tenant resume acme"))
@click.argument("name")
@admin_options
def resume(name: str, gateway: Gateway) -> None:
    """Accept the suspended tenant NAME's keys again."""
    gateway.run(lambda client: client.update_tenant(name, suspended=False))
    click.echo(f"resumed tenant {name}")


@tenant.command("delete", epilog=examples("loraplex tenant delete acme", "loraplex tenant delete acme --yes"))
@click.argument("name")
@yes_option
@admin_options
def delete(name: str, yes: bool, gateway: Gateway) -> None:
    """Delete the tenant NAME with its keys and adapter names. Its usage stays on record."""
    confirm(f"Delete tenant {name} with its keys and adapters?", is_given=yes)
    gateway.run(lambda client: client.delete_tenant(name))
    click.echo(f"deleted tenant {name}")
