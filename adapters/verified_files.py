"""Record of hashed adapter files, so that later loads of unchanged files read only the headers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.checkpoint import AdapterCheckpoint, files_version, open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound
from adapters.store import AdapterStore
from wire.bounded_dict import BoundedDict

# Number of folders that are remembered.
MAX_VERIFIED = 1 << 16


class VerifiedFiles:
    """The folder and the version of its files for each verified digest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = BoundedDict[str, tuple[Path, object]](MAX_VERIFIED)

    @contextmanager
    def use(self, store: AdapterStore, digest: str) -> Iterator[AdapterCheckpoint]:
        """Open a store's adapter, whose files stay in place during the block.

        Raises AdapterNotFound, AdapterError if it is damaged, and OSError if the store cannot be read.
        """
        with store.use(digest) as folder:
            if folder is None:
                raise AdapterNotFound("adapter", f"no adapter with digest {digest}")
            try:
                checkpoint = self.open(folder, digest)
            except AdapterError:
                store.discard(digest)
                raise
            yield checkpoint

    def open(self, folder: Path, digest: str) -> AdapterCheckpoint:
        """Open the adapter with this digest. Raises AdapterError if the folder holds another, and OSError."""
        # The version is taken before the content is read, so that a change during the read is noticed at the next load.
        version = (folder, files_version(folder)) if folder.is_dir() else None
        known = version is not None and self._versions.get(digest) == version
        checkpoint = open_checkpoint(folder, digest if known else None)
        if checkpoint.digest != digest:
            raise AdapterError("adapter", f"its files have changed since it was named {digest}")
        if version is not None:
            self._remember(checkpoint, version)
        return checkpoint

    def name(self, folder: Path) -> AdapterCheckpoint:
        """Open an adapter and compute its digest. Raises AdapterError, OSError."""
        try:
            version = folder, files_version(folder)
        except OSError:
            version = None  # the checks of the content name the missing file
        checkpoint = open_checkpoint(folder)
        if version is not None:
            self._remember(checkpoint, version)
        return checkpoint

    def _remember(self, checkpoint: AdapterCheckpoint, version: tuple[Path, object]) -> None:
        with self._lock:
            self._versions.put(checkpoint.digest, version)
