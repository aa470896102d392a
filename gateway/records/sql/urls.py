"""Database URLs: their schemes, with the driver of each, and the options of a PostgreSQL URL.

PostgreSQL's own clients and most hosts of databases name the TLS mode `sslmode`; the driver names it `ssl`.
"""

from typing import Any, NamedTuple

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
EXPECTED = "a URL that starts with sqlite:// or postgresql://"
TLS_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# Options that the driver expects as numbers.
NUMBERS = ("statement_cache_size", "max_cached_statement_lifetime", "max_cacheable_statement_size")
# Options of TLS that the driver reads from the environment only, with their variables.
VARIABLES = {name: f"PG{name.upper()}" for name in ("sslrootcert", "sslcert", "sslkey", "sslcrl")}
OPTIONS = frozenset(
    {
        *("host", "port", "ssl", "sslmode", "direct_tls", "target_session_attrs", "passfile", "service", "servicefile"),
        *("krbsrvname", "gsslib", "timeout", "command_timeout", "async_fallback", "prepared_statement_cache_size"),
        *NUMBERS,
    }
)


class ParsedUrl(NamedTuple):
    """A URL with its async driver. options: further arguments of the driver's connect function."""

    url: URL
    options: dict[str, Any]


def parse_url(text: str) -> ParsedUrl:
    """Parse a database's URL. Raises ValueError, without quoting the URL, which may contain a password."""
    try:
        parsed = make_url(text)
    except ArgumentError:
        raise ValueError(f"expected {EXPECTED}") from None
    except ValueError:
        # A password with an unescaped @ ends early, and its rest is taken for host and port.
        raise ValueError("expected a number as the port, and special characters of the password as %XX") from None
    backend = parsed.drivername.split("+")[0]
    if backend not in DRIVERS:
        raise ValueError(f"expected {EXPECTED}")
    parsed = parsed.set(drivername=DRIVERS[backend])
    return ParsedUrl(parsed, {}) if backend == "sqlite" else _read_options(parsed)


def _read_options(url: URL) -> ParsedUrl:
    """Move the options that the driver needs in another form out of the URL. Raises ValueError naming an option."""
    options: dict[str, Any] = {}
    for name, value in url.query.items():
        if name in VARIABLES:
            raise ValueError(f"{name}: is not read from the URL; set the variable {VARIABLES[name]}")
        if name not in OPTIONS:
            raise ValueError(f"unknown option {name[:40]!r}; expected some of {', '.join(sorted(OPTIONS))}")
        if name in ("ssl", "sslmode"):
            if value not in TLS_MODES:
                raise ValueError(f"{name}: expected one of {', '.join(TLS_MODES)}")
            options["ssl"] = value
        if name in NUMBERS:
            if not (isinstance(value, str) and value.isdecimal()):
                raise ValueError(f"{name}: expected a whole number")
            options[name] = int(value)
    return ParsedUrl(url.difference_update_query(["sslmode", "ssl", *NUMBERS]), options)
