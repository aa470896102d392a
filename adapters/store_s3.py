"""Store of adapters in a bucket of an S3 service: `s3://bucket/prefix[?endpoint=URL&region=NAME]`.

Objects: `<prefix>/<digest[:2]>/<digest>/{adapter_model.safetensors, adapter_config.json}`. The config is written last,
so an adapter with a config is complete. Readers copy an adapter into a local folder and read it there. Credentials come
from the standard environment variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or a role); no
error quotes them. The client library implements time-outs and retries with back-off.

An upload and the removal of the same digest may overlap. The collector writes a mark beside the adapter, then checks
the adapter's age, and removes the mark last. An upload writes its objects, then checks the mark. If there is no mark,
the collector has ended or will see the new objects' age, and the upload checks that its objects exist. If there is
one, the upload waits and writes again.
"""

import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from adapters.local_copies import LocalCopies
from adapters.spool import Spool
from adapters.store import FILES, check_digest
from adapters.upload_parts import FOLDER, UploadParts, check_id, is_id

log = logging.getLogger(__name__)

MARK = "removal"
# Prefix without objects, which `check` lists.
CHECKED = "check/"
OPTIONS = ("endpoint", "region")
MAX_CONFIG_BYTES = 4 << 20
# Bytes of a ranged read, and number of ranges that one call reads in parallel.
RANGE_BYTES, RANGES = 8 << 20, 4
# Bytes of a part in a multipart write.
PART_BYTES = 8 << 20
# Time limits of a request and of its connection, number of retries, and time from the first request of an operation
# within which a retry may start.
REQUEST_SECONDS, CONNECT_SECONDS, RETRIES, OPERATION_SECONDS = 30, 3, 3, 45
# Time limit of a removal. A mark of twice this age is ignored.
REMOVAL_SECONDS = 300.0
# Pause between two checks for a mark.
LOOK_SECONDS = 0.5
# Pause between two removals of local copies of adapters that the store no longer has.
SWEEP_SECONDS = 3600.0
T = TypeVar("T")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class S3Error(OSError):
    """Failure or refusal of the service. The message has its status and code, but no URL and no credentials."""

    def __init__(self, message: str) -> None:
        # Logs and answers show `strerror` of an OSError.
        super().__init__(errno.EIO, message)


