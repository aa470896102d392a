"""Check of the headers of an adapter before its upload, and the base model that its config names."""

import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from adapters.base_choice import TRAINED_ON, named_base
from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, Headers, parse_headers
from adapters.manifest import AdapterError

# Larger files of this name are not read.
MAX_BYTES = 1 << 20
# Errors of a missing, broken or encrypted file or archive.
UNREADABLE = (
    *(OSError, ValueError, EOFError, RuntimeError),
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


def base_warning(path: Path, served: str | None) -> str | None:
    """Return a warning if the adapter at `path` names another base model than the served one; None if it does not.

    served: name of the base model that the gateway chose. An unreadable config gives no warning: the gateway checks it.
    """
    config = _config(path)
    trained_on = config.get(TRAINED_ON) if isinstance(config, dict) else None
    if not isinstance(trained_on, str) or not trained_on:
        return None
    if served is None or named_base(trained_on, [served]) is not None:
        return None
    shown = "".join(char for char in trained_on[:200] if char.isprintable())
    return f"its config names the base model '{shown}', and it is served on '{served}'; is that the same model?"


def read_upload(path: Path) -> Headers | None:
    """Return the manifest and modules of an adapter; None if they cannot be read, because the gateway checks them too.

    Raises AdapterError for an adapter that no engine serves.
    """
    try:
        with _opened(path, CONFIG_NAME) as (file, _):
            config = _read(file)
        with _opened(path, WEIGHTS_NAME) as (file, size):
            return None if config is None else parse_headers(config, file, size)
    except AdapterError:
        raise
    except UNREADABLE:
        return None


def _config(path: Path) -> Any:
    """Return an adapter's config; None if it cannot be read."""
    try:
        with _opened(path, CONFIG_NAME) as (file, _):
            raw = _read(file)
        return None if raw is None else json.loads(raw)
    except UNREADABLE:
        return None


@contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file of a folder or an archive, and yield it with its size. Raises the errors UNREADABLE."""
    if path.is_dir():
        with (path / name).open("rb") as file:
            yield file, (path / name).stat().st_size
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = next((each for each in archive.infolist() if each.filename.rpartition("/")[2] == name), None)
            if found is None:
                raise FileNotFoundError(name)
            with archive.open(found) as content:
                yield content, found.file_size
    else:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.rpartition("/")[2] == name and (inside := tar.extractfile(member)) is not None:
                    yield inside, member.size
                    return
        raise FileNotFoundError(name)


def _read(file: IO[bytes]) -> bytes | None:
    raw = file.read(MAX_BYTES + 1)
    return raw if len(raw) <= MAX_BYTES else None
