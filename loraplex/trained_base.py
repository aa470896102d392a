"""Base model that an adapter names as its own, read from a PEFT folder or an archive before its upload."""

import json
import tarfile
import zipfile
from pathlib import Path
from typing import IO, Any

from adapters.base_choice import TRAINED_ON, named_base

CONFIG = "adapter_config.json"
# Larger files of this name are not read.
MAX_BYTES = 1 << 20


def base_warning(path: Path, served: str | None) -> str | None:
    """Return a warning if the adapter at `path` names another base model than the served one; None if it does not.

    served: name of the base model that the gateway chose. An unreadable config gives no warning: the gateway checks it.
    """
    trained_on = _trained_on(path)
    if served is None or trained_on is None or named_base(trained_on, [served]) is not None:
        return None
    shown = "".join(char for char in trained_on[:200] if char.isprintable())
    return f"its config names the base model '{shown}', and it is served on '{served}'; is that the same model?"


def _trained_on(path: Path) -> str | None:
    """Return `base_model_name_or_path` of an adapter's config; None without one."""
    try:
        raw = _read_config(path)
        config: Any = {} if raw is None else json.loads(raw)
    except (OSError, ValueError, EOFError, RecursionError, tarfile.TarError, zipfile.BadZipFile, NotImplementedError):
        return None
    name = config.get(TRAINED_ON) if isinstance(config, dict) else None
    return name if isinstance(name, str) and name else None


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
