"""Bytes of unfinished uploads in a directory store: `<root>/uploads/<upload id>/<part id>`.

Gateways share them, so that an upload can continue at any gateway. The gateway's database records the parts of an
upload and their order; a part without a record is removed with its upload.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

FOLDER = "uploads"
_ID = re.compile(r"[0-9a-f]{32}")


class UploadParts(Protocol):
    """Parts of uploads, by random ids of 32 hexadecimal digits. Methods raise OSError."""

    def save(self, upload_id: str, part_id: str, file: Path) -> None: ...
    def read(self, upload_id: str, part_id: str) -> Iterator[bytes]: ...
    def remove(self, upload_id: str, part_id: str) -> None: ...
    def remove_upload(self, upload_id: str) -> None: ...
    def list(self) -> Iterator[tuple[str, float]]: ...


def check_id(text: str) -> str:
    """Return the id. Raises ValueError for any other text, which could be a path."""
    if not is_id(text):
        raise ValueError("expected an id of 32 hexadecimal digits")
    return text


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class DirectoryUploadParts:
    """Parts as files below the store's directory."""

    def __init__(self, root: Path) -> None:
        self._root = root / FOLDER

    def save(self, upload_id: str, part_id: str, file: Path) -> None:
        """Move a synced file of the same file system into place."""
        folder = self._folder(upload_id)
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        os.replace(file, folder / check_id(part_id))

    def read(self, upload_id: str, part_id: str) -> Iterator[bytes]:
        """Yield the part's bytes in pieces of at most 1 MiB. Raises FileNotFoundError."""
        with (self._folder(upload_id) / check_id(part_id)).open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece

    def remove(self, upload_id: str, part_id: str) -> None:
        (self._folder(upload_id) / check_id(part_id)).unlink(missing_ok=True)

    def remove_upload(self, upload_id: str) -> None:
        shutil.rmtree(self._folder(upload_id), ignore_errors=True)

    def list(self) -> Iterator[tuple[str, float]]:
        """Yield (upload id, seconds since the epoch at which a part was last saved or removed)."""
        if self._root.is_dir():
            for folder in self._root.iterdir():
                if is_id(folder.name):
                    yield folder.name, folder.stat().st_mtime

    def _folder(self, upload_id: str) -> Path:
        return self._root / check_id(upload_id)
