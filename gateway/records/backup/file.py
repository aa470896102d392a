"""Form of a backup: a tar file of the members below, in this order. Independent of the database.

backup.json                  header: format, schema, time, fingerprints of the peppers
tables/<name>.jsonl.gz       a table: a JSON array of its columns' names, then one of values for each row
adapters.txt                 the adapter store's digests, one per line
adapters/<digest>/<file>     the files of adapters, if they were asked for
SHA256SUMS                   SHA-256 of every other member, as `sha256sum` prints it

The checksums come last, so a file that was cut off has none. They find damage, not forgery: whoever can write the file
can write its checksums too.
"""

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from adapters.store import sync_directory

FORMAT = 1
HEADER, DIGESTS, SUMS = "backup.json", "adapters.txt", "SHA256SUMS"
TABLES, ROWS_SUFFIX, ADAPTERS = "tables/", ".jsonl.gz", "adapters/"
CHUNK = 1 << 20
# Level 1 compresses rows to a seventh and takes a third of the time of the default level.
COMPRESSION = 1


class BackupError(Exception):
    """A backup cannot be written, read or restored; the message says why, in one line."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First member of a backup. schema: version of the database's schema. peppers: fingerprints, empty if unknown."""

    format: int
    schema: str
    created_at: datetime
    peppers: tuple[str, ...] = ()


