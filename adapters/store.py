"""Adapters by digest, at rest: `<root>/<digest[:2]>/<digest>/{adapter_config.json, adapter_model.safetensors}`.

A folder is complete or not there: it is written under a temporary name, synced, checked as written, then renamed.
Several processes (gateways, engines) may share the root. Knows nothing of names, versions or tenants.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, Checkpoint, check_files, open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TEMPORARY = ".tmp-"
# A put that takes longer than this has died: its writer was killed between two writes.
_STALE_SECONDS = 3600.0
_COPY_CHUNK = 1 << 20


class Store(Protocol):
    def put(self, folder: str | Path, base: BaseShape) -> Checkpoint: ...
    def path(self, digest: str) -> Path | None: ...
    def delete(self, digest: str) -> bool: ...
    def list(self) -> Iterator[str]: ...


class DirectoryStore:
    """Adapters in a local or shared directory, made if it isn't there. Safe for threads and processes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_stale()

    def put(self, folder: str | Path, base: BaseShape) -> Checkpoint:
        """Copies an adapter folder in and returns it as stored; the same content again changes nothing.

        Raises AdapterError if we can't serve it on this base model, OSError if it can't be written.
        """
        folder = Path(folder)
        check_files(folder)
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if (folder / name).is_symlink():
                raise AdapterError(name, "is a symbolic link; expected a file")
        temporary = self.root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        temporary.mkdir(mode=0o755)
        try:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                _copy(folder / name, temporary / name)
            checkpoint = open_checkpoint(temporary)  # the copy: what was checked is what is stored
            checkpoint.check_base(base)
            _sync_directory(temporary)
            return self._publish(checkpoint)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def path(self, digest: str) -> Path | None:
        """The folder of an adapter, or None. Its content was checked when put; open_checkpoint checks it again."""
        folder = self._folder(digest)
        return folder if (folder / WEIGHTS_NAME).is_file() else None

    def delete(self, digest: str) -> bool:
        """Removes an adapter at once for new readers; False if it wasn't there."""
        doomed = self.root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._folder(digest).rename(doomed)
        except FileNotFoundError:
            return False
        shutil.rmtree(doomed)
        return True

    def list(self) -> Iterator[str]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]/*")):
            if _DIGEST.fullmatch(folder.name) and (folder / WEIGHTS_NAME).is_file():
                yield folder.name

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise AdapterNotFound("adapter", "expected a digest of 64 hexadecimal digits")
        return self.root / digest[:2] / digest

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        """Renames a checked folder into place unless an intact one is there, put by an earlier or a parallel call."""
        final = self._folder(checkpoint.digest)
        final.parent.mkdir(exist_ok=True)
        for _ in range(8):
            try:
                checkpoint.folder.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                _sync_directory(final.parent)
                return replace(checkpoint, folder=final)
            existing = _open_intact(final, checkpoint.digest)
            if existing is not None:
                return existing
            self.delete(checkpoint.digest)
        raise OSError(f"could not replace a damaged adapter in the store: {checkpoint.digest}")

    def _remove_stale(self) -> None:
        for folder in self.root.glob(f"{_TEMPORARY}*"):
            try:
                if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(folder)
            except FileNotFoundError:
                continue  # another process was faster


def open_store(url_or_path: str | Path) -> Store:
    """A store by path or `file://` URL. Raises ValueError for other schemes."""
    text = str(url_or_path)
    if not text:
        raise ValueError("adapter store: expected a directory or a file:// URL, got an empty string")
    if "://" not in text:
        return DirectoryStore(text)
    url = urlsplit(text)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise ValueError(f"adapter store: expected a directory or a file:// URL, got scheme {url.scheme!r}")
    return DirectoryStore(unquote(url.path))


def _open_intact(folder: Path, digest: str) -> Checkpoint | None:
    try:
        checkpoint = open_checkpoint(folder)
    except (AdapterError, FileNotFoundError):
        return None
    return checkpoint if checkpoint.digest == digest else None


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("xb") as writer:
        shutil.copyfileobj(reader, writer, _COPY_CHUNK)
        writer.flush()
        os.fsync(writer.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
