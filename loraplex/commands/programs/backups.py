"""The `loraplex backup | restore` commands: an installation in one file. They use the database, not a gateway."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loraplex.commands.common import database_url, examples, one_line, run, settings_errors, variable

if TYPE_CHECKING:
    from adapters.store import AdapterStore

# Names of adapters in an error line at most.
NAMED = 3


class AdaptersMissing(click.ClickException):
    """The restored installation has adapters whose files the store lacks."""

    exit_code = 3

    def __init__(self, digests: list[str]) -> None:
        count = "1 adapter" if len(digests) == 1 else f"{len(digests)} adapters"
        super().__init__(
            f"the adapter store lacks the files of {count}, and requests for these fail; all else is restored. Copy "
            "the folders of these digests from the old store, then start the gateways:\n" + "\n".join(digests)
        )


def _options(command: Callable[..., None]) -> Callable[..., None]:
    store = click.option(
        "--adapter-store",
        envvar="LORAPLEX_ADAPTER_STORE",
        required=True,
        help="Folder or s3:// URL of the adapters. [env: LORAPLEX_ADAPTER_STORE]",
    )
    return click.argument("file", type=click.Path(path_type=Path))(store(command))


@click.command(epilog=examples("loraplex backup /backups/2026-11-23.loraplex --with-adapters"))
@click.option("--with-adapters", is_flag=True, help="Also store the adapters' files, not only their digests.")
@_options
def backup(file: Path, adapter_store: str, with_adapters: bool) -> None:
    """Write the database at LORAPLEX_DATABASE_URL to a new FILE that only you can read; gateways may run.

    Store LORAPLEX_KEY_PEPPER elsewhere: without it, no API key of the backup works. The pepper of `loraplex up` is in
    secrets.json of its data directory.
    """
    from gateway.records.backup.write import write_backup
    from gateway.records.sql.database import Database

    if "://" not in adapter_store and not Path(adapter_store).is_dir():
        raise click.ClickException(f"--adapter-store: no such folder: {adapter_store}")

    async def written() -> Any:
        database = Database(database_url())
        try:
            with _opened(adapter_store) as store:
                return await write_backup(file, database, store, pepper_fingerprints(), with_adapters=with_adapters)
        finally:
            await database.close()

    with database_errors():
        done = run(written())
    content = "adapters with their files" if with_adapters else "digests of adapters"
    click.echo(f"{file}: {done.rows} rows, {done.adapters} {content}, {file.stat().st_size} bytes")
    click.echo("Keep LORAPLEX_KEY_PEPPER apart from it: without the pepper, no API key works.")
    if not done.peppers:
        click.echo("The file has no fingerprint of the pepper, so a restore cannot check it: no key has one.")
    if done.missing:
        raise click.ClickException(f"the adapter store lacks {_named(done.missing)}; the rest was backed up")


@click.command(epilog=examples("loraplex restore /backups/2026-11-23.loraplex"))
@_options
def restore(file: Path, adapter_store: str) -> None:
    """Restore FILE into the empty database at LORAPLEX_DATABASE_URL, and migrate it to the newest schema.

    Exit with 3 if all is restored except files of adapters that neither the backup nor the store has, and list these
    adapters on stderr.
    """
    from gateway.records.backup.file import BackupFile
    from gateway.records.backup.restore import check_peppers, restore_backup
    from gateway.records.sql.database import Database

    async def restored(backup: BackupFile) -> Any:
        database = Database(database_url())
        try:
            with _opened(adapter_store) as store:
                return await restore_backup(backup, database, store)
        finally:
            await database.close()

    with database_errors(), BackupFile(file) as backup:
        check_peppers(backup, pepper_fingerprints())
        done = run(restored(backup))
        needed = backup.header.peppers
    click.echo(f"restored {done.rows} rows and the files of {done.adapters} adapters")
    if not needed:
        click.echo("LORAPLEX_KEY_PEPPER was not checked: the backup has no fingerprint of its pepper.")
    elif not pepper_fingerprints():
        click.echo(f"Start the gateways with the backup's LORAPLEX_KEY_PEPPER (fingerprint: {', '.join(needed)}).")
    if done.missing:
        raise AdaptersMissing(done.missing)


def pepper_fingerprints() -> tuple[str, ...]:
    """Return the fingerprints of the peppers in LORAPLEX_KEY_PEPPER; none without the variable."""
    from gateway.access.peppers import fingerprint, split_peppers

    given = variable("LORAPLEX_KEY_PEPPER")
    return tuple(map(fingerprint, split_peppers(given))) if given else ()


@contextmanager
def _opened(url: str) -> "Iterator[AdapterStore]":
    """Open the adapter store; local copies of a bucket's adapters are made in a temporary folder."""
    from adapters.open_store import open_store

    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        # Each copy is discarded after its use, so the limit is never reached.
        try:
            store = open_store(url, Path(folder), cache_bytes=1 << 62)
        except ValueError as error:
            raise click.UsageError(f"--adapter-store: {error}") from error
        try:
            yield store
        finally:
            store.close()


@contextmanager
def database_errors() -> Iterator[None]:
    """Report every failure of the file, the database, the store and the settings in one line."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.errors import Unavailable
    from gateway.records.backup.file import BackupError

    try:
        with settings_errors(), one_line(BackupError, OSError, Unavailable):
            yield
    except SQLAlchemyError as error:
        raise click.ClickException(f"LORAPLEX_DATABASE_URL: {str(error).splitlines()[0]}") from error


def _named(digests: list[str]) -> str:
    """Return the number of adapters and the first of their digests."""
    more = ", ..." if len(digests) > NAMED else ""
    return f"{len(digests)} adapters ({', '.join(digests[:NAMED])}{more})"
