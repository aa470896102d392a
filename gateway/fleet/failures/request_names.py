"""Names of requests in the quarantine: HMACs, so that no body is kept. Those of large bodies are computed in a thread.

The HMAC of a body of 8 MiB takes 10 ms, for which the event loop must not stop.
"""

import asyncio
import hashlib
import hmac
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from gateway.fleet.engines.own_requests import NamedBody, Names
from gateway.fleet.engines.suspects import Suspect

log = logging.getLogger(__name__)

# Fields that may differ between retries and do not change the computation.
VOLATILE = (
    "user",
    "metadata",
    "store",
    "prompt_cache_key",
    "safety_identifier",
    "stream",
    "stream_options",
    "priority",
    "ttft_target",
)
# The event loop computes the names of bodies of at most INLINE_CHARS characters. Each value counts as VALUE_CHARS,
# whose hash takes about as long as a look at the value.
INLINE_CHARS, VALUE_CHARS = 2**16, 64
# Bodies that wait for the thread. Beyond them, the oldest of the tenant with the most gets no name.
MAX_UNNAMED = 32
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="quarantine")


class RequestNames:
    """The names of requests. secret: key of the HMACs."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hmac.digest(secret, b"loraplex quarantine", hashlib.sha256)
        self._unnamed = Unnamed()

    def of(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> Names:
        """Return the suspects of a request, itself and its adapters. They are computed at once for a small body."""
        compute = partial(self._name, tenant_id, digests, body)
        if _is_large(body):
            return self._unnamed.add(tenant_id, compute)
        names: Names = Future()
        _compute(names, compute)
        return names

    async def known(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> list[Suspect]:
        """Return the suspects as `of`, after a wait for those of a large body."""
        compute = partial(self._name, tenant_id, digests, body)
        return await asyncio.get_running_loop().run_in_executor(_THREAD, compute) if _is_large(body) else compute()

    def _name(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> list[Suspect]:
        if body.suspects is None:
            lasting = {name: value for name, value in sorted(body.body.items()) if name not in VOLATILE}
            message = msgspec.json.encode([tenant_id, digests, lasting])
            found = Suspect("request", tenant_id, hmac.new(self._secret, message, hashlib.sha256).hexdigest())
            body.suspects = [found, *(Suspect("adapter", tenant_id, digest) for digest in digests)]
        return body.suspects


class Unnamed:
    """Requests with large bodies that wait for their names, oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[Names, tuple[str, Callable[[], list[Suspect]]]] = {}
        self._lock = threading.Lock()

    def add(self, tenant_id: str, compute: Callable[[], list[Suspect]]) -> Names:
        """Return the names that `compute` returns in the thread. They are cancelled if too many bodies wait."""
        names: Names = Future()
        with self._lock:
            self._waiting[names] = tenant_id, compute
            dropped = self._drop() if len(self._waiting) > MAX_UNNAMED else None
        if dropped is not None:
            dropped.cancel()
        _THREAD.submit(self._compute_next)
        return names

    def _drop(self) -> Names:
        [(most, _)] = Counter(tenant_id for tenant_id, _ in self._waiting.values()).most_common(1)
        oldest = next(names for names, (tenant_id, _) in self._waiting.items() if tenant_id == most)
        del self._waiting[oldest]
        return oldest

    def _compute_next(self) -> None:
        with self._lock:
            names = next(iter(self._waiting), None)
            if names is None:
                return
            _, compute = self._waiting.pop(names)
        if names.set_running_or_notify_cancel():
            _compute(names, compute)


def _compute(names: Names, compute: Callable[[], list[Suspect]]) -> None:
    """Set names to the result of `compute`, or to its error."""
    try:
        names.set_result(compute())
    except Exception as error:  # noqa: BLE001 - passed on to the reader, which loses this request only
        names.set_exception(error)


def computed(names: Names) -> list[Suspect]:
    """Return names that are done; none if they could not be computed, or too many bodies waited."""
    if names.cancelled():
        return []
    if error := names.exception():
        # Its text may have a part of the body.
        log.error("quarantine: a request on an engine that died has no name: %s", type(error).__name__)
        return []
    return names.result()


def _is_large(body: NamedBody) -> bool:
    """Return whether the names of a body are computed in the thread. At most INLINE_CHARS of it are read."""
    size, values = 0, list[Any]([body.body] if body.suspects is None else ())
    while values and size <= INLINE_CHARS:
        value = values.pop()
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, msgspec.Raw):
            size += memoryview(value).nbytes
        elif isinstance(value, dict | list):
            size += VALUE_CHARS * len(value)
            if size <= INLINE_CHARS:
                values += value
                values += value.values() if isinstance(value, dict) else ()
    return size > INLINE_CHARS
