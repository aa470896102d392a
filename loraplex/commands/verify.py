"""The command `loraplex adapter verify`."""

from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table
from loraplex.commands.versions import VersionName
from wire.model_names import Reference, version_name

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


@click.command(
    "verify",
    epilog=examples("loraplex adapter verify pirate@3 --tenant acme", "loraplex adapter verify --all --tenant acme"),
)
@click.argument("version", type=VersionName(), required=False)
@click.option("--all", "all_ready", is_flag=True, help="Verify every ready version of the tenant.")
@json_option
@tenant_options()
def verify(version: Reference | None, all_ready: bool, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """Probe VERSION (such as pirate@3) again, and compare the result with the one on record.

    Use it after an upgrade of engines or of the base model. Exit with 1 if a version changed or is refused.
    """
    if all_ready == (version is not None):
        raise click.UsageError("expected a version like pirate@3, or --all")
    found = gateway.run(lambda client: _verify(client, tenant, version))
    if as_json:
        print_json(found)
    else:
        rows = [
            {
                "version": version_name(each["name"], each["version"]),
                "base": each["base"],
                "divergence": round(each["divergence"], 4) if each["divergence"] is not None else None,
                "changed": [change["field"] for change in each["changes"]],
                "reasons": [reason["message"] for reason in each["reasons"]],
            }
            for each in found
        ]
        print_table(rows, ("version", "base", "divergence", "changed", "reasons"))
    if any(each["changes"] or each["reasons"] for each in found):
        raise SystemExit(1)


async def _verify(client: "GatewayClient", tenant: str | None, named: Reference | None) -> list[dict[str, Any]]:
    if named is not None:
        return [await client.verify(tenant, named)]
    names = [adapter["name"] for adapter in await client.adapters(tenant)]
    ready = [
        Reference(name, version["version"])
        for name in names
        for version in await client.versions(tenant, name)
        if version["state"] == "ready"
    ]
    return [await client.verify(tenant, reference) for reference in ready]
