"""The command `loraplex adapter verify`."""

from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table
from wire.model_names import Reference, parse_reference, version_name

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


@click.command(
    "verify",
    epilog=examples("loraplex adapter verify pirate@3 --tenant acme", "loraplex adapter verify --all --tenant acme"),
)
@click.argument("version", required=False)
@click.option("--all", "all_ready", is_flag=True, help="Verify every ready version of the tenant.")
@json_option
@tenant_options()
def verify(version: str | None, all_ready: bool, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """Probe VERSION (such as pirate@3) again, and compare the result with the one on record.

    Use it after an upgrade of engines or of the base model. Exit with 1 if a version changed or is refused.
    """
    named = None if version is None else parse_reference(version)
    if all_ready == (version is not None) or (version is not None and (named is None or named.version is None)):
        raise click.UsageError("expected a version like pirate@3, or --all")
    found = gateway.run(lambda client: _verify(client, tenant, named))
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
    found = []
    for adapter in await client.adapters(tenant):
        for version in await client.versions(tenant, adapter["name"]):
            if version["state"] == "ready":
                reference = parse_reference(version_name(adapter["name"], version["version"]))
                assert reference is not None
                found.append(await client.verify(tenant, reference))
    return found
