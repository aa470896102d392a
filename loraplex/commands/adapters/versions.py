"""The `loraplex adapter` commands for versions and aliases. They are listed with the other commands of adapters."""

from typing import Any

import click

from loraplex.commands.common import Gateway, examples, tenant_options
from loraplex.commands.output import json_option, moment, print_json, print_table
from loraplex.commands.values import Moment
from wire.model_names import LATEST, Reference, parse_reference, version_name

NEVER = "never"


class VersionName(click.ParamType):
    """A version as `name@3`."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Reference:
        found = value if isinstance(value, Reference) else parse_reference(value)
        if found is None or found.version is None:
            self.fail(f"{value!r} is not a version like pirate@3", param, ctx)
        return found


class AliasName(click.ParamType):
    """An alias as `name:prod`; `name` alone is `name:latest`."""

    name = "alias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Reference:
        found = value if isinstance(value, Reference) else parse_reference(value)
        if found is None or found.version is not None:
            self.fail(f"{value!r} is not an alias like pirate:prod", param, ctx)
        return found


class TargetOption(click.ParamType):
    """A version of an alias as `3`, or with a weight as `3=95`."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        version, is_weighted, weight = value.partition("=")
        try:
            return {"version": int(version), **({"weight": int(weight)} if is_weighted else {})}
        except ValueError:
            self.fail(f"{value!r} is not a version like 3, nor one with a weight like 3=95", param, ctx)


class End(Moment):
    """A time in the future, or `never`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return NEVER if value == NEVER else super().convert(value, param, ctx)


@click.command("versions", epilog=examples("loraplex adapter versions pirate --tenant acme"))
@click.argument("name")
@json_option
@tenant_options()
def versions(name: str, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """List the versions of the adapter NAME and their states."""
    rows = gateway.run(lambda client: client.versions(tenant, name))
    if as_json:
        print_json(rows)
        return
    shown = [row | {"reasons": [reason["message"] for reason in row.get("reasons", [])]} for row in rows]
    columns = ("version", "state", "rank", "size_bytes", "created_at", "expires_at", "pinned", "digest", "reasons")
    print_table(shown, columns)


@click.command(
    "change",
    epilog=examples(
        "loraplex adapter change pirate@3 --state retired --tenant acme",
        "loraplex adapter change pirate@4 --expires 30d --tenant acme",
    ),
)
@click.argument("version", type=VersionName())
@click.option("--state", type=click.Choice(["ready", "retired"]), help="Stop or resume serving the version.")
@click.option(
    "--expires",
    "expires_at",
    type=End(ahead=True),
    help="End of its service: 2027-01-31 (UTC), 2027-01-31T12:00+01:00, 30d, 12h, ... from now, or never.",
)
@click.option(
    "--pin/--no-pin",
    "pinned",
    default=None,
    help="Keep it in engines' host memory, and on record beyond the newest 20 versions; for operators.",
)
@click.option("--force", is_flag=True, help="Retire it although an alias refers to it.")
@tenant_options()
def change(version: Reference, tenant: str | None, force: bool, gateway: Gateway, **fields: Any) -> None:
    """Change the VERSION of an adapter, such as pirate@3."""
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        raise click.UsageError("expected a value: --state, --expires, --pin or --no-pin")
    if given.get("expires_at") == NEVER:
        given["expires_at"] = None
    row = gateway.run(lambda client: client.change_version(tenant, version, given, force=force))
    details = [f"until {moment(row['expires_at'])}"] if row.get("expires_at") else []
    details += ["pinned"] if row.get("pinned") else []
    click.echo(", ".join([f"{version} is {row['state']}", *details]))


@click.command("aliases", epilog=examples("loraplex adapter aliases pirate --tenant acme"))
@click.argument("name")
@json_option
@tenant_options()
def aliases(name: str, tenant: str | None, as_json: bool, gateway: Gateway) -> None:
    """List the aliases of the adapter NAME, with the versions and weights of each."""
    rows = gateway.run(lambda client: client.aliases(tenant, name))
    if as_json:
        print_json(rows)
        return
    shown = [{"alias": row["alias"], "targets": _targets_text(row["targets"])} for row in rows]
    earlier = [row["history"][-1] if row["history"] else [] for row in rows]
    table = [
        shown_row | {"before": _targets_text(before), "etag": row["etag"].strip('"')}
        for shown_row, before, row in zip(shown, earlier, rows, strict=True)
    ]
    print_table(table, ("alias", "targets", "before", "etag"))


@click.command(
    "alias",
    epilog=examples(
        "loraplex adapter alias pirate:prod 3 --tenant acme",
        "loraplex adapter alias pirate:prod 3=95 4=5 --tenant acme",
    ),
)
@click.argument("alias", type=AliasName())
@click.argument("targets", type=TargetOption(), nargs=-1, required=True)
@click.option("--etag", help="Move it only if this is its ETag (see `aliases`); default: its present one.")
@tenant_options()
def move(
    alias: Reference, targets: tuple[dict[str, int], ...], etag: str | None, tenant: str | None, gateway: Gateway
) -> None:
    """Point an ALIAS, such as pirate:prod, to a version, or to several with weights."""
    if len({"weight" in target for target in targets}) > 1:
        raise click.UsageError("expected a weight for each version, such as 3=95 4=5, or for none")
    row = gateway.run(lambda client: client.move_alias(tenant, alias, list(targets), etag))
    _show_alias(row)


@click.command("rollback", epilog=examples("loraplex adapter rollback pirate:prod --tenant acme"))
@click.argument("alias", type=AliasName())
@tenant_options()
def rollback(alias: Reference, tenant: str | None, gateway: Gateway) -> None:
    """Roll an ALIAS back to its previous versions. Each call goes further back."""
    _show_alias(gateway.run(lambda client: client.rollback_alias(tenant, alias)))


@click.command("unalias", epilog=examples("loraplex adapter unalias pirate:prod --tenant acme"))
@click.argument("alias", type=AliasName())
@tenant_options()
def unalias(alias: Reference, tenant: str | None, gateway: Gateway) -> None:
    """Delete an ALIAS. Its versions stay."""
    gateway.run(lambda client: client.delete_alias(tenant, alias))
    click.echo(f"deleted alias {alias}")


COMMANDS = (versions, change, aliases, move, rollback, unalias)


def _show_alias(row: dict[str, Any]) -> None:
    alias = row["name"] if row["alias"] == LATEST else f"{row['name']}:{row['alias']}"
    click.echo(f"{alias} is {_targets_text(row['targets'], row['name'])}")


def _targets_text(targets: list[dict[str, Any]], name: str | None = None) -> str:
    """Return targets as one cell, `3` or `3=95,4=5`; with a name, as `pirate@3`."""
    shown = [version_name(name, each["version"]) if name else str(each["version"]) for each in targets]
    if len(targets) == 1:
        return shown[0]
    return ",".join(f"{text}={each['weight']}" for text, each in zip(shown, targets, strict=True))