class Bucket:
    """Objects below the prefix of one bucket, by key. Methods raise FileNotFoundError and S3Error."""

    def __init__(self, url: str) -> None:
        """Check the URL; the first call connects. Raises ValueError for a malformed URL, and if the client library is
        missing.
        """
        try:
            import obstore
            from obstore.store import S3Store as Client
        except ImportError:
            raise ValueError("s3:// needs Loraplex's extra `s3`; in its checkout: pip install -e '.[s3]'") from None
        parts = urlsplit(url)
        given = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        unknown = sorted(given.keys() - set(OPTIONS))
        if unknown or parts.fragment or parts.username is not None:
            raise ValueError(
                "expected s3://bucket/prefix with the options endpoint and region only; credentials "
                "belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if not parts.netloc or not all(given.values()):
            raise ValueError("expected s3://bucket/prefix?endpoint=URL&region=NAME with no empty part")
        self._api = obstore
        self._client = Client(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            client_options={
                "allow_http": True,  # an endpoint in the operator's own network may have no TLS
                "timeout": timedelta(seconds=REQUEST_SECONDS),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=OPERATION_SECONDS),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
            },
            config=given,  # type: ignore[arg-type]
        )

    def put(self, key: str, content: Path | bytes) -> None:
        """Write an object; readers see it as a whole. A file above PART_BYTES is sent in parts, each with retries."""
        self._call(self._api.put, key, content, chunk_size=PART_BYTES, max_concurrency=RANGES)

    def get(self, key: str, max_bytes: int) -> bytes:
        """Return an object. Raises S3Error if it is larger than `max_bytes`."""
        got = self._call(self._api.get, key, options={"range": (0, max_bytes)})
        if got.meta["size"] > max_bytes:
            raise S3Error(f"an object is larger than {max_bytes} bytes")
        return bytes(self._checked(got.bytes))

    def read(self, key: str, accept: Callable[[int], object] = lambda size: None) -> Iterator[bytes]:
        """Yield an object in pieces of at most RANGE_BYTES, in bounded memory.

        accept: called with the object's size before its bytes are read; it may raise.
        """
        first = self._call(self._api.get, key, options={"range": (0, RANGE_BYTES)})
        size = first.meta["size"]
        accept(size)
        yield bytes(self._checked(first.bytes))
        starts = range(RANGE_BYTES, size, RANGE_BYTES)
        for at in range(0, len(starts), RANGES):
            some = list(starts[at : at + RANGES])
            ends = [min(start + RANGE_BYTES, size) for start in some]
            for piece in self._call(self._api.get_ranges, key, starts=some, ends=ends):
                yield bytes(piece)

    def modified(self, key: str) -> tuple[float, int]:
        """Return (time of the last write in seconds since the epoch, size)."""
        meta = self._call(self._api.head, key)
        return meta["last_modified"].timestamp(), meta["size"]

    def delete(self, *keys: str) -> None:
        """Remove objects; absent ones are ignored."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._call(self._api.delete, key)

    def list(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Yield `path`, `size` and `last_modified` of each object."""
        listing = iter(self._call(lambda client: self._api.list(client, prefix or None)))
        while (page := self._checked(lambda: next(listing, None))) is not None:
            yield from page

    def _call(self, do: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return self._checked(lambda: do(self._client, *arguments, **options))

    def _checked(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise S3Error("the bucket does not exist") from None
            raise FileNotFoundError("no such object") from None
        except self._api.exceptions.BaseError as error:
            text = str(error)
            code, status = _CODE.search(text), _STATUS.search(text)
            facts = " ".join(found.group(1) for found in (status, code) if found)
            # The library's message quotes requests, so only status and code are passed on.
            raise S3Error(f"the S3 service failed: {facts or type(error).__name__}") from None


class S3Store:
    """Adapters in a bucket, with copies in a local folder. Safe for threads and processes.

    cache: a local folder, which several processes may share; cache_bytes: its limit.
    """

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        """Open the local folder, without a request to the service. Raises ValueError, OSError."""
        self._bucket = Bucket(url)
        self.copies = LocalCopies(cache, cache_bytes)
        self.root = self.copies.root
        self.upload_parts: UploadParts = _S3UploadParts(self._bucket)
        self._closed = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_hourly, name="adapter-copies", daemon=True)
        self._sweeper.start()

    def path(self, digest: str) -> Path | None:
        """Return the local copy, which is downloaded if needed; None if the store has no such adapter.

        The copy may be removed at any time; `use` prevents this.
        """
        with self.use(digest) as folder:
            return folder

    def use(self, digest: str) -> AbstractContextManager[Path | None]:
        """Return a context manager of the local copy, which is not removed during the block.

        Its value is None if the store has no such adapter.
        """
        return self.copies.use(check_digest(digest), partial(self._download, digest))

    def discard(self, digest: str) -> None:
        """Remove a damaged local copy, so that the next reader downloads the adapter again."""
        self.copies.remove(check_digest(digest), in_use=True)

    def spool(self) -> Spool:
        return self.copies.spool()

    def check(self) -> None:
        """Raise OSError if the bucket cannot be listed: a small request without results."""
        for _ in self._bucket.list(CHECKED):
            break

    def clean(self) -> None:
        self.copies.clean()

    def close(self) -> None:
        self._closed.set()

    def stage(self, folder: Path, digest: str) -> None:
        """Write a prepared adapter, also if the store has it: an upload's duration does not reveal stored content.

        Waits for a removal of the adapter to end, up to a time limit. Call it before the database's transaction,
        because it may take minutes; `publish` is called within. Raises S3Error.
        """
        deadline = time.monotonic() + REMOVAL_SECONDS
        while self._marked(digest):
            if time.monotonic() > deadline:
                raise S3Error("the adapter is being removed, and the removal does not end")
            time.sleep(LOOK_SECONDS)
        for name in FILES:
            self._bucket.put(_key(digest, name), folder / name)

    def publish(self, folder: Path, digest: str) -> None:
        """Check that a staged adapter is complete and not being removed.

        Does not wait, because the caller holds a database transaction. Raises S3Error.
        """
        try:
            if not self._marked(digest):
                for name in FILES:
                    self._bucket.modified(_key(digest, name))
                return
        except FileNotFoundError:
            pass
        raise S3Error("the adapter was removed at the same time; send it again")

    def unused_bytes(self, digest: str, unused_seconds: float) -> int | None:
        """Return the size of an adapter's objects; None if one was put within `unused_seconds` or none exists."""
        found = [each for each in self._bucket.list(_key(digest)) if not each["path"].endswith(f"/{MARK}")]
        latest = datetime.now(UTC) - timedelta(seconds=unused_seconds)
        if not found or any(each["last_modified"] > latest for each in found):
            return None
        return sum(each["size"] for each in found)

    def set_aside(self, digest: str, unused_seconds: float) -> "_S3Aside | None":
        """Mark an adapter for removal; None if it was put within `unused_seconds` or does not exist."""
        if self.unused_bytes(digest, unused_seconds) is None:
            return None  # writes no mark, because a mark would delay uploads
        self._bucket.put(_key(digest, MARK), b"")
        aside = _S3Aside(self._bucket, self.copies, digest)
        size = self.unused_bytes(digest, unused_seconds)
        if size is None:
            aside.bring_back()
            return None
        aside.num_bytes = size
        return aside

    def list(self, *, incomplete: bool = False) -> Iterator[str]:
        """Yield the digests of all adapters. incomplete: also of those whose upload or removal did not end."""
        # The service lists keys in their order, so the objects of an adapter follow each other.
        paths = (each["path"].split("/") for each in self._bucket.list())
        for digest, found in groupby(paths, key=lambda path: path[1] if len(path) == 3 else ""):
            names = {path[2] for path in found}
            if _DIGEST.fullmatch(digest) and (incomplete or names.issuperset(FILES)):
                yield digest

    def sweep(self) -> int:
        """Remove the local copies of adapters that the store no longer has. Returns their number."""
        before = set(self.copies.list())
        gone = before - set(self.list()) if before else set()
        for digest in gone:
            self.copies.remove(digest)
        return len(gone)

    def _sweep_hourly(self) -> None:
        # First the downloads of processes that were killed: an engine has no other occasion.
        self._try(self.clean)
        while not self._closed.wait(SWEEP_SECONDS):
            self._try(self.sweep)
            self._try(self.clean)

    def _try(self, remove: Callable[[], object]) -> None:
        try:
            remove()
        except OSError as error:
            log.warning("local copies that nobody needs stay for another hour: %s", error)

    def _marked(self, digest: str) -> bool:
        try:
            at, _ = self._bucket.modified(_key(digest, MARK))
        except FileNotFoundError:
            return False
        return at > time.time() - 2 * REMOVAL_SECONDS

    def _download(self, digest: str, folder: Path, accept: Callable[[int], object]) -> bool:
        """Copy an adapter into the folder. Returns False if the store has none. Raises OSError."""
        try:
            config = self._bucket.get(_key(digest, CONFIG_NAME), MAX_CONFIG_BYTES)
            with (folder / WEIGHTS_NAME).open("xb") as file:
                for piece in self._bucket.read(_key(digest, WEIGHTS_NAME), accept):
                    file.write(piece)
        except FileNotFoundError:
            return False
        (folder / CONFIG_NAME).write_bytes(config)
        return True


class _S3Aside:
    """An adapter that is marked for removal."""

    def __init__(self, bucket: Bucket, copies: LocalCopies, digest: str) -> None:
        self.num_bytes = 0
        self._bucket, self._copies, self._digest = bucket, copies, digest
        self._deadline = time.monotonic() + REMOVAL_SECONDS

    def remove(self) -> None:
        """Remove the adapter, then the mark. Raises OSError, also if the removal outlasts the mark."""
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if time.monotonic() > self._deadline - 2 * OPERATION_SECONDS:
                self.bring_back()
                raise S3Error("the removal took too long")
            self._bucket.delete(_key(self._digest, name))
        self._bucket.delete(_key(self._digest, MARK))
        self._copies.remove(self._digest)

    def bring_back(self) -> None:
        self._bucket.delete(_key(self._digest, MARK))


class _S3UploadParts:
    """Parts of uploads as objects: `<prefix>/uploads/<upload id>/<part id>`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def save(self, upload_id: str, part_id: str, file: Path) -> None:
        self._bucket.put(self._key(upload_id, part_id), file)
        file.unlink()

    def read(self, upload_id: str, part_id: str) -> Iterator[bytes]:
        return self._bucket.read(self._key(upload_id, part_id))

    def remove(self, upload_id: str, part_id: str) -> None:
        self._bucket.delete(self._key(upload_id, part_id))

    def remove_upload(self, upload_id: str) -> None:
        keys = [each["path"] for each in self._bucket.list(f"{FOLDER}/{check_id(upload_id)}")]
        self._bucket.delete(*keys)

    def list(self) -> Iterator[tuple[str, float]]:
        newest: dict[str, float] = {}
        for each in self._bucket.list(FOLDER):
            _, _, rest = each["path"].partition("/")
            upload_id, _, part_id = rest.partition("/")
            if part_id and is_id(upload_id):  # other programs may write into the bucket
                newest[upload_id] = max(newest.get(upload_id, 0.0), each["last_modified"].timestamp())
        yield from newest.items()

    def _key(self, upload_id: str, part_id: str) -> str:
        return f"{FOLDER}/{check_id(upload_id)}/{check_id(part_id)}"


def _key(digest: str, name: str = "") -> str:
    """Return the key of an adapter's object, or the prefix of all its objects."""
    key = f"{check_digest(digest)[:2]}/{digest}"
    return f"{key}/{name}" if name else key
