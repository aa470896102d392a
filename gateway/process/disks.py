"""Free room on the disks that a gateway writes to, measured in the background: a hung network file system must not stop
the event loop or a scrape of the metrics.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 15.0

# Arguments: the name of the disk, its free bytes, its size in bytes.
Report = Callable[[str, int, int], None]


class Disks:
    """Watch of folders by name. The nearest existing parent counts for a folder that does not exist yet."""

    def __init__(self, folders: Mapping[str, Path], report: Report, seconds: float = LOOK_SECONDS) -> None:
        self._folders = folders
        self._report = report
        self._seconds = seconds

    async def watch(self) -> None:
        """Report each disk's room, again and again."""
        while True:
            for name, folder in self._folders.items():
                try:
                    free, total = await asyncio.to_thread(room, folder)
                except OSError as error:
                    log.warning("the free room at the folder of the %s is unknown: %s", name, error)
                else:
                    self._report(name, free, total)
            await asyncio.sleep(self._seconds)


def room(folder: Path) -> tuple[int, int]:
    """Return (free bytes for an unprivileged process, size in bytes) of a folder's disk.

    Blocks on the disk. Raises OSError.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total
