"""The command `loraplex adapter verify`."""

from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.adapters.golden import check_row
from loraplex.commands.adapters.versions import VersionName
from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, print_json, print_table
from wire.digests import bare_digest
from wire.model_names import Reference, version_name

if TYPE_CHECKING:
    from loraplex.client import GatewayClient


@click.command(
    "verify",
    epilog=examples("loraplex adapter verify pirate@3 --tenant acme", "loraplex adapter verify --all --tenant acme"),
)
@click.argument("version", type=VersionName(), required=False)
@click.option("--all", "all_ready", is_flag=True, help="Verify every ready version of the tenant.")
@click.option("--engine", help="URL of the only engine to ask; for operators.")
@json_option
@tenant_options()
def verify(
    version: Reference | None,
    all_ready: bool,
    engine: str | None,
    tenant: str | None,
    as_json: bool,
    gateway: Gateway,
) -> None:
    """Probe VERSION (such as pirate@3) again and check its golden answers; compare both with those on record.

    Use it after an upgrade of engines or of the base model. With an operator's key, every engine of the version's base
    model is asked; with a tenant's own key, an engine of each release. Exit with 1 if a version changed or is refused.
    """
    if all_ready == (version is not None):
        raise click.UsageError("expected a version like pirate@3, or --all")
    if engine is not None and gateway.as_tenant:
        raise click.UsageError("--engine needs an operator's key")
    found = gateway.run(lambda client: _verify(client, tenant, version, engine))
    if as_json:
        print_json(found)
    else:
        print_table([_row(each) for each in found], ("version", *_COLUMNS))
    if any(each["changes"] or each["reasons"] or _num_different(each) for each in found):
        raise SystemExit(1)


_COLUMNS = ("engine", "base", "divergence", "changed", "reasons", "golden", "differs_at")


def _row(verification: dict[str, Any]) -> dict[str, Any]:
    divergence = verification.get("divergence")
    checks = [check_row(check) for check in verification["golden"]]
    return {
        "version": version_name(verification["name"], verification["version"]),
        "engine": verification["engine"],
        "base": verification.get("base"),
        "divergence": None if divergence is None else round(divergence, 4),
        "changed": [change_text(change) for change in verification["changes"]],
        "reasons": [reason["message"] for reason in verification["reasons"]],
        "golden": [check["agreement"] for check in checks],
        "differs_at": [place for check in checks for place in check["differs_at"]],
    }


def change_text(change: dict[str, Any]) -> str:
    """Return `divergence 0.4 -> 0.5`. The reasons have a column of their own."""
    if change["field"] == "reasons":
        return "reasons"
    before, now = (round(each, 4) if isinstance(each, float) else each for each in (change["before"], change["now"]))
    return f"{change['field']} {before} -> {now}"


def _num_different(verification: dict[str, Any]) -> int:
    return sum(len(check["differences"]) for check in verification["golden"])


async def _verify(
    client: "GatewayClient", tenant: str | None, named: Reference | None, engine: str | None
) -> list[dict[str, Any]]:
    references = [named] if named is not None else await _ready(client, tenant)
    return [row for reference in references for row in await _verify_one(client, tenant, reference, engine)]


async def _ready(client: "GatewayClient", tenant: str | None) -> list[Reference]:
    names = [adapter["name"] for adapter in await client.adapters(tenant)]
    return [
        Reference(name, version["version"])
        for name in names
        for version in await client.versions(tenant, name)
        if version["state"] == "ready"
    ]


async def _verify_one(
    client: "GatewayClient", tenant: str | None, reference: Reference, engine: str | None
) -> list[dict[str, Any]]:
    """Return a row for each engine that an operator asks, one row for a tenant."""
    if tenant is None:
        golden = await client.check_golden(None, reference)
        probed = await _probe(client, None, reference, needed=not golden)
        return [{"engine": None, **probed, "golden": golden}]
    rows = []
    engines = await _engines(client, tenant, reference, engine)
    if engine is None and not any(each["state"].get("probes") for each in engines):
        # No engine of the version's base model can probe it: this probe may bind the version to another one.
        probed = await _probe(client, tenant, reference, needed=not engines)
        if "digest" in probed:
            rows.append({"engine": None, **probed, "golden": []})
    for each in engines:
        probed = _unprobed(reference)
        if each["state"].get("probes"):
            probed = await client.verify(tenant, reference, each["url"])
        golden = await client.check_golden(tenant, reference, each["url"])
        rows.append({"engine": each["url"], **probed, "golden": golden})
    return rows


async def _probe(client: "GatewayClient", tenant: str | None, reference: Reference, *, needed: bool) -> dict[str, Any]:
    """Probe a version again on any engine. Unless needed, the result is empty if no engine can probe it."""
    from loraplex.client import GatewayError

    try:
        return await client.verify(tenant, reference)
    except GatewayError as error:
        if needed or error.status != 503:
            raise
        return _unprobed(reference)


def _unprobed(reference: Reference) -> dict[str, Any]:
    return {"name": reference.name, "version": reference.version, "changes": [], "reasons": []}


async def _engines(
    client: "GatewayClient", tenant: str, reference: Reference, only: str | None
) -> list[dict[str, Any]]:
    """Return the available engines that serve the version's base model, or the one of the URL `only`."""
    from loraplex.client import GatewayError

    available = [engine for engine in await client.engines() if engine["reason"] is None]
    if only is not None:
        found = [engine for engine in available if engine["url"] == only.rstrip("/")]
        if not found:
            raise GatewayError(f"no available engine has the URL {only}")
        return found
    base = await _base(client, tenant, reference)
    return [engine for engine in available if base is None or engine["state"].get("base_digest") in (None, base)]


async def _base(client: "GatewayClient", tenant: str, reference: Reference) -> str | None:
    """Return the digest of the base model that the version is bound to; None if it is unknown."""
    from loraplex.client import GatewayError

    try:
        found = (await client.probe(tenant, reference))["bound_to"]
    except GatewayError as error:
        if error.status != 404:
            raise
        return None
    return None if found is None else bare_digest(found)
