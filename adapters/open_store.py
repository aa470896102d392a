"""Constructor of adapter stores from paths and URLs."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapters.store import AdapterStore, DirectoryStore
from adapters.store_s3 import S3Store

EXPECTED = "expected a directory, a file:// URL or s3://bucket/prefix"


def open_store(url_or_path: str | Path, cache: Path | None = None, cache_bytes: int = 0) -> AdapterStore:
    """Open a store by path, `file://` or `s3://` URL. Raises ValueError for other schemes, OSError.

    cache: a local folder for copies of an S3 store's adapters, of at most `cache_bytes`.
    """
    text = str(url_or_path)
    if not text:
        raise ValueError(f"{EXPECTED}, got an empty string")
    if "://" not in text:
        return DirectoryStore(text)
    url = urlsplit(text)
    if url.scheme == "s3":
        if cache is None:
            raise ValueError("s3:// needs a folder for local copies")
        return S3Store(text, cache, cache_bytes)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise ValueError(f"{EXPECTED}, got scheme {url.scheme!r}")
    return DirectoryStore(unquote(url.path))
