"""The `loraplex key` commands: API keys of tenants and operators."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import click

from loraplex.commands.common import Gateway, database_url, examples, own_options
from loraplex.commands.output import json_option, limits_text, moment, print_json, print_table
from loraplex.commands.programs.backups import database_errors, pepper_fingerprints
from loraplex.commands.values import Duration, LimitCommand, Moment, Words, given

SCOPES = ("inference", "adapters", "usage", "keys")
ROLES = ("viewer", "billing", "operator")


@click.group()
def key() -> None:
    """Create, list, change, rotate and revoke API keys."""


_admin_option = click.option("--admin", is_flag=True, help="Use operators' keys, which belong to no tenant.")


def _read_id(_: click.Context, __: click.Parameter, text: str) -> str:
    """Return a key's id; from a whole key, cut it out, so that the secret is not sent anywhere."""
    found = re.fullmatch(r"lpx_([0-9a-f]{16})(_.*)?", text.strip())
    return found[1] if found else text


def _check_owner(tenant: str | None, admin: bool, gateway: Gateway) -> None:
    if not gateway.as_tenant and (tenant is None) != admin:
        raise click.UsageError("expected TENANT, or --admin for an operator's key, or --api-key as the tenant")


@key.command(
    "create",
    cls=LimitCommand,
    epilog=examples(
        "loraplex key create acme --label ci --expires 30d > acme.key",
        "loraplex key create acme --scopes inference --models pirate --requests-per-minute 60",
        "loraplex key create --admin --role viewer --label alice",
        "loraplex key create --api-key lpx_... --scopes inference",
    ),
)
@click.argument("tenant", required=False)
@_admin_option
@click.option("--label", help="Note for people: the key's purpose.")
@click.option(
    "--expires",
    "expires_at",
    type=Moment(ahead=True),
    help="Expiry: 2027-01-31 (UTC), 2027-01-31T12:00+01:00, or 30d, 12h, ... from now; default: never.",
)
@click.option(
    "--scopes", type=Words(*SCOPES), help=f"Scopes, comma separated: {','.join(SCOPES)}; default: all but keys."
)
@click.option("--role", type=click.Choice(ROLES), help="Role of an operator's key; default: operator.")
@click.option("--models", "allowed_models", type=Words(), help="Allowed models, comma separated; default: all.")
@click.option("--force", is_flag=True, help="Accept --models that the tenant does not have yet.")
@own_options
def create(tenant: str | None, admin: bool, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Create an API key for TENANT, or with --api-key for that key's tenant.

    Only the key is printed on stdout; it cannot be shown again.

    The key's limits apply in addition to the tenant's.
    """
    _check_owner(tenant, admin, gateway)
    made = gateway.run(
        lambda client: client.create_key(tenant, as_tenant=gateway.as_tenant, force=force, **given(fields))
    )
    _print_once(made)


@key.command("list", epilog=examples("loraplex key list acme", "loraplex key list --admin --json"))
@click.argument("tenant", required=False)
@_admin_option
@json_option
@own_options
def list_all(tenant: str | None, admin: bool, as_json: bool, gateway: Gateway) -> None:
    """List TENANT's keys, or with --api-key those of that key's tenant, without their secrets."""
    _check_owner(tenant, admin, gateway)
    rows = gateway.run(lambda client: client.keys(tenant, as_tenant=gateway.as_tenant))
    if as_json:
        print_json(rows)
        return
    columns = ("id", "label", "state", "scopes", "models", "limits", "created_at", "expires_at", "last_used_at")
    shown = ({"state": _state(row), "models": row["allowed_models"], "limits": limits_text(row)} for row in rows)
    print_table([row | more for row, more in zip(rows, shown, strict=True)], columns)


@key.command(
    "update",
    cls=LimitCommand,
    epilog=examples(
        "loraplex key update 5f0c1a2b3d4e5f60 --requests-per-minute 60 --budget-per-30-days 5.00",
        "loraplex key update 5f0c1a2b3d4e5f60 --label ci --tokens-per-day none",
    ),
)
@click.argument("key_id", callback=_read_id)
@click.option("--label", help="Note for people: the key's purpose.")
@own_options
def update(key_id: str, gateway: Gateway, **fields: Any) -> None:
    """Change the label and limits of the key with this id. Only the given values change."""
    changes = given(fields)
    if not changes:
        raise click.UsageError("expected a value to change; --help lists them")
    path = f"{'/v1/keys' if gateway.as_tenant else '/admin/api/keys'}/{quote(key_id, safe='')}"
    gateway.run(lambda client: client.call("PATCH", path, json=changes))
    click.echo(f"updated key {key_id}: {', '.join(changes)}")


@key.command("rotate", epilog=examples("loraplex key rotate 5f0c1a2b3d4e5f60 --grace 1d > acme.key"))
@click.argument("key_id", callback=_read_id)
@click.option("--grace", type=Duration(), default="1h", show_default=True, help="Time that the old key stays valid.")
@own_options
def rotate(key_id: str, grace: timedelta, gateway: Gateway) -> None:
    """Replace the key with this id by a new one with the same permissions. Only the new key is printed on stdout."""
    made = gateway.run(
        lambda client: client.rotate_key(key_id, int(grace.total_seconds()), as_tenant=gateway.as_tenant)
    )
    _print_once(made)


@key.command("revoke", epilog=examples("loraplex key revoke 5f0c1a2b3d4e5f60"))
@click.argument("key_id", callback=_read_id)
@own_options
def revoke(key_id: str, gateway: Gateway) -> None:
    """Revoke the key with this id. It is refused within a second, and its running streams end."""
    gateway.run(lambda client: client.revoke_key(key_id, as_tenant=gateway.as_tenant))
    click.echo(f"revoked key {key_id}")


def _state(row: dict[str, Any]) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    ended = row["expires_at"] is not None and datetime.fromisoformat(row["expires_at"]) <= datetime.now(UTC)
    return "expired" if ended else "active"


def _print_once(made: dict[str, Any]) -> None:
    ends = f", valid until {moment(made['expires_at'])}" if made["expires_at"] else ""
    click.echo(f"id {made['id']}{ends}; save the key, it is not shown again:", err=True)
    click.echo(made["key"])


@key.command("peppers", epilog=examples("loraplex key peppers"))
def peppers() -> None:
    """Count the valid keys that still need an old pepper, in the database at LORAPLEX_DATABASE_URL.

    The first pepper of LORAPLEX_KEY_PEPPER is the new one. A key is hashed under it when it is used.
    """
    from gateway.records.keys.keys import Keys
    from gateway.records.sql.database import Database

    fingerprints = pepper_fingerprints()
    if not fingerprints:
        raise click.UsageError("LORAPLEX_KEY_PEPPER: is required; expected the gateways' value")

    async def count() -> dict[str | None, int]:
        database = Database(database_url())
        try:
            await database.check_schema()
            return await Keys(database).count_by_pepper()
        finally:
            await database.close()

    with database_errors():
        found = asyncio.run(count())
    total, current = sum(found.values()), found.get(fingerprints[0], 0)
    click.echo(f"{total} valid keys; {current} use the new pepper {fingerprints[0]}; {total - current} need an old one")
