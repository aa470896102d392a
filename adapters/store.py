"""Store of adapters by digest: `<root>/<digest[:2]>/<digest>/{adapter_config.json, adapter_model.safetensors}`.

A folder is either complete or absent: it is written in its canonical form (adapters/canonical.py) under a temporary
name, synced, checked as written, then renamed. Several processes (gateways, engines) may share the root; engines only
read and may mount it read-only. Knows nothing about names, versions or tenants.
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
from typing import Literal, Protocol
from urllib.parse import unquote, urlsplit

from adapters.canonical import write_canonical
from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, Checkpoint, check_files, open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from adapters.spool import PREFIX, Spool, clean

Stored = Literal["absent", "same", "different"]
FILES = (CONFIG_NAME, WEIGHTS_NAME)
# Name of an adapter within its temporary folder between `set_aside` and its removal.
ASIDE = "adapter"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


class AdapterStore(Protocol):
    root: Path

    def put(self, folder: str | Path, base: BaseShape) -> Checkpoint: ...
    def path(self, digest: str) -> Path | None: ...
    def delete(self, digest: str) -> bool: ...
    def list(self) -> Iterator[str]: ...
    def spool(self) -> Spool: ...
    def publish(self, folder: Path, digest: str, stored: Stored) -> None: ...
    def clean(self) -> None: ...
    def set_aside(self, digest: str, unused_seconds: float) -> Spool | None: ...
    def bring_back(self, aside: Spool, digest: str) -> None: ...


class DirectoryStore:
    """Adapters in a local or shared directory, which is created if missing. Safe for threads and processes."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)

    def put(self, folder: str | Path, base: BaseShape) -> Checkpoint:
        """Write an adapter folder in its canonical form and return it as stored.

        Storing the same content again has no effect. Raises AdapterError if it cannot be served on this base model,
        OSError if it cannot be written.
        """
        source = Path(folder)
        with self.spool() as spool:
            target = spool.folder / "adapter"
            checkpoint, stored = self.prepare(source, target, base)
            self.publish(target, checkpoint.digest, stored)
        return replace(checkpoint, folder=self._folder(checkpoint.digest))

    def prepare(self, source: Path, target: Path, base: BaseShape) -> tuple[Checkpoint, Stored]:
        """Write the canonical form of `source` into the folder `target` and check the written files.

        Returns the checkpoint, and how the store's existing copy compares with it. Raises AdapterError, OSError.
        """
        check_files(source)
        for name in FILES:
            if (source / name).is_symlink():
                raise AdapterError(name, "is a symbolic link; expected a file")
        target.mkdir(mode=0o755)
        write_canonical(source, target)
        checkpoint = open_checkpoint(target)  # checks the written files, which are the ones that are stored
        checkpoint.check_base(base)
        _sync_directory(target)
        return checkpoint, self._stored(target, self._folder(checkpoint.digest))

    def publish(self, folder: Path, digest: str, stored: Stored) -> None:
        """Rename a prepared folder into place. stored: the comparison that `prepare` returned. Raises OSError."""
        final = self._folder(digest)
        if stored == "same":
            try:
                os.utime(final)  # `set_aside` reads this time
            except FileNotFoundError:
                stored = "absent"
            else:
                return
        final.parent.mkdir(exist_ok=True)
        for _ in range(8):
            try:
                folder.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                _sync_directory(final.parent)
                return
            if stored == "absent":
                return  # a parallel call has put the same bytes there
            self.delete(digest)
        raise OSError(f"could not replace a damaged adapter in the store: {digest}")

    def spool(self) -> Spool:
        """Return a temporary folder inside the store for an upload; it is not created yet."""
        return Spool(self.root)

    def clean(self) -> None:
        """Remove the temporary folders of dead writers. Writers call it when they start."""
        clean(self.root)

    def path(self, digest: str) -> Path | None:
        """Return the folder of an adapter, or None.

        Its content was checked when put; open_checkpoint checks it again.
        """
        folder = self._folder(digest)
        return folder if (folder / WEIGHTS_NAME).is_file() else None

    def delete(self, digest: str) -> bool:
        """Remove an adapter, at once for new readers. Returns False if it did not exist."""
        doomed = self.root / f"{PREFIX}{uuid.uuid4().hex}"
        try:
            self._folder(digest).rename(doomed)
        except FileNotFoundError:
            return False
        os.utime(doomed, (time.time(), time.time()))
        shutil.rmtree(doomed)
        return True

    def set_aside(self, digest: str, unused_seconds: float) -> Spool | None:
        """Move an adapter into a temporary folder for removal; None if it was put within `unused_seconds` or does not
        exist.

        The folder is locked, so that no other process's `clean` removes it. The caller removes the folder or calls
        `bring_back`. Raises OSError.
        """
        final, latest = self._folder(digest), time.time() - unused_seconds
        aside = self.spool()
        aside.make()
        kept = aside.folder / ASIDE
        try:
            if final.stat().st_mtime <= latest:
                final.rename(kept)
        except FileNotFoundError:
            pass
        if not kept.exists():
            aside.remove()
            return None
        if kept.stat().st_mtime > latest:  # put again between the check and the rename
            self.bring_back(aside, digest)
            return None
        return aside

    def bring_back(self, aside: Spool, digest: str) -> None:
        """Undo `set_aside`, unless the same content has been put again. Raises OSError."""
        try:
            (aside.folder / ASIDE).rename(self._folder(digest))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        aside.remove()

    def list(self) -> Iterator[str]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]/*")):
            if _DIGEST.fullmatch(folder.name) and (folder / WEIGHTS_NAME).is_file():
                yield folder.name

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise AdapterNotFound("adapter", "expected a digest of 64 hexadecimal digits")
        return self.root / digest[:2] / digest

    def _stored(self, folder: Path, final: Path) -> Stored:
        """Compare a canonical folder with the stored one, which may be damaged or in an earlier release's form."""
        if not final.is_dir():
            return "absent"
        try:
            same = all(_equal(folder / name, final / name) for name in FILES)
        except FileNotFoundError:
            return "different"
        return "same" if same else "different"


def open_store(url_or_path: str | Path) -> AdapterStore:
    """Open a store by path or `file://` URL. Raises ValueError for other schemes."""
    text = str(url_or_path)
    if not text:
        raise ValueError("adapter store: expected a directory or a file:// URL, got an empty string")
    if "://" not in text:
        return DirectoryStore(text)
    url = urlsplit(text)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise ValueError(f"adapter store: expected a directory or a file:// URL, got scheme {url.scheme!r}")
    return DirectoryStore(unquote(url.path))


def _equal(one: Path, other: Path) -> bool:
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            chunk = first.read(_CHUNK)
            if chunk != second.read(_CHUNK):
                return False
            if not chunk:
                return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
