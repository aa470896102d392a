"""Adapter folders whose content has been hashed, so that later loads of unchanged files read only the headers."""

import threading
from collections import OrderedDict
from pathlib import Path

from adapters.checkpoint import Checkpoint, files_version, open_checkpoint
from adapters.manifest import AdapterError

# Number of folders that are remembered.
MAX_VERIFIED = 1 << 16


class VerifiedFiles:
    """The folder and the version of its files for each verified digest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, tuple[Path, object]] = OrderedDict()

    def open(self, folder: Path, digest: str) -> Checkpoint:
        """Open the adapter with this digest. Raises AdapterError if the folder holds another, and OSError."""
        # The version is taken before the content is read, so that a change during the read is noticed at the next load.
        version = (folder, files_version(folder)) if folder.is_dir() else None
        known = version is not None and self._versions.get(digest) == version
        checkpoint = open_checkpoint(folder, digest if known else None)
        if checkpoint.digest != digest:
            raise AdapterError("adapter", f"its files have changed since it was named {digest}")
        if version is not None and not known:
            with self._lock:
                self._versions[digest] = version
                if len(self._versions) > MAX_VERIFIED:
                    self._versions.popitem(last=False)
        return checkpoint
