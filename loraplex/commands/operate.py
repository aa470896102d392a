"""`loraplex tenant | key | adapter | usage`: an operator's work through the gateway's HTTP API."""

import json
from pathlib import Path

import click

from loraplex.commands.common import Gateway, find_gateway, gateway_options, print_table


@click.group()
def tenant() -> None:
    """Create and list tenants."""


@tenant.command("create")
@click.argument("name")
@click.option("--requests-per-minute", type=int, help="Requests a minute; default: the gateway's (600).")
@click.option("--tokens-per-minute", type=int, help="Prompt and output tokens a minute; default: 200000.")
@click.option("--max-concurrent", type=int, help="Requests at the same time; default: 32.")
@click.option("--weight", type=float, help="Share of a busy engine, relative to the other tenants'.")
@gateway_options
def tenant_create(
    name: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent: int | None,
    weight: float | None,
    gateway: str | None,
    admin_key: str | None,
    data_dir: Path,
) -> None:
    """Create the tenant NAME."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "weight": weight,
    }
    given = {key: value for key, value in limits.items() if value is not None}
    find_gateway(gateway, admin_key, data_dir).run(lambda client: client.create_tenant(name, **given))
    click.echo(f"created tenant {name}; next: loraplex key create {name}")


@tenant.command("list")
@gateway_options
def tenant_list(gateway: str | None, admin_key: str | None, data_dir: Path) -> None:
    """List the tenants and their limits."""
    rows = find_gateway(gateway, admin_key, data_dir).run(lambda client: client.tenants())
    print_table(rows, ("name", "requests_per_minute", "tokens_per_minute", "max_concurrent", "weight"))


@click.group()
def key() -> None:
    """Create, list and revoke tenants' API keys."""


@key.command("create")
@click.argument("tenant")
@gateway_options
def key_create(tenant: str, gateway: str | None, admin_key: str | None, data_dir: Path) -> None:
    """Create an API key for TENANT. Only the key is printed on stdout; it cannot be shown again."""
    made = find_gateway(gateway, admin_key, data_dir).run(lambda client: client.create_key(tenant))
    click.echo(f"id {made['id']}; keep the key, it is shown only now:", err=True)
    click.echo(made["key"])


@key.command("list")
@click.argument("tenant")
@gateway_options
def key_list(tenant: str, gateway: str | None, admin_key: str | None, data_dir: Path) -> None:
    """List TENANT's keys, without the keys themselves."""
    rows = find_gateway(gateway, admin_key, data_dir).run(lambda client: client.keys(tenant))
    print_table(rows, ("id", "created_at", "revoked_at"))


@key.command("revoke")
@click.argument("key_id")
@gateway_options
def key_revoke(key_id: str, gateway: str | None, admin_key: str | None, data_dir: Path) -> None:
    """Revoke the key with this id."""
    find_gateway(gateway, admin_key, data_dir).run(lambda client: client.revoke_key(key_id))
    click.echo(f"revoked key {key_id}")


@click.group()
def adapter() -> None:
    """Upload and list LoRA adapters."""


def _adapters_of(
    tenant: str | None, api_key: str | None, gateway: str | None, admin_key: str | None, data_dir: Path
) -> Gateway:
    """The gateway with the tenant's own key, or the operator's if the tenant is named."""
    if tenant is None and api_key is None:
        raise click.UsageError("say whose adapters: --tenant NAME (as an operator) or --api-key KEY (as the tenant)")
    if tenant is not None:
        return find_gateway(gateway, admin_key, data_dir)
    return find_gateway(gateway, api_key, data_dir, "--api-key")


_tenant_option = click.option("--tenant", help="Whose adapters; needs an operator's key.")
_api_key_option = click.option(
    "--api-key", envvar="LORAPLEX_API_KEY", help="A tenant's own key, instead of --tenant. [env: LORAPLEX_API_KEY]"
)


@adapter.command("push")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@_tenant_option
@_api_key_option
@gateway_options
def adapter_push(
    name: str,
    path: Path,
    tenant: str | None,
    api_key: str | None,
    gateway: str | None,
    admin_key: str | None,
    data_dir: Path,
) -> None:
    """Upload the PEFT folder (or .zip, .tar, .tar.gz) PATH as NAME. It can be used at once."""
    where = _adapters_of(tenant, api_key, gateway, admin_key, data_dir)
    made = where.run(lambda client: client.push_adapter(tenant, name, path))
    click.echo(f"pushed {made['name']} version {made['version']}, rank {made['rank']}, {made['digest']}")


@adapter.command("list")
@_tenant_option
@_api_key_option
@gateway_options
def adapter_list(
    tenant: str | None, api_key: str | None, gateway: str | None, admin_key: str | None, data_dir: Path
) -> None:
    """List a tenant's adapters."""
    where = _adapters_of(tenant, api_key, gateway, admin_key, data_dir)
    print_table(where.run(lambda client: client.adapters(tenant)), ("name", "version", "rank", "size_bytes", "digest"))


@click.command()
@_tenant_option
@_api_key_option
@gateway_options
def usage(tenant: str | None, api_key: str | None, gateway: str | None, admin_key: str | None, data_dir: Path) -> None:
    """Show a tenant's usage as JSON."""
    where = _adapters_of(tenant, api_key, gateway, admin_key, data_dir)
    click.echo(json.dumps(where.run(lambda client: client.usage(tenant)), indent=2))
