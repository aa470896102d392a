"""The `loraplex adapter` commands for saved mixtures. They are listed with the other commands of adapters."""

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table


@click.command("mixtures", epilog=examples("loraplex adapter mixtures --tenant acme"))
@json_option
@tenant_options()
def mixtures(tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """List the saved mixtures."""
    rows = gateway.run(lambda client: client.mixtures(tenant))
    if as_json:
        print_json(rows)
    else:
        print_table([row | {"etag": row["etag"].strip('"')} for row in rows], ("name", "model", "etag"))


@click.command("mix", epilog=examples("loraplex adapter mix blend 'pirate*0.7+json:prod*0.3' --tenant acme"))
@click.argument("name")
@click.argument("mixture")
@click.option("--etag", help="Replace it only if this is its ETag (see `mixtures`); default: its present one.")
@tenant_options()
def mix(name: str, mixture: str, etag: str | None, tenant: str | None, gateway: Gateway) -> None:
    """Save a MIXTURE of adapters, such as pirate*0.7+json:prod*0.3, under a NAME."""
    row = gateway.run(lambda client: client.save_mixture(tenant, name, mixture, etag))
    click.echo(f"{name} is {row['model']}")


@click.command("unmix", epilog=examples("loraplex adapter unmix blend --tenant acme"))
@click.argument("name")
@tenant_options()
def unmix(name: str, tenant: str | None, gateway: Gateway) -> None:
    """Delete the saved mixture NAME. Its adapters stay."""
    gateway.run(lambda client: client.delete_mixture(tenant, name))
    click.echo(f"deleted mixture {name}")


COMMANDS = (mixtures, mix, unmix)
