"""Local copies of an object store's adapters: a directory store of bounded size that evicts the least recently used.

Several processes of a machine may share the folder. A reader holds a shared lock on its copy's folder, and removal
needs an exclusive lock, so no copy is removed while it is read.
"""

import errno
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapters.spool import PREFIX, Spool
from adapters.store import DirectoryStore

# Function that writes an adapter into a folder; it returns False if the adapter does not exist. Before it writes, it
# calls its second argument with the number of bytes, which raises OSError if they do not fit.
Download = Callable[[Path, Callable[[int], object]], bool]


class LocalCopies:
    """Copies by digest. root: the folder; max_bytes: the limit of all copies together. Thread-safe."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Create the folder if it is missing. Raises OSError."""
        self._store = DirectoryStore(root.expanduser())
        self.root, self.max_bytes = self._store.root, max_bytes
        self._lock = threading.Lock()
        # Bytes of this process's running downloads.
        self._pending = 0

    @contextmanager
    def use(self, digest: str, download: Download) -> Iterator[Path | None]:
        """Yield an adapter's copy, which is not removed during the block. Raises OSError."""
        held = self._hold(digest)
        if held is None:
            if not self._fetch(digest, download):
                yield None
                return
            held = self._hold(digest)
        if held is None:
            raise OSError(errno.EAGAIN, "the adapter was removed from the local copies while it was opened")
        try:
            yield self._store.folder(digest)
        finally:
            os.close(held)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the least recently used copies until `num_bytes` more fit beside the others and the running downloads.

        Raises OSError if too many copies are in use.
        """
        copies: list[tuple[float, int, str]] = []
        for digest in self._store.list():
            with suppress(FileNotFoundError):
                folder = self._store.folder(digest)
                copies.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), digest))
        held = self._pending + sum(size for _, size, _ in copies)
        for _, size, digest in sorted(copies):
            if held + num_bytes <= self.max_bytes:
                return
            if self.remove(digest):
                held -= size
        if held + num_bytes > self.max_bytes:
            raise OSError(errno.ENOSPC, f"the local copies of adapters may have {self.max_bytes} bytes, all in use")

    def remove(self, digest: str, *, in_use: bool = False) -> bool:
        """Remove a copy. Returns False, without effect, if it is in use. in_use: remove it even then (damaged)."""
        folder = self._store.folder(digest)
        descriptor = _open(folder)
        if descriptor is None:
            return True
        try:
            if not in_use:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            doomed = self.root / f"{PREFIX}{uuid.uuid4().hex}"
            with suppress(FileNotFoundError):
                folder.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def list(self) -> Iterator[str]:
        return self._store.list()

    def spool(self) -> Spool:
        return self._store.spool()

    def clean(self) -> None:
        self._store.clean()

    def _hold(self, digest: str) -> int | None:
        """Return an open descriptor of the copy's folder with a shared lock; None if there is no copy."""
        folder = self._store.path(digest)
        descriptor = None if folder is None else _open(folder)
        if folder is None or descriptor is None:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                os.utime(folder)
                return descriptor
        except FileNotFoundError:
            pass  # it was removed before it was locked
        os.close(descriptor)
        return None

    def _fetch(self, digest: str, download: Download) -> bool:
        accepted = 0

        def accept(num_bytes: int) -> None:
            nonlocal accepted
            with self._lock:
                self._make_room(num_bytes)
                self._pending += num_bytes
                accepted += num_bytes

        try:
            with self.spool() as spool:
                folder = spool.folder / "adapter"
                folder.mkdir(mode=0o755)
                if not download(folder, accept):
                    return False
                self._store.publish(folder, digest)
        finally:
            with self._lock:
                self._pending -= accepted
        return True


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
