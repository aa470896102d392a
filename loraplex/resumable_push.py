"""Upload of a large adapter in parts. A later call continues a broken upload."""

import asyncio
import hashlib
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from loraplex.client import ADAPTER_FILES, UPLOAD_TIMEOUT, GatewayClient, GatewayError
from wire.error_codes import WRONG_OFFSET

# Smaller adapters are sent in one request.
MIN_BYTES = 8 << 20
PART_BYTES = 8 << 20
# Pauses before a part is sent again after the gateway could not be reached, in seconds.
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

ReportBytes = Callable[[int, int], object]


async def push_in_parts(
    client: GatewayClient, route: str, name: str, path: Path, progress: ReportBytes, **base: str
) -> dict[str, Any]:
    """Upload a PEFT folder or an archive as `name` and return the adapter.

    route: path of the tenant's uploads. progress: called with (bytes received, size). base: empty, or the
    field `base` with a base model's name.

    Raises GatewayError, OSError.
    """
    with _archive(path) as file:
        size, sha256 = file.seek(0, 2), await asyncio.to_thread(_hash, file)
        query = {"name": name, "size": str(size), "sha256": sha256}
        upload = await _retry(lambda: client.call("POST", route, params=query))
        one, received = f"{route}/{upload['id']}", upload["received"]
        progress(received, size)
        while received < size:
            file.seek(received)
            part = file.read(PART_BYTES)
            received = await _retry(lambda: _send(client, one, received, part))  # noqa: B023  (awaited at once)
            progress(received, size)
        return await client.call("POST", f"{one}/complete", params=base, timeout=UPLOAD_TIMEOUT)


async def max_rank(client: GatewayClient, route: str, base: str | None) -> int | None:
    """Return the largest rank that engines serve. Raises GatewayError.

    base: counts only engines of this base model. Returns None for an older gateway, which does not report the rank, and
    for a base model that takes no adapters.
    """
    try:
        found = await _retry(lambda: client.call("GET", route))
    except GatewayError as error:
        if error.status in (404, 405):
            return None
        raise
    return max((each["max_rank"] for each in found["data"] if base in (None, each["base"])), default=None)


async def _send(client: GatewayClient, route: str, start: int, part: bytes) -> int:
    """Send a part and return the upload's number of bytes received, also if an earlier attempt delivered the part."""
    query = {"offset": str(start), "sha256": hashlib.sha256(part).hexdigest()}
    try:
        upload = await client.call("PUT", route, params=query, data=part, timeout=UPLOAD_TIMEOUT)
    except GatewayError as error:
        if error.code != WRONG_OFFSET:
            raise
        upload = await client.call("GET", route)
    return int(upload["received"])


async def _retry(send: Callable[[], Any]) -> Any:
    """Repeat a call while the gateway is unreachable or answers 429, 502 or 503."""
    for pause in PAUSES:
        try:
            return await send()
        except GatewayError as error:
            if error.status not in (0, 429, 502, 503):
                raise
        await asyncio.sleep(pause)
    return await send()


@contextmanager
def _archive(path: Path) -> Iterator[BinaryIO]:
    """Open an archive, or pack a folder's files into one. Its bytes depend on the files' content only, so that a later
    call continues the upload.
    """
    if path.is_file():
        with path.open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for name in ADAPTER_FILES:
                info = tarfile.TarInfo(name)
                info.size = (path / name).stat().st_size
                with (path / name).open("rb") as file:
                    archive.addfile(info, file)
        yield packed


def _hash(file: BinaryIO) -> str:
    found = hashlib.sha256()
    file.seek(0)
    while piece := file.read(1 << 20):
        found.update(piece)
    return found.hexdigest()
