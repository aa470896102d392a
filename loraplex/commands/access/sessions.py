"""The `loraplex session` commands: sessions of browsers."""

from urllib.parse import quote

import click

from loraplex.commands.common import Gateway, admin_options, examples
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.values import given

COLUMNS = ("id", "subject", "label", "role", "tenant", "address", "created_at", "last_used_at", "expires_at")


@click.group()
def session() -> None:
    """List and end the sessions of browsers."""


@session.command("list", epilog=examples("loraplex session list", "loraplex session list --tenant acme --json"))
@click.option("--tenant", help="Only sessions of this tenant's people; default: all, of operators too.")
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, show_default=True, help="Maximum sessions.")
@json_option
@admin_options
def list_all(tenant: str | None, limit: int, as_json: bool, gateway: Gateway) -> None:
    """List the sessions of browsers, the newest first."""
    query = given({"tenant": tenant, "limit": limit})
    rows = gateway.run(lambda client: client.listed("/admin/api/sessions", params=query))
    if as_json:
        print_json(rows)
    else:
        print_table(rows, COLUMNS)


@session.command("end", epilog=examples("loraplex session end 3f9c..."))
@click.argument("session_id", metavar="ID")
@admin_options
def end(session_id: str, gateway: Gateway) -> None:
    """End the session ID. Its browser has to log in again."""
    gateway.run(lambda client: client.call("DELETE", f"/admin/api/sessions/{quote(session_id, safe='')}"))
    click.echo(f"ended session {session_id}")
