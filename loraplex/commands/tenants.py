"""`loraplex tenant`: who may use the service, and how much."""

import json
from collections.abc import Callable
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, print_json, print_table
from loraplex.commands.values import LIMITS, given, limit_options


@click.group()
def tenant() -> None:
    """Create, change, suspend and delete tenants."""


class Json(click.ParamType):
    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            self.fail(f"{value!r} is not JSON", param, ctx)


def _tenant_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--model-limits", type=Json(), help='JSON: {"model": {"requests_per_minute": 10}}.'),
        click.option(
            "--on-token-limit",
            type=click.Choice(["refuse", "shorten"]),
            help="Refuse a request for more tokens than are left, or shorten its answer.",
        ),
        click.option("--priority", type=int, help="0, served first, to 9, shed first."),
        click.option("--weight", type=float, help="Share of a busy engine, relative to the other tenants'."),
    ):
        command = option(command)
    return limit_options(command)


@tenant.command("create")
@click.argument("name")
@_tenant_options
@admin_options
def create(name: str, gateway: Gateway, **fields: Any) -> None:
    """Create the tenant NAME: with 600 requests and 200000 tokens a minute and 32 requests at once unless said."""
    gateway.run(lambda client: client.create_tenant(name, **given(fields)))
    click.echo(f"created tenant {name}; next: loraplex key create {name}")


@tenant.command("list")
@admin_options
def list_all(gateway: Gateway) -> None:
    """List the tenants and their limits."""
    columns = ("name", "suspended", "priority", "weight", *LIMITS, "budget_per_month")
    print_table(gateway.run(lambda client: client.tenants()), columns)


@tenant.command("show")
@click.argument("name")
@admin_options
def show(name: str, gateway: Gateway) -> None:
    """Show the tenant NAME as JSON."""
    print_json(gateway.run(lambda client: client.tenant(name)))


@tenant.command("update")
@click.argument("name")
@_tenant_options
@admin_options
def update(name: str, gateway: Gateway, **fields: Any) -> None:
    """Change the tenant NAME: what is given, and nothing else."""
    changes = given(fields)
    if not changes:
        raise click.UsageError("say what to change: see --help")
    gateway.run(lambda client: client.update_tenant(name, **changes))
    click.echo(f"updated tenant {name}: {', '.join(changes)}")


@tenant.command("suspend")
@click.argument("name")
@admin_options
def suspend(name: str, gateway: Gateway) -> None:
    """Refuse the tenant NAME's keys and end its running streams, until resumed."""
    gateway.run(lambda client: client.update_tenant(name, suspended=True))
    click.echo(f"suspended tenant {name}; back with: loraplex tenant resume {name}")


@tenant.command("resume")
@click.argument("name")
@admin_options
def resume(name: str, gateway: Gateway) -> None:
    """Let the suspended tenant NAME in again."""
    gateway.run(lambda client: client.update_tenant(name, suspended=False))
    click.echo(f"resumed tenant {name}")


@tenant.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Don't ask.")
@admin_options
def delete(name: str, yes: bool, gateway: Gateway) -> None:
    """Delete the tenant NAME with its keys and adapter names. What it used stays on record."""
    if not yes and not click.confirm(f"Delete tenant {name} with its keys and adapters?", err=True):
        raise click.ClickException("nothing was deleted")
    gateway.run(lambda client: client.delete_tenant(name))
    click.echo(f"deleted tenant {name}")
