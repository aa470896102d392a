"""Database URLs as hosts of databases write them, and URLs with mistakes."""

import pytest
from click.testing import CliRunner
from sqlalchemy import text

from gateway.records.sql.database import Database
from gateway.setting_errors import SettingsError
from gateway.settings import Settings
from loraplex.cli import main


@pytest.mark.integration
@pytest.mark.parametrize("options", ["sslmode=disable", "ssl=prefer", "sslmode=prefer&statement_cache_size=0"])
async def test_a_url_with_the_options_of_other_clients_connects(migrated_postgres_url: str, options: str):
    database = Database(f"{migrated_postgres_url}{'&' if '?' in migrated_postgres_url else '?'}{options}")
    try:
        await database.check_schema()
        async with database.read() as connection:
            assert (await connection.execute(text("SELECT count(*) FROM tenants"))).scalar_one() == 0
    finally:
        await database.close()


WRONG = [
    ("postgresql://u:p@hush:quiet/d@db/loraplex", "special characters of the password as %XX"),
    ("postgresql://u:hush@db/loraplex?sslmode=always", "sslmode: expected one of disable"),
    ("postgresql://u:hush@db/loraplex?sslmode=verify-full&sslrootcert=/ca.pem", "set the variable PGSSLROOTCERT"),
    ("postgresql://u:hush@db/loraplex?gssencmode=disable", "unknown option 'gssencmode'"),
    ("postgresql://u:hush@db/loraplex?statement_cache_size=no", "statement_cache_size: expected a whole number"),
    ("mysql://u:hush@db", "expected a URL that starts with sqlite:// or postgresql://"),
]


@pytest.mark.parametrize(("url", "says"), WRONG)
def test_a_wrong_url_is_one_line_without_the_password(url: str, says: str):
    """Both the commands that use the database and the gateway name the setting and the mistake."""
    done = CliRunner().invoke(main, ["migrate"], env={"LORAPLEX_DATABASE_URL": url})
    assert done.exit_code == 2
    [line] = done.output.splitlines()
    assert line.startswith("Error: LORAPLEX_DATABASE_URL: ")
    assert says in line
    with pytest.raises(SettingsError) as refused:
        Settings.load({"LORAPLEX_DATABASE_URL": url})
    [of_url] = [each for each in str(refused.value).splitlines() if each.startswith("LORAPLEX_DATABASE_URL: ")]
    assert says in of_url
    assert not any(word in line + of_url for word in ("hush", "quiet"))
