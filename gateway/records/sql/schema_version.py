"""Version of a database's schema, and the versions that this program knows, read without Alembic.

Each gateway compares them at its start; Alembic, whose import takes a tenth of it, is loaded only to migrate.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, inspect, text

import migrations as scripts


class Migration(NamedTuple):
    """Version of the schema."""

    revision: str
    title: str


@cache
def migrations() -> list[Migration]:
    """Return all versions of the schema, the newest first. It reads files.

    A version's file begins with its revision, its content with a docstring whose first line is the title.
    """
    files = sorted(Path(scripts.__file__).with_name("versions").glob("[0-9]*_*.py"), reverse=True)
    return [Migration(path.name.partition("_")[0], _title(path)) for path in files]


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def read_revision(connection: Connection) -> str | None:
    """Return the schema's version, which Alembic keeps in a table; None before the first migration."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
