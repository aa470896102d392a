"""The `loraplex adapter` commands: a tenant's adapters, with the tenant's own key or as an operator."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.adapters.fleet import COMMANDS as FLEET_COMMANDS
from loraplex.commands.adapters.fleet import every_adapter, print_every
from loraplex.commands.adapters.golden import golden
from loraplex.commands.adapters.mixtures import COMMANDS as MIXTURE_COMMANDS
from loraplex.commands.adapters.verify import verify
from loraplex.commands.adapters.versions import COMMANDS as VERSION_COMMANDS
from loraplex.commands.common import Gateway, admin_options, confirm, examples, one_line, tenant_options, yes_option
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.tenants.filter import idle_days
from loraplex.commands.values import Duration
from wire.model_names import Reference, parse_reference

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


BASE = click.option(
    "--base", help="Base model of the adapter; default: the one that its config names, else the only one that fits."
)


@click.group()
def adapter() -> None:
    """Manage LoRA adapters: their versions, aliases, mixtures and golden answers."""


@adapter.command(
    "push",
    epilog=examples(
        "loraplex adapter push pirate ./out --tenant acme",
        "loraplex adapter push pirate ./pirate.tar.gz --api-key lpx_...",
    ),
)
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@BASE
@tenant_options()
def push(name: str, path: Path, base: str | None, tenant: str | None, gateway: Gateway) -> None:
    """Upload the PEFT folder (or .zip, .tar, .tar.gz) PATH as NAME. It can be used at once, unless its probe in an
    engine takes long.

    No version is added if the content equals that of the version to which NAME refers. A large upload is sent in parts.
    If it breaks, the same command goes on where it was. A warning says if the adapter's config names another base model
    than the one that the gateway chose.
    """
    made = gateway.run(lambda client: _push(client, tenant, name, path, _named(base)))
    click.echo(f"pushed {made['name']} version {made['version']}, rank {made['rank']}, {made['digest']}")
    _note_state(made)
    # Imported here, so that the command line starts without numpy.
    from loraplex.trained_base import base_warning

    if (warning := base_warning(path, made.get("base"))) is not None:
        click.echo(f"warning: {warning}", err=True)


async def _push(
    client: "GatewayClient", tenant: str | None, name: str, path: Path, base: dict[str, str]
) -> dict[str, Any]:
    from adapters.checkpoint import check_ranks
    from adapters.manifest import AdapterError
    from loraplex.client import upload_files
    from loraplex.client_paths import uploads_path
    from loraplex.resumable_push import MIN_BYTES, max_rank, push_in_parts
    from loraplex.trained_base import read_upload

    if sum(file.stat().st_size for file in upload_files(path).values()) < MIN_BYTES:
        return await client.push_adapter(tenant, name, path, **base)
    # The gateway would refuse the same, but only after all of the upload.
    with one_line(AdapterError):
        headers = read_upload(path)
        highest = await max_rank(client, uploads_path(tenant), base.get("base"))
        if headers is not None and highest is not None:
            check_ranks(*headers[:2], highest)
    return await push_in_parts(client, uploads_path(tenant), name, path, _progress(), **base)


def _named(base: str | None) -> dict[str, str]:
    return {} if base is None else {"base": base}


def _note_state(made: dict[str, Any]) -> None:
    if made.get("state") == "validating":
        click.echo("it is not ready yet: an engine has to probe it first. Until then requests get the previous version")


def _progress() -> Callable[[int, int], None]:
    """Return a function that shows the bytes received. It repeats no line: a last part may be less than a MiB."""
    last = ""

    def show(received: int, size: int) -> None:
        nonlocal last
        line = f"{received >> 20} of {size >> 20} MiB"
        if line != last:
            click.echo(line, err=True)
        last = line

    return show


@adapter.command("import", epilog=examples("loraplex adapter import pirate hf://acme/pirate-lora --tenant acme"))
@click.argument("name")
@click.argument("source")
@BASE
@tenant_options()
def import_(name: str, source: str, base: str | None, tenant: str | None, gateway: Gateway) -> None:
    """Import an adapter as NAME from SOURCE, below a prefix that the gateway allows (LORAPLEX_IMPORT_SOURCES)."""
    made = gateway.run(lambda client: client.import_adapter(tenant, name, source, **_named(base)))
    click.echo(f"imported {made['name']} version {made['version']}, rank {made['rank']}, {made['digest']}")
    _note_state(made)


@adapter.command("list", epilog=examples("loraplex adapter list", "loraplex adapter list --idle 30d"))
@click.option(
    "--idle",
    type=Duration(),
    help="Only adapters of all tenants that have existed for this long without a request: 30d.",
)
@json_option
@tenant_options(or_all=True)
def list_all(tenant: str | None, idle: timedelta | None, as_json: bool, gateway: Gateway) -> None:
    """List the adapters of a tenant, or as an operator of all tenants with their use.

    Adapters whose uploads were all rejected are in the lists of an operator; `adapter versions NAME` says why.
    """
    is_of_all = tenant is None and not gateway.as_tenant
    if idle is not None and not is_of_all:
        raise click.UsageError("--idle: only for the list of all tenants, without --tenant and with the admin key")
    which = {} if idle is None else {"idle_days": idle_days(idle)}
    if is_of_all:
        rows = gateway.run(lambda client: every_adapter(client, **which))
    else:
        rows = gateway.run(lambda client: _adapters_of(client, tenant))
    if as_json:
        print_json(rows)
    elif is_of_all:
        print_every(rows)
    else:
        print_table(rows, ("name", "version", "base", "state", "rank", "size_bytes", "created_at", "digest"))


async def _adapters_of(client: "GatewayClient", tenant: str | None) -> list[dict[str, Any]]:
    """Return the adapters of a tenant. tenant: None for the key's own, without those that only have rejected versions.

    The tenant's route has adapters that requests can use; the operator's has the others.
    """
    rows = await client.adapters(tenant)
    if tenant is None:
        return rows
    rejected = await every_adapter(client, tenant=tenant, state="rejected")
    unusable = [row for row in rejected if row["state"] == "rejected"]
    return sorted([*rows, *unusable], key=lambda row: str(row["name"]))


@adapter.command(
    "delete", epilog=examples("loraplex adapter delete pirate --tenant acme", "loraplex adapter delete pirate@3")
)
@click.argument("name")
@click.option("--force", is_flag=True, help="Delete it even if aliases, saved mixtures or running requests use it.")
@yes_option
@tenant_options()
def delete(name: str, tenant: str | None, force: bool, yes: bool, gateway: Gateway) -> None:
    """Delete the adapter NAME with its versions, or one version such as pirate@3.

    An adapter or version that an alias, a saved mixture or a running request uses is deleted only with --force. Running
    requests then finish, and new ones get a 404.
    """
    if ":" in name:
        raise click.UsageError(f"{name} is an alias: `loraplex adapter unalias` deletes it and keeps its versions")
    # An impossible name goes to the gateway, whose answer says that there is none.
    reference = parse_reference(name) or Reference(name)
    confirm(f"Delete adapter {name}{' with all its versions' if reference.version is None else ''}?", is_given=yes)
    gateway.run(lambda client: client.delete_adapter(tenant, reference, force=force))
    click.echo(f"deleted adapter {name}")


for command in (*VERSION_COMMANDS, *MIXTURE_COMMANDS, *FLEET_COMMANDS, golden, verify):
    adapter.add_command(command)


@adapter.command("gc", epilog=examples("loraplex adapter gc", "loraplex adapter gc --dry-run"))
@click.option("--dry-run", is_flag=True, help="Remove nothing; print what would be removed.")
@admin_options
def collect(dry_run: bool, gateway: Gateway) -> None:
    """Remove content from the store that no adapter of any tenant has referred to for an hour. The gateways do this
    hourly.
    """
    done = gateway.run(lambda client: client.collect_adapters(dry_run=dry_run))
    verb = "would remove" if dry_run else "removed"
    click.echo(f"{verb} {done['removed']} adapters, {done['bytes']} bytes")
