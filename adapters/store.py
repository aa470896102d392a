"""Stores of adapters by digest: a directory, or a bucket of an S3 service (adapters/store_s3.py).

Gateways write a store, engines only read it. An adapter is either complete or absent, and is stored in its canonical
form (adapters/canonical.py), so that the same digest always stands for the same bytes. Independent of names,
versions or tenants.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from adapters.canonical import write_canonical
from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, AdapterCheckpoint, check_files, open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from adapters.spool import PREFIX, Spool, clean, remove_moved
from adapters.upload_parts import DirectoryUploadParts, UploadParts

# Files in the order in which they are written: an adapter is complete as soon as it has the last one.
FILES = (WEIGHTS_NAME, CONFIG_NAME)
# Name of an adapter within its temporary folder between `set_aside` and its removal.
ASIDE = "adapter"
# Maximum attempts to publish an adapter while other processes remove the stored copy and put it again.
ATTEMPTS = 64

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Aside(Protocol):
    """An adapter that is set aside for removal. Call `remove` or `bring_back`."""

    num_bytes: int

    def remove(self) -> None: ...
    def bring_back(self) -> None: ...


class AdapterStore(Protocol):
    """A store. root: a local folder for spools. upload_parts: the bytes of unfinished uploads.

    list: yields the digests of all adapters; incomplete: also of those with a part of their files, for the collector.

    Methods raise OSError if the store cannot be read or written, and AdapterNotFound for a malformed digest.
    """

    root: Path
    upload_parts: UploadParts

    def path(self, digest: str) -> Path | None: ...
    def use(self, digest: str) -> AbstractContextManager[Path | None]: ...
    def discard(self, digest: str) -> None: ...
    def list(self, *, incomplete: bool = False) -> Iterator[str]: ...
    def spool(self) -> Spool: ...
    def stage(self, folder: Path, digest: str) -> None: ...
    def publish(self, folder: Path, digest: str) -> None: ...
    def check(self) -> None: ...
    def clean(self) -> None: ...
    def unused_bytes(self, digest: str, unused_seconds: float) -> int | None: ...
    def set_aside(self, digest: str, unused_seconds: float) -> Aside | None: ...
    def close(self) -> None: ...


def prepare(source: Path, target: Path) -> AdapterCheckpoint:
    """Write the canonical form of `source` into the folder `target` and check the written files.

    The caller checks the result against a base model. Raises AdapterError, OSError.
    """
    check_files(source)
    for name in FILES:
        if (source / name).is_symlink():
            raise AdapterError(name, "is a symbolic link; expected a file")
    target.mkdir(mode=0o755)
    write_canonical(source, target)
    checkpoint = open_checkpoint(target)  # checks the written files, which are the ones that are stored
    sync_directory(target)
    return checkpoint


def put(store: AdapterStore, folder: str | Path, base: BaseShape) -> AdapterCheckpoint:
    """Store an adapter folder in its canonical form. Raises AdapterError, OSError."""
    with store.spool() as spool:
        target = spool.folder / "adapter"
        checkpoint = prepare(Path(folder), target)
        checkpoint.check_base(base)
        store.stage(target, checkpoint.digest)
        store.publish(target, checkpoint.digest)
    return checkpoint


def check_digest(digest: str) -> str:
    """Return the digest. Raises AdapterNotFound for any other text, which could be a path."""
    if not _DIGEST.fullmatch(digest):
        raise AdapterNotFound("adapter", "expected a digest of 64 hexadecimal digits")
    return digest


class DirectoryStore:
    """Adapters in a local or shared directory, which is created if missing. Safe for threads and processes.

    Layout: `<root>/<digest[:2]>/<digest>/{adapter_config.json, adapter_model.safetensors}`. Engines may mount the
    directory read-only.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.upload_parts: UploadParts = DirectoryUploadParts(self.root)

    def put(self, folder: str | Path, base: BaseShape) -> AdapterCheckpoint:
        """Store an adapter folder and return it as stored. Raises AdapterError, OSError."""
        checkpoint = put(self, folder, base)
        return replace(checkpoint, folder=self.folder(checkpoint.digest))

    def stage(self, folder: Path, digest: str) -> None:
        """Do nothing: a prepared folder is on the store's file system already."""

    def publish(self, folder: Path, digest: str) -> None:
        """Move a prepared folder into place. Raises OSError.

        Files that the store already has are replaced. This repairs damaged files, and the duration of an upload does
        not reveal whether another tenant has stored the same content.
        """
        final = self.folder(digest)
        if not final.parent.is_dir():
            final.parent.mkdir(exist_ok=True)
            sync_directory(self.root)
        for _ in range(ATTEMPTS):
            with suppress(FileNotFoundError):  # the stored adapter was removed or set aside in between
                if _moved(folder, final):
                    sync_directory(final.parent)
                else:
                    os.utime(final)  # from here on `set_aside` leaves it in place or moves it back
                    _replace_files(folder, final)
                return
        raise OSError(errno.EAGAIN, "the stored adapter kept being removed and replaced while it was read")

    def spool(self) -> Spool:
        """Return a temporary folder inside the store for an upload; it is not created yet."""
        return Spool(self.root)

    def check(self) -> None:
        """Raise OSError if the directory is missing or cannot be read."""
        with os.scandir(self.root):
            pass

    def clean(self) -> None:
        """Remove the temporary folders of dead writers. Writers call it when they start."""
        clean(self.root)

    def path(self, digest: str) -> Path | None:
        """Return the folder of an adapter, or None. Its content was checked when it was put, and may have changed."""
        folder = self.folder(digest)
        return folder if (folder / WEIGHTS_NAME).is_file() else None

    def use(self, digest: str) -> AbstractContextManager[Path | None]:
        """Return `path` as a context manager; the files are not moved during the block."""
        return nullcontext(self.path(digest))

    def discard(self, digest: str) -> None:
        """Do nothing: a damaged adapter stays until it is uploaded again, because there is no other copy."""

    def delete(self, digest: str) -> bool:
        """Remove an adapter, at once for new readers. Returns False if it did not exist."""
        doomed = self.root / f"{PREFIX}{uuid.uuid4().hex}"
        try:
            self.folder(digest).rename(doomed)
        except FileNotFoundError:
            return False
        os.utime(doomed, (time.time(), time.time()))
        remove_moved(doomed)
        return True

    def unused_bytes(self, digest: str, unused_seconds: float) -> int | None:
        """Return the size of an adapter's files; None if it was put within `unused_seconds` or does not exist."""
        folder = self.folder(digest)
        try:
            is_old = folder.stat().st_mtime <= time.time() - unused_seconds
        except FileNotFoundError:
            return None
        return _size(folder) if is_old else None

    def set_aside(self, digest: str, unused_seconds: float) -> Aside | None:
        """Move an adapter into a temporary folder for removal; None if it was put within `unused_seconds` or does not
        exist.

        The folder is locked, so that no other process's `clean` removes it. Raises OSError.
        """
        final, latest = self.folder(digest), time.time() - unused_seconds
        spool = self.spool()
        spool.make()
        kept = spool.folder / ASIDE
        try:
            if final.stat().st_mtime <= latest:
                final.rename(kept)
        except FileNotFoundError:
            pass
        if not kept.exists():
            spool.remove()
            return None
        aside = _DirectoryAside(spool, final)
        if kept.stat().st_mtime > latest:  # put again between the check and the rename
            aside.bring_back()
            return None
        return aside

    def list(self, *, incomplete: bool = False) -> Iterator[str]:
        """Yield the digests of all adapters. None is incomplete, because a folder is moved into place as a whole."""
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]/*")):
            if _DIGEST.fullmatch(folder.name) and (folder / WEIGHTS_NAME).is_file():
                yield folder.name

    def close(self) -> None:
        """Do nothing: a directory needs no connection."""

    def folder(self, digest: str) -> Path:
        """Return the folder of an adapter, stored or not. Raises AdapterNotFound for a malformed digest."""
        return self.root / check_digest(digest)[:2] / digest


class _DirectoryAside:
    """An adapter in the temporary folder `spool`. final: its place in the store."""

    def __init__(self, spool: Spool, final: Path) -> None:
        self._spool, self._final = spool, final
        self.num_bytes = _size(spool.folder)

    def remove(self) -> None:
        self._spool.remove()

    def bring_back(self) -> None:
        """Undo `set_aside`, unless the same content has been put again. Raises OSError."""
        try:
            (self._spool.folder / ASIDE).rename(self._final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        self._spool.remove()


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _moved(folder: Path, final: Path) -> bool:
    """Rename a folder and return True, or return False if `final` exists. Raises OSError."""
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _replace_files(folder: Path, final: Path) -> None:
    """Replace a stored adapter's files one by one, so that readers always find both. Raises OSError.

    The two folders have the same digest, so a mixture of their files is the same adapter. The prepared folder keeps its
    files, so that it can still be published as a whole if the stored adapter is removed in between.
    """
    for name in FILES:
        link = folder.parent / f"{name}.{uuid.uuid4().hex}"
        try:
            os.link(folder / name, link)
        except OSError:  # a file system without hard links
            shutil.copyfile(folder / name, link)
        os.replace(link, final / name)
    os.utime(final)
    sync_directory(final)
