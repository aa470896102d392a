"""The command `loraplex tenant apply`: plans and tenants as a file describes them."""

import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import Gateway, admin_options, examples, one_line
from loraplex.commands.tenants.bulk import field_text

if TYPE_CHECKING:
    from loraplex.client import GatewayClient
    from loraplex.commands.tenants.file import Entry, TenantFile


@dataclass(frozen=True)
class Step:
    """Change that makes the gateway match the file. call: function that makes it. line: its line in the file, 0 for a
    deletion.
    """

    name: str
    text: str
    line: int
    call: "Callable[[GatewayClient], Awaitable[Any]]"


@click.command(
    "apply",
    epilog=examples(
        "loraplex tenant apply -f tenants.yaml --dry-run",
        "loraplex tenant apply -f tenants.yaml",
        "loraplex tenant apply -f tenants.yaml --prune --yes",
    ),
)
@click.option("-f", "--file", type=click.Path(path_type=Path), required=True, help="YAML file of plans and tenants.")
@click.option("--dry-run", is_flag=True, help="Only show the differences, as old -> new.")
@click.option("--prune", is_flag=True, help="Also delete the tenants that the file does not contain.")
@click.option("--force", is_flag=True, help="Accept model_limits of models that do not exist yet.")
@click.option("--yes", is_flag=True, help="Do not ask before a deletion; required without a terminal.")
@admin_options
def apply(file: Path, dry_run: bool, prune: bool, force: bool, yes: bool, gateway: Gateway) -> None:
    """Create and change plans and tenants as a YAML file describes them. Absent fields do not change."""
    from loraplex.commands.tenants.file import FileError, read_file

    with one_line(FileError, OSError):
        wanted = read_file(file)

    async def look(client: "GatewayClient") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await client.plans(), await client.tenants()

    plans, tenants = gateway.run(look)
    _check_plans(wanted, plans, file)
    steps = [*_plan_steps(wanted, plans), *_tenant_steps(wanted, plans, tenants, force=force)]
    gone = [row["name"] for row in tenants if row["name"] not in wanted.tenants] if prune else []
    steps += [Step(f"tenant {name}", "delete", 0, _deletion(name)) for name in gone]
    for step in steps:
        click.echo(f"{step.name}: {step.text}")
    count = f"{len(steps)} difference" + "s" * (len(steps) != 1)
    if dry_run or not steps:
        click.echo(count)
        return
    _confirm(gone, yes=yes)
    gateway.run(lambda client: _make(client, steps, file))
    click.echo(f"applied {count}")


def _check_plans(wanted: "TenantFile", plans: list[dict[str, Any]], file: Path) -> None:
    """Refuse a tenant's plan that neither the file nor the gateway has."""
    known = {None, *(row["name"] for row in plans), *wanted.plans}
    for name, entry in wanted.tenants.items():
        if (plan := entry.fields.get("plan")) not in known:
            raise click.ClickException(f"{file}, line {entry.line}: tenant {name}: there is no plan '{plan}'")


def _confirm(gone: list[str], *, yes: bool) -> None:
    if not gone or yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("nothing was changed: deletions without a terminal require --yes")
    if not click.confirm(f"Delete {len(gone)} tenants with their keys and adapters?", err=True):
        raise click.ClickException("nothing was changed")


async def _make(client: "GatewayClient", steps: list[Step], file: Path) -> None:
    from loraplex.client import GatewayError

    for done, step in enumerate(steps):
        try:
            await step.call(client)
        except GatewayError as error:
            place = f"{file}, line {step.line}: " if step.line else ""
            message = f"{place}{step.name}: {error} ({done} of {len(steps)} differences were applied)"
            raise GatewayError(message, error.status, error.code) from error


def _plan_steps(wanted: "TenantFile", known: list[dict[str, Any]]) -> list[Step]:
    by_name, steps = {row["name"]: row for row in known}, []
    for name, entry in wanted.plans.items():
        old = by_name.get(name)
        if old is None:
            body: dict[str, Any] = dict(entry.fields)
            text = "create"
        else:
            changes = _changes(entry, old, "plan")
            if not changes:
                continue
            own = {field: old[field] for field, source in old["sources"].items() if source == "plan"}
            body = own | {"prices": old["prices"]} | entry.fields
            body = {field: value for field, value in body.items() if field not in entry.inherit}
            text = ", ".join(changes)
        steps.append(Step(f"plan {name}", text, entry.line, _plan_call(name, body)))
    return steps


def _tenant_steps(
    wanted: "TenantFile", plans: list[dict[str, Any]], known: list[dict[str, Any]], *, force: bool
) -> list[Step]:
    by_name, steps = {row["name"]: row for row in known}, []
    of_models = {row["name"]: row["model_limits"] for row in plans}
    of_models |= {n: e.fields["model_limits"] for n, e in wanted.plans.items() if "model_limits" in e.fields}
    for name, entry in wanted.tenants.items():
        old = by_name.get(name)
        if old is None:
            steps.append(Step(f"tenant {name}", "create", entry.line, _creation(name, entry.fields, force=force)))
        elif changes := _changes(entry, old, "tenant", of_models.get(entry.fields.get("plan", old["plan"]), {})):
            body = entry.fields | ({"inherit": entry.inherit} if entry.inherit else {})
            steps.append(Step(f"tenant {name}", ", ".join(changes), entry.line, _update(name, body, force=force)))
    return steps


def _changes(
    entry: "Entry", old: Mapping[str, Any], source: str, of_models: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the differences of a plan or tenant, as texts. source: that of a term which the entry sets itself."""
    found = []
    for field, value in entry.fields.items():
        present, from_where = old.get(field), old["sources"].get(field, source)
        then = (of_models or {}) | value if field == "model_limits" and value is not None else value
        if field == "prices":
            then = {model: {"cached": price.get("input")} | price for model, price in (value or {}).items()}
        if (present or None) != (then or None) or from_where != source:
            now = field_text(field, present) + ("" if from_where == source else f" ({from_where})")
            found.append(f"{field} {now} -> {field_text(field, then)}")
    found += [
        f"{field} {field_text(field, old[field])} -> inherited"
        for field in entry.inherit
        if old["sources"][field] == source
    ]
    return found


def _plan_call(name: str, body: dict[str, Any]) -> "Callable[[GatewayClient], Awaitable[Any]]":
    return lambda client: client.set_plan(name, body)


def _creation(name: str, fields: dict[str, Any], *, force: bool) -> "Callable[[GatewayClient], Awaitable[Any]]":
    return lambda client: client.create_tenant(name, force=force, **fields)


def _update(name: str, body: dict[str, Any], *, force: bool) -> "Callable[[GatewayClient], Awaitable[Any]]":
    return lambda client: client.update_tenant(name, force=force, **body)


def _deletion(name: str) -> "Callable[[GatewayClient], Awaitable[Any]]":
    return lambda client: client.delete_tenant(name)
