"""The `loraplex quarantine list | clear` commands: requests that are refused because engines died with them."""

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import given

COLUMNS = ("kind", "tenant", "adapter", "engines", "began_at", "ends_at")


@click.group()
def quarantine() -> None:
    """List requests, adapters and tenants that are refused because engines died, and end a tenant's quarantine."""


@quarantine.command("list", epilog=examples("loraplex quarantine list", "loraplex quarantine list --tenant acme"))
@click.option("--tenant", help="Only quarantines of this tenant; default: all.")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum entries.")
@json_option
@admin_options
def list_all(tenant: str | None, limit: int, as_json: bool, gateway: Gateway) -> None:
    """List what is in quarantine, the newest first. The gateway keeps no text of a request."""
    query = given({"tenant": tenant, "limit": limit})
    found = gateway.run(lambda client: client.call("GET", "/admin/api/quarantine", params=query))
    if as_json:
        print_json(found)
        return
    print_table([row | {"tenant": row["tenant"] or row["tenant_id"]} for row in found["data"]], COLUMNS)
    if found["has_more"]:
        click.echo(f"there are more than {limit} entries; --limit shows more", err=True)


@quarantine.command("clear", epilog=examples("loraplex quarantine clear acme"))
@click.argument("tenant")
@admin_options
def clear(tenant: str, gateway: Gateway) -> None:
    """End the quarantine of TENANT, its requests and its adapters at every gateway, and forget the deaths until now.

    Do this once the cause is removed: the same request may kill as many engines again before it is refused.
    """
    ended = gateway.run(lambda client: client.end_quarantine(tenant))["ended"]
    click.echo(f"ended the quarantine of {tenant}: {ended} {'entry' if ended == 1 else 'entries'}")
