"""Check of an adapter's config before its upload, and the base model that it names. Reads PEFT folders and archives."""

import json
import tarfile
import zipfile
from pathlib import Path
from typing import IO, Any

from adapters.base_choice import TRAINED_ON, named_base
from adapters.manifest import parse_manifest

CONFIG = "adapter_config.json"
# Larger files of this name are not read.
MAX_BYTES = 1 << 20


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


def checked_rank(path: Path) -> int:
    """Check the config, and return the least rank of its modules; 0 if it is unreadable: the gateway checks it.

    Raises AdapterError for a config that no engine serves.
    """
    if not isinstance(config := _config(path), dict):
        return 0
    manifest = parse_manifest(config)
    return min((manifest.rank, *manifest.rank_pattern.values()))


def _config(path: Path) -> Any:
    """Return an adapter's config; None if it cannot be read."""
    try:
        raw = _read_config(path)
        return None if raw is None else json.loads(raw)
    except (OSError, ValueError, EOFError, RecursionError, tarfile.TarError, zipfile.BadZipFile, NotImplementedError):
        return None


def _read_config(path: Path) -> bytes | None:
    if path.is_dir():
        with (path / CONFIG).open("rb") as file:
            return _read(file)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = next((name for name in archive.namelist() if name.rpartition("/")[2] == CONFIG), None)
            if found is None:
                return None
            with archive.open(found) as file:
                return _read(file)
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.rpartition("/")[2] == CONFIG and (content := archive.extractfile(member)) is not None:
                return _read(content)
    return None


def _read(file: IO[bytes]) -> bytes | None:
    raw = file.read(MAX_BYTES + 1)
    return raw if len(raw) <= MAX_BYTES else None
