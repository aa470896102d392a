"""Journal of usage events on the local disk, used while Redis does not accept them, so that no usage is lost.

Each process has one file, which it creates when it is first needed and locks while it lives. A file whose lock is free
belonged to a process that died; the first process that finds it takes it over. Events are on the disk (fsync) before
`append` returns.

A file is a sequence of records: length and CRC-32 of an event, 4 bytes each (big endian), and the event.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import uuid
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from sqlalchemy import make_url

log = logging.getLogger(__name__)
T = TypeVar("T")

HEADER = struct.Struct(">II")
SUFFIX = ".journal"
# Maximum number of events that one read returns.
BATCH = 500


def _sync(descriptor: int) -> None:
    # fdatasync leaves out the times of the file. macOS lacks it.
    getattr(os, "fdatasync", os.fsync)(descriptor)


def journal_folder(root: Path, database_url: str) -> Path:
    """Return the folder beneath `root` for a database. Each has its own, so that no event reaches another database."""
    url = make_url(database_url)
    place = f"{url.get_backend_name()}://{url.host}:{url.port}/{url.database}"
    return root / hashlib.sha256(place.encode()).hexdigest()[:16]


def report_others(folder: Path) -> None:
    """Log the usage that dead processes have left in the folders of other databases, beside `folder`.

    After a change of the database's host, no process reads it. The operator must move it, because the other database
    may have other tenants.
    """
    for path in sorted(folder.parent.glob(f"*/*{SUFFIX}")):
        if path.parent == folder:
            continue
        try:
            if (file := JournalFile.adopt(path)) is None:
                continue
            size = file.size
            file.close()
            if size:
                # A file of the folder's name would be in the journal's way.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                log.error(
                    "usage journal %s holds %d bytes of usage of another LORAPLEX_DATABASE_URL; to write them into "
                    "this database, move the file into the folder %s",
                    path,
                    size,
                    folder,
                )
        except OSError as error:
            log.error("usage journal %s of another LORAPLEX_DATABASE_URL cannot be read: %s", path, error.strerror)


class JournalFile:
    """Journal file with its lock held. Not thread-safe; every method blocks on the disk and may raise OSError."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.damaged = False
        self._read = 0
        self._next = 0

    @classmethod
    def create(cls, folder: Path) -> "JournalFile":
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        # Other processes take over only names with SUFFIX, so the file is locked before it gets one.
        nascent = path.with_suffix(".new")
        descriptor = os.open(nascent, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nascent.rename(path)
        _sync_folder(folder)
        return cls(path, descriptor)

    @classmethod
    def adopt(cls, path: Path) -> "JournalFile | None":
        """Take over a dead process's file. Return None if its process lives or another process has taken it over."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def append(self, events: Sequence[bytes]) -> None:
        """Append all events or, if an OSError is raised, none."""
        data = b"".join(HEADER.pack(len(event), zlib.crc32(event)) + event for event in events)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self.size + written)
            _sync(self._descriptor)
        except OSError:
            # A partial record would make those after it unreadable.
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(data)

    def read(self) -> list[bytes]:
        """Return the next events, at most BATCH; the same ones again until `forget`. Stop at an incomplete record."""
        events: list[bytes] = []
        at = self._read
        while len(events) < BATCH:
            header = os.pread(self._descriptor, HEADER.size, at)
            if len(header) < HEADER.size:
                break
            length, checksum = HEADER.unpack(header)
            event = os.pread(self._descriptor, length, at + HEADER.size) if length <= self.size else b""
            if len(event) < length or zlib.crc32(event) != checksum:
                # This can happen to the last record, if its process died during the write, before `append` returned.
                log.critical(
                    "usage journal %s is damaged: the record at byte %d is incomplete, the rest is not read",
                    self.path,
                    at,
                )
                self.damaged = True
                break
            events.append(event)
            at += HEADER.size + length
        self._next = at
        return events

    def forget(self) -> None:
        """Drop the events of the last `read`, which are stored elsewhere. Truncate a file that was read to its end."""
        self._read = self._next
        if self._read >= self.size:
            os.ftruncate(self._descriptor, 0)
            self.size = self._read = self._next = 0

    def end(self) -> None:
        """Delete the file, or rename a damaged one, for the operator to examine."""
        if self.damaged:
            self.path.rename(self.path.with_suffix(".damaged"))
        else:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


class Journal:
    """Journal of this process: its own file and those that it took over.

    max_bytes: the size beyond which no request should be admitted. Running requests may still append.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._own: JournalFile | None = None
        self._adopted: list[JournalFile] = []
        self._disk = asyncio.Lock()
        # A thread of its own, because tenants can occupy the event loop's default threads, which also publish adapters
        # and build bodies for vLLM.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self.bytes = 0
        self.appended = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self.bytes < self._max_bytes

    async def append(self, event: bytes) -> None:
        """Append an event and return once it is on the disk. Events that arrive during an fsync share the next one.

        Raises OSError.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((event, done))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await done

    async def _flush(self) -> None:
        while self._waiting:
            async with self._disk:
                batch, self._waiting = self._waiting, []
                try:
                    await self._thread(partial(self._append, [event for event, _ in batch]))
                    error = None
                except OSError as failure:
                    error = failure
            for _, done in batch:
                if not done.done():
                    done.set_result(None) if error is None else done.set_exception(error)
        self.appended.set()

    async def batches(self) -> AsyncIterator[list[bytes]]:
        """Yield all events, those of dead processes first. A batch is dropped when the next one is requested.

        Raises OSError.
        """
        async with self._disk:
            await self._thread(self._adopt)
        for file in [*self._adopted, *([self._own] if self._own else [])]:
            while True:
                async with self._disk:
                    events = await self._thread(file.read)
                if not events:
                    break
                yield events
                async with self._disk:
                    await self._thread(file.forget)
            async with self._disk:
                if file is not self._own:
                    self._adopted.remove(file)
                    await self._thread(file.end)
                elif file.damaged:
                    self._own = None
                    await self._thread(file.end)

    async def close(self) -> None:
        """Release the files. The next process takes over their events."""
        async with self._disk:
            for file in (*self._adopted, self._own):
                if file is not None:
                    file.end() if not file.size else file.close()
            self._own, self._adopted = None, []

    def _append(self, events: list[bytes]) -> None:
        if self._own is None:
            self._own = JournalFile.create(self._folder)
        self._own.append(events)

    def _adopt(self) -> None:
        mine = {file.path for file in (*self._adopted, self._own) if file is not None}
        with contextlib.suppress(FileNotFoundError):
            for path in sorted(self._folder.iterdir()):
                if path.suffix == SUFFIX and path not in mine and (file := JournalFile.adopt(path)) is not None:
                    log.warning("usage journal: took over %d bytes of a dead process", file.size)
                    self._adopted.append(file)

    async def _thread(self, work: Callable[[], T]) -> T:
        """Run work on the journal's own thread.

        A cancelled caller still waits for it, because no other work may use the files before it is done.
        """
        task = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise
        finally:
            self.bytes = sum(file.size for file in (*self._adopted, self._own) if file is not None)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
