"""`loraplex key`: tenants' API keys and other admins'."""

from datetime import timedelta
from typing import Any

import click

from loraplex.commands.common import Gateway, admin_options, print_table
from loraplex.commands.values import Duration, Moment, given, limit_options

SCOPES = ("inference", "adapters", "usage")


@click.group()
def key() -> None:
    """Create, list, rotate and revoke API keys."""


class Words(click.ParamType):
    """Comma separated."""

    name = "words"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return value if isinstance(value, list) else [word.strip() for word in value.split(",") if word.strip()]


_admin_option = click.option("--admin", is_flag=True, help="An operator's key, of no tenant.")


def _check_owner(tenant: str | None, admin: bool) -> None:
    if (tenant is None) != admin:
        raise click.UsageError("say whose key: TENANT, or --admin for an operator's")


@key.command("create")
@click.argument("tenant", required=False)
@_admin_option
@click.option("--label", help="For people: what it is for.")
@click.option("--expires", "expires_at", type=Moment(ahead=True), help="2027-01-31, or in 30d, 12h, ...; or never.")
@click.option("--scopes", type=Words(), help=f"Some of {','.join(SCOPES)}; default: all.")
@click.option("--models", "allowed_models", type=Words(), help="The only models it may ask, comma separated.")
@limit_options
@admin_options
def create(tenant: str | None, admin: bool, gateway: Gateway, **fields: Any) -> None:
    """Create an API key for TENANT. Only the key is printed on stdout; it cannot be shown again.

    Limits of a key hold beside its tenant's.
    """
    _check_owner(tenant, admin)
    made = gateway.run(lambda client: client.create_key(tenant, **given(fields)))
    _print_once(made)


@key.command("list")
@click.argument("tenant", required=False)
@_admin_option
@admin_options
def list_all(tenant: str | None, admin: bool, gateway: Gateway) -> None:
    """List TENANT's keys, without the keys themselves."""
    _check_owner(tenant, admin)
    rows = gateway.run(lambda client: client.keys(tenant))
    for row in rows:
        for name in ("scopes", "allowed_models"):
            row[name] = row[name] and ",".join(row[name])
    columns = ("id", "label", "scopes", "allowed_models", "created_at", "expires_at", "revoked_at", "last_used_at")
    print_table(rows, columns)


@key.command("rotate")
@click.argument("key_id")
@click.option("--grace", type=Duration(), default="1h", show_default=True, help="How long the old key goes on.")
@admin_options
def rotate(key_id: str, grace: timedelta, gateway: Gateway) -> None:
    """Replace the key of this id by one for the same use. Only the new key is printed on stdout."""
    made = gateway.run(lambda client: client.rotate_key(key_id, int(grace.total_seconds())))
    _print_once(made)


@key.command("revoke")
@click.argument("key_id")
@admin_options
def revoke(key_id: str, gateway: Gateway) -> None:
    """Revoke the key with this id. It opens nothing within a second, and its running streams end."""
    gateway.run(lambda client: client.revoke_key(key_id))
    click.echo(f"revoked key {key_id}")


def _print_once(made: dict[str, Any]) -> None:
    click.echo(f"id {made['id']}; keep the key, it is shown only now:", err=True)
    click.echo(made["key"])
