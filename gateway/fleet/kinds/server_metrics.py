"""Reader of a foreign server's Prometheus metrics.

A server with many adapters answers tens of MiB, of which a few lines matter. Other lines are dropped as they arrive.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiohttp import ClientResponse, ClientTimeout

# A page of metrics takes longer than other state: the server writes it anew for each read.
METRICS_TIMEOUT = ClientTimeout(total=10.0)
MAX_METRICS_BYTES = 128 * 2**20
# Longest line that is kept, and the limit of all kept lines.
MAX_LINE_BYTES, MAX_KEPT_BYTES = 2**14, 2**18
# Largest value that a gauge of requests can have.
MAX_REQUESTS = 2**31 - 1


class MetricLines(NamedTuple):
    """Lines of a page of metrics. is_whole: whether the page was read to its end."""

    text: bytes
    is_whole: bool


async def read_metrics(response: ClientResponse, names: Sequence[bytes]) -> MetricLines:
    """Return the lines that begin with one of the names. Reading stops at the limits, which no honest server reaches.

    Raises ClientError, OSError, TimeoutError.
    """
    size, kept, rest = 0, bytearray(b"\n"), b"\n"
    async for piece in response.content.iter_any():
        size += len(piece)
        text = rest + piece
        for line in _lines(text, names):
            kept += line
        if size > MAX_METRICS_BYTES or len(kept) > MAX_KEPT_BYTES:
            # Half a line could have a wrong value.
            return MetricLines(bytes(kept[: kept.rfind(b"\n", 0, MAX_KEPT_BYTES) + 1]), is_whole=False)
        rest = text[text.rfind(b"\n") :] if b"\n" in text else text
        if len(rest) > MAX_LINE_BYTES:
            # No part of this line begins a line.
            rest = b""
    for line in _lines(rest + b"\n", names):
        kept += line
    return MetricLines(bytes(kept), is_whole=True)


def _lines(text: bytes, names: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the whole lines that begin with a name, each with its newline. Each line of `text` follows a newline."""
    for name in names:
        start = text.find(b"\n" + name)
        while start >= 0:
            end = text.find(b"\n", start + 1)
            if end < 0:
                break
            if end - start <= MAX_LINE_BYTES:
                yield text[start + 1 : end + 1]
            start = text.find(b"\n" + name, end)


def as_count(value: bytes) -> int:
    """Return a gauge of requests; 0 for a value that is no number of requests, such as `NaN` or `1e999`."""
    try:
        number = float(value)
    except ValueError:
        return 0
    return int(number) if 0 <= number <= MAX_REQUESTS else 0
