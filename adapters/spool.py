"""Temporary folders for uploads on the store's own file system: `<root>/.tmp-<random>`.

The writing process holds a lock on a file beside its folder. If the lock is free, the writer has died and the next
writer removes the folder. Engines only read and remove nothing.
"""

import errno
import fcntl
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PREFIX = ".tmp-"
_LOCK = ".lock"
# Age at which a folder without a lock file is removed: an earlier release or an interrupted deletion left it behind.
STALE_SECONDS = 3600.0
# Age at which a folder on a file system without locks is removed; no upload takes that long.
UNLOCKED_SECONDS = 24 * 3600.0
# Maximum attempts to remove a folder to which late writers add files; each adds at most two.
ATTEMPTS = 64


class Spool:
    """The temporary folder of one upload: created on entry, removed on exit."""

    def __init__(self, root: Path) -> None:
        self.folder = root / f"{PREFIX}{uuid.uuid4().hex}"
        self._lock_path = self.folder.with_suffix(_LOCK)
        self._lock: int | None = None

    def __enter__(self) -> "Spool":
        self.make()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def make(self) -> None:
        """Create the lock file, then the folder. Raises OSError."""
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _take(lock) and _is(lock, self._lock_path):
                    break
            except OSError:
                break  # a file system without locks: `clean` decides by age there
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # another writer's `clean` has just removed it
        self._lock = lock
        try:
            self.folder.mkdir(mode=0o755)
        except OSError:  # a full disk may have room for the lock file only
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder and its content, if it was created."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):
            self._lock_path.unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_moved(folder: Path) -> None:
    """Remove a folder that was moved out of its place. Raises OSError.

    A writer that found the folder in its place may still add a file while this function removes the others.
    """
    for _ in range(ATTEMPTS):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise OSError(errno.ENOTEMPTY, "writers add files all the time", str(folder))


def clean(root: Path) -> None:
    """Remove the folders of dead writers. Safe beside live writers."""
    for path in root.glob(f"{PREFIX}*{_LOCK}"):
        with suppress(OSError):
            _remove_dead(path)
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            locked = folder.with_suffix(_LOCK).exists()
            if folder.is_dir() and not locked and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def _remove_dead(lock_path: Path) -> None:
    lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            dead = _take(lock)
        except OSError:
            dead = time.time() - lock_path.stat().st_mtime > UNLOCKED_SECONDS
        if dead and _is(lock, lock_path):
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            lock_path.unlink()
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    """Take the lock and return whether it was free. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
