"""`/static/...`: styles, scripts, fonts and images of the pages, under URLs that contain a hash of their content."""

import hashlib
import mimetypes
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from aiohttp import web

FOREVER = "public, max-age=31536000, immutable"
# Header for URLs that a gateway of another release made, behind the same load balancer.
CHECK_EACH_TIME = "public, no-cache"
TYPES = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}
SERVED = {".js", ".css", ".woff2", ".svg", ".png"}


class Asset:
    """A file in memory. etag: a hash of its content."""

    def __init__(self, name: str, content: bytes) -> None:
        suffix = PurePosixPath(name).suffix
        self.content = content
        self.type = TYPES.get(suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.etag = hashlib.sha256(content).hexdigest()[:16]


@cache
def _files() -> Mapping[str, Asset]:
    """Return the files of `gateway/pages/static/` by name."""
    folder = resources.files("gateway.pages").joinpath("static")
    return {name: Asset(name, file.read_bytes()) for name, file in _walk(folder, "")}


@cache
def _version() -> str:
    """Return a hash of all files. Every URL contains it, so that styles can refer to fonts by relative URLs."""
    files = _files()
    return hashlib.sha256("".join(files[name].etag for name in sorted(files)).encode()).hexdigest()[:12]


class Assets:
    """Route of the files, which a process reads once."""

    def __init__(self) -> None:
        self._files, self._version = _files(), _version()

    @staticmethod
    def url(name: str) -> str:
        """Return the file's URL. Raises KeyError for an unknown name, which is an error in a template."""
        if name not in _files():
            raise KeyError(name)
        return f"/static/{_version()}/{name}"

    async def get(self, request: web.Request) -> web.Response:
        """Return a file. It may be cached for ever, unless the URL is another release's."""
        asset = self._files.get(request.match_info["name"])
        if asset is None:
            raise web.HTTPNotFound
        is_current = request.match_info["version"] == self._version
        headers = {
            "Cache-Control": FOREVER if is_current else CHECK_EACH_TIME,
            "ETag": f'"{asset.etag}"',
            "X-Content-Type-Options": "nosniff",
        }
        if asset.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        charset = "utf-8" if asset.type.startswith("text/") else None
        return web.Response(body=asset.content, content_type=asset.type, charset=charset, headers=headers)


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif PurePosixPath(entry.name).suffix in SERVED:
            found.append((f"{prefix}{entry.name}", entry))
    return found
