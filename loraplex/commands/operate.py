"""`loraplex adapter | usage`: a tenant's, with its own key or as an operator."""

from pathlib import Path

import click

from loraplex.commands.common import Gateway, print_json, print_table, tenant_options
from loraplex.commands.values import Moment, given


@click.group()
def adapter() -> None:
    """Upload, list and delete LoRA adapters."""


@adapter.command("push")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@tenant_options
def push(name: str, path: Path, tenant: str | None, gateway: Gateway) -> None:
    """Upload the PEFT folder (or .zip, .tar, .tar.gz) PATH as NAME. It can be used at once."""
    made = gateway.run(lambda client: client.push_adapter(tenant, name, path))
    click.echo(f"pushed {made['name']} version {made['version']}, rank {made['rank']}, {made['digest']}")


@adapter.command("list")
@tenant_options
def list_all(tenant: str | None, gateway: Gateway) -> None:
    """List a tenant's adapters."""
    rows = gateway.run(lambda client: client.adapters(tenant))
    print_table(rows, ("name", "version", "rank", "size_bytes", "digest"))


@adapter.command("delete")
@click.argument("name")
@tenant_options
def delete(name: str, tenant: str | None, gateway: Gateway) -> None:
    """Delete the adapter NAME with its versions."""
    gateway.run(lambda client: client.delete_adapter(tenant, name))
    click.echo(f"deleted adapter {name}")


@click.command()
@click.option("--since", type=Moment(ahead=False), help="From this moment on: 2026-11-01, or 30d, 12h, ... ago.")
@click.option("--until", type=Moment(ahead=False), help="Before this moment.")
@click.option("--by", "group_by", help="Told apart by some of model,key,day, comma separated; default: model.")
@tenant_options
def usage(tenant: str | None, gateway: Gateway, **query: str | None) -> None:
    """Show a tenant's usage as JSON."""
    print_json(gateway.run(lambda client: client.usage(tenant, **given(query))))
