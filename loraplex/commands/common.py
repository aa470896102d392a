"""What the commands share: how errors reach the user, where the gateway is, tables."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from loraplex.datadir import DataDirError, read_json

if TYPE_CHECKING:
    from loraplex.client import GatewayClient

T = TypeVar("T")
DATA_DIR = Path(".loraplex")


@contextmanager
def one_line(*errors: type[Exception]) -> Iterator[None]:
    """Turns domain errors into a message on stderr and exit code 1; anything else is a bug and keeps its trace."""
    try:
        yield
    except errors as error:
        raise click.ClickException(str(error)) from error


@dataclass(frozen=True)
class Gateway:
    """Where a command's gateway is and the key to use; `tenant` None means the key is a tenant's own."""

    url: str
    key: str

    def run(self, work: "Callable[[GatewayClient], Awaitable[T]]") -> T:
        from loraplex.client import GatewayClient, GatewayError

        async def connected() -> T:
            async with GatewayClient(self.url, self.key) as client:
                return await work(client)

        with one_line(GatewayError, OSError):
            return asyncio.run(connected())


def find_gateway(url: str | None, key: str | None, data_dir: Path, key_flag: str = "--admin-key") -> Gateway:
    """Flags (or their environment) first, then what `loraplex up` left in the data directory.

    local.json's key goes to local.json's gateway only. Raises click.UsageError naming what is missing.
    """
    path = data_dir / "local.json"
    with one_line(DataDirError):
        local = (read_json(path) or {}) if url is None or key is None else {}
    url = url or local.get("gateway")
    if not url:
        raise click.UsageError(f"--gateway is not given, and {path} does not exist")
    if not key and is_gateway_of(local, url):
        key = local["admin_key"]
    if not key:
        raise click.UsageError(f"{key_flag} is not given, and {path} {whose(local, url)}")
    return Gateway(url, key)


def is_gateway_of(stored: dict[str, Any], url: str) -> bool:
    """Whether what a file in the data directory holds is meant for this gateway; no other may see its keys."""
    return stored.get("gateway", "").rstrip("/") == url.rstrip("/")


def whose(stored: dict[str, Any], url: str) -> str:
    """Why a file's keys are not used for `url`: the end of an error's sentence."""
    return f"is of {stored['gateway']}, not of {url}" if stored else "does not exist"


def _where_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            default=DATA_DIR,
            show_default=True,
            help="Where `loraplex up` left local.json, read when the two options above are not given.",
        ),
        click.option("--admin-key", envvar="LORAPLEX_ADMIN_KEY", help="An operator's key. [env: LORAPLEX_ADMIN_KEY]"),
        click.option("--gateway", envvar="LORAPLEX_GATEWAY", help="The gateway's URL. [env: LORAPLEX_GATEWAY]"),
    ):
        command = option(command)
    return command


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """For an operator's command: it gets `gateway`, found by these flags."""

    @_where_options
    @wraps(command)
    def found(gateway: str | None, admin_key: str | None, data_dir: Path, **given: Any) -> None:
        command(gateway=find_gateway(gateway, admin_key, data_dir), **given)

    return found


def tenant_options(command: Callable[..., None]) -> Callable[..., None]:
    """For what a tenant may do itself: the command gets `gateway` and `tenant`, the latter None with its own key."""

    @click.option("--tenant", help="Whose; needs an operator's key.")
    @click.option(
        "--api-key", envvar="LORAPLEX_API_KEY", help="A tenant's own key, instead of --tenant. [env: LORAPLEX_API_KEY]"
    )
    @_where_options
    @wraps(command)
    def found(
        tenant: str | None,
        api_key: str | None,
        gateway: str | None,
        admin_key: str | None,
        data_dir: Path,
        **given: Any,
    ) -> None:
        if tenant is not None:
            where = find_gateway(gateway, admin_key, data_dir)
        elif api_key is not None:
            where = find_gateway(gateway, api_key, data_dir, "--api-key")
        else:
            raise click.UsageError("say whose: --tenant NAME (as an operator) or --api-key KEY (as the tenant)")
        command(tenant=tenant, gateway=where, **given)

    return found


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Plain aligned columns, one line a row: reads well, and pipes into awk."""
    cells = [[column.upper() for column in columns]]
    cells += [["-" if row.get(column) is None else str(row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
