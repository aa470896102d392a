"""The `loraplex adapter use` and `adapter prefetch` commands, and the list of all tenants' adapters."""

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from loraplex.commands.adapters.versions import VersionName
from loraplex.commands.common import Gateway, admin_options, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table
from wire.model_names import Reference

if TYPE_CHECKING:
    from loraplex.client import GatewayClient

LISTED = ("tenant", "name", "newest_version", "newest_state", "versions", "rank", "requests_24h", "last_used_at")
# Largest page of `GET /admin/api/adapters`.
PAGE = 1000


async def every_adapter(client: "GatewayClient", **which: Any) -> list[dict[str, Any]]:
    """Return the adapters of all tenants. which: filters of the query."""
    found: list[dict[str, Any]] = []
    number = 1
    while True:
        query = which | {"limit": PAGE, "page": number}
        page = await client.call("GET", "/admin/api/adapters", params=query)
        found += page["data"]
        if not page["has_more"]:
            return found
        number += 1


def print_every(rows: list[dict[str, Any]]) -> None:
    """Print the adapters of all tenants as a table."""
    shown = [row | {"engines": row["resident"], "last_used_at": row["last_used"]} for row in rows]
    print_table(shown, (*LISTED, "engines"))


@click.command("use", epilog=examples("loraplex adapter use pirate --tenant acme"))
@click.argument("name")
@json_option
@tenant_options()
def use(name: str, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """Show the keys, end users and versions of the requests of the last 24 hours for the adapter NAME."""
    from loraplex.client_paths import adapters_path, named_path

    path = f"{named_path(adapters_path(tenant), name)}/use"
    found = gateway.run(lambda client: client.call("GET", path))
    if as_json:
        print_json(found)
        return
    kinds = (("key", "keys"), ("end_user", "users"), ("version", "versions"))
    rows = [row | {"kind": kind} for kind, field in kinds for row in found[field]]
    cost = f"cost_{found['currency']}"
    sums = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    zeros = dict.fromkeys(sums, 0)
    print_table([zeros | row | {cost: row["cost"]} for row in rows], ("kind", "name", "id", *sums, cost))
    if found["is_partial"]:
        click.echo("end users and versions are those of the tenant's newest requests only", err=True)


@click.command(
    "prefetch", epilog=examples("loraplex adapter prefetch pirate@3 --tenant acme --engine http://10.0.0.7:8001")
)
@click.argument("version", type=VersionName())
@click.option("--tenant", required=True, help="Tenant that owns the adapter.")
@click.option("--engine", required=True, help="URL of the engine, as `loraplex engine list` shows it.")
@admin_options
def prefetch(version: Reference, tenant: str, engine: str, gateway: Gateway) -> None:
    """Load the VERSION of an adapter, such as pirate@3, into the host memory of an engine."""
    path = f"/admin/api/tenants/{quote(tenant, safe='')}/adapters/{version.name}/versions/{version.version}/prefetch"
    gateway.run(lambda client: client.call("POST", path, params={"engine": engine}))
    click.echo(f"{version} is in the host memory of {engine}")


COMMANDS = (use, prefetch)
