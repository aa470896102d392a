"""Data directory of `loraplex up`: the files kept between runs, in one folder that only its user can read.

secrets.json   generated once: internal token, key pepper, admin key, Valkey's password   (0600)
local.json     URL and admin key of the running gateway, for the other commands           (0600)
demo.json      the demo's tenants, their keys and models                                  (0600)
made.json      the demo parts already created, so that deleted ones are not recreated     (0600)
loraplex.db    tenants, keys' hashes, adapters, usage (SQLite)
adapters/      the adapters' files by digest        valkey/   the quotas' state
models/        converted models                     logs/     one file per process
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

DATA_DIR = Path(".loraplex")


class DataDirError(Exception):
    """The data directory cannot be used; the message names the file."""


@dataclass(frozen=True)
class Secrets:
    internal_token: str
    key_pepper: str
    admin_key: str
    redis_password: str


@dataclass(frozen=True)
class DataDir:
    root: Path

    @classmethod
    def open(cls, path: Path) -> "DataDir":
        """Open the data directory; create missing folders."""
        try:
            data = cls(path.expanduser().resolve())
            for folder in (data.root, data.logs, data.adapters, data.valkey, data.models):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirError(f"cannot use the data directory {path}: {error.strerror}: {error.filename}") from error
        except RuntimeError as error:
            # `~name` without such a person.
            raise DataDirError(f"cannot use the data directory {path}: {error}") from error
        return data

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def valkey(self) -> Path:
        return self.root / "valkey"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def database_url(self) -> str:
        return f"sqlite+aiosqlite:///{self.root / 'loraplex.db'}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory's lock for one `loraplex up`; the system releases it however the process ends."""
        with open(self.root / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataDirError(f"another `loraplex up` is running on {self.root}") from error
            yield

    def secrets(self) -> Secrets:
        """Return the secrets of this data directory, generated on the first call."""
        stored = read_json(self.root / "secrets.json")
        if stored is None:
            made = Secrets(*(secrets.token_urlsafe(32) for _ in fields(Secrets)))
            write_private_json(self.root / "secrets.json", asdict(made))
            return made
        try:
            return Secrets(**stored)
        except TypeError as error:
            raise DataDirError(f"{self.root / 'secrets.json'} does not have the expected fields: {error}") from error


def read_json(path: Path) -> Any:
    """Return the file's content, or None if it does not exist. Raises DataDirError if it is not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataDirError(f"cannot read {path}: {error}") from error


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner can read; a reader sees the old file or the new one, never a part.

    It is on the disk when the function returns, because a lost secret cannot be made again.
    """
    from adapters.store import sync_directory  # each command imports this module, and few write a file

    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_private_json(path: Path, content: Any) -> None:
    write_private(path, json.dumps(content, indent=2) + "\n")