class BackupWriter:
    """Writer of a backup. Methods raise BackupError."""

    def __init__(self, tar: tarfile.TarFile, folder: Path) -> None:
        self._tar, self._folder = tar, folder
        self._sums: dict[str, str] = {}

    def add(self, name: str, content: bytes) -> None:
        self.add_file(name, io.BytesIO(content), len(content))

    def add_file(self, name: str, file: IO[bytes], num_bytes: int) -> None:
        """Add the next `num_bytes` of an open file as a member."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = num_bytes, 0o600
        reader = _Hashing(file)
        with file_errors(name):
            self._tar.addfile(info, reader)  # type: ignore[arg-type]  # it only reads
        self._sums[name] = reader.hexdigest()

    @contextmanager
    def table(self, name: str) -> "Iterator[Callable[[list[Any]], None]]":
        """Return a function that adds a line to a table's member. The member is written when the block ends.

        A member's size precedes it, so the lines are collected in a temporary file without a name.
        """
        encode = msgspec.json.Encoder().encode
        with file_errors(name):
            spool = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        with spool:
            # mtime: the same rows give the same bytes.
            packed = gzip.GzipFile(fileobj=spool, mode="wb", compresslevel=COMPRESSION, mtime=0)

            def write(line: list[Any]) -> None:
                with file_errors(name):
                    packed.write(encode(line) + b"\n")

            yield write
            with file_errors(name):
                packed.close()
                num_bytes = spool.tell()
                spool.seek(0)
            self.add_file(f"{TABLES}{name}{ROWS_SUFFIX}", spool, num_bytes)

    def finish(self) -> None:
        lines = "".join(f"{digest}  {name}\n" for name, digest in self._sums.items())
        self.add(SUMS, lines.encode())


@contextmanager
def new_backup(path: Path) -> Iterator[BackupWriter]:
    """Write a backup that appears at `path` as a whole when the block ends; only its user can read it.

    Raises BackupError, also if the path exists.
    """
    if path.exists():
        raise BackupError(f"{path}: exists already; expected the name of a new file")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with file_errors(path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with tarfile.open(fileobj=file, mode="w|") as tar:
                writer = BackupWriter(tar, path.parent)
                yield writer
                writer.finish()
            with file_errors(path):
                file.flush()
                os.fsync(file.fileno())
        with file_errors(path):
            os.link(temporary, path)  # unlike a rename it never replaces a file
            sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


class BackupFile:
    """A backup whose checksums are right. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Read and check the whole file. Raises BackupError naming what is wrong."""
        self.path = path
        try:
            self._tar = tarfile.open(path, mode="r:")  # noqa: SIM115
        except OSError as error:
            raise BackupError(f"{path}: {error.strerror or error}") from error
        except tarfile.TarError as error:
            raise BackupError(f"{path}: is not a backup, or is damaged at its start") from error
        try:
            self._members: dict[str, tarfile.TarInfo] = {}
            self._read_members()
            self.header = self._read_header()
        except BaseException:
            self._tar.close()
            raise

    def __enter__(self) -> "BackupFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    @property
    def tables(self) -> list[str]:
        names = [name for name in self._members if name.startswith(TABLES)]
        return [name.removeprefix(TABLES).removesuffix(ROWS_SUFFIX) for name in names]

    @property
    def digests(self) -> list[str]:
        """Return the digests of the adapters that the store had."""
        return self._content(DIGESTS).decode().split()

    @property
    def stored_digests(self) -> list[str]:
        """Return the digests of the adapters whose files the backup has."""
        return list(dict.fromkeys(name.split("/")[1] for name in self._members if name.startswith(ADAPTERS)))

    def rows(self, table: str) -> Iterator[list[Any]]:
        """Yield a table's columns, then the values of each row. Raises BackupError."""
        decode = msgspec.json.Decoder(list).decode
        try:
            with gzip.open(self._open(f"{TABLES}{table}{ROWS_SUFFIX}")) as lines:
                for line in lines:
                    yield decode(line)
        except (OSError, EOFError, zlib.error, msgspec.DecodeError) as error:
            raise BackupError(f"{self.path}: the table {table} cannot be read: {error}") from error

    def copy_adapter(self, digest: str, name: str, target: Path) -> None:
        """Write a file of an adapter to `target`, and to the disk. Raises BackupError."""
        with self._open(f"{ADAPTERS}{digest}/{name}") as source, file_errors(target), target.open("xb") as file:
            while chunk := source.read(CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def _open(self, name: str) -> IO[bytes]:
        member = self._members.get(name)
        file = None if member is None else self._tar.extractfile(member)
        if file is None:
            raise BackupError(f"{self.path}: has no {name}")
        return file

    def _content(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def _read_members(self) -> None:
        """Find the members and compare the SHA-256 of each with that in SUMS."""
        members, found = self._members, {}
        try:
            for member in self._tar:
                file = self._tar.extractfile(member) if member.isreg() else None
                if file is None or member.name in members:
                    raise BackupError(f"{self.path}: is damaged: unexpected {member.name}")
                members[member.name] = member
                found[member.name] = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise BackupError(f"{self.path}: is cut off or damaged: {error}") from error
        if SUMS not in members:
            raise BackupError(f"{self.path}: is cut off or damaged: its checksums are missing")
        del found[SUMS]
        lines = [line.split("  ", 1) for line in self._content(SUMS).decode("utf-8", "replace").splitlines()]
        given = {line[-1]: line[0] for line in lines}
        wrong = [name for name in sorted(given.keys() | found.keys()) if given.get(name) != found.get(name)]
        if wrong:
            raise BackupError(f"{self.path}: was changed: the SHA-256 of {wrong[0]} is not that of the backup")

    def _read_header(self) -> Header:
        content = self._content(HEADER)
        try:
            number = msgspec.json.decode(content)["format"]
            if number == FORMAT:
                return msgspec.json.decode(content, type=Header)
        except (KeyError, TypeError, msgspec.MsgspecError) as error:
            raise BackupError(f"{self.path}: its {HEADER} cannot be read") from error
        raise BackupError(f"{self.path}: has format {number}, expected {FORMAT}; use the release that made it")


class _Hashing:
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def read(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        self._hash.update(content)
        return content

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def file_errors(name: object) -> Iterator[None]:
    """Raise BackupError for an OSError of a file or of the adapter store, so that it is not reported as the database's.

    name: the file, or the option with the problem.
    """
    try:
        yield
    except OSError as error:
        raise BackupError(f"{name}: {error.strerror or error}") from error
