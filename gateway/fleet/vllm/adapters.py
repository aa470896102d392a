"""Adapters of vLLM servers: loaded by name and unloaded least recently used first.

The runtime API needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A name is `sha256:<digest>`, so it stands for the same bytes
whichever gateway loaded it. Another gateway may unload an adapter at any time: the request then fails with 404 before
any work, and is sent again after a load. Gateways share their uses of adapters through Redis, so that no gateway
unloads an adapter that another gateway is using.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from adapters.store import Store
from gateway.errors import UpstreamFailed
from gateway.fleet.registry import EngineRecord
from gateway.fleet.vllm.recent_uses import RecentUses
from wire.digests import digest_name

log = logging.getLogger(__name__)

LOAD_TIMEOUT = ClientTimeout(total=120.0)


class VllmAdapters:
    """The adapters of every vLLM server."""

    def __init__(self, session: ClientSession, store: Store, uses: RecentUses) -> None:
        self._session = session
        self._store = store
        self._uses = uses
        self._moving: WeakKeyDictionary[EngineRecord, _Moving] = WeakKeyDictionary()

    async def ensure(self, engine: EngineRecord, digest: str, *, again: bool = False) -> None:
        """Load the adapter unless the engine has it; concurrent callers share a load.

        again: whether the engine has just answered that it lacks the adapter. Raises UpstreamFailed, ClientError,
        OSError, TimeoutError.
        """
        moving = self._moving.setdefault(engine, _Moving())
        self._uses.note(engine.url, digest)
        while (leaving := moving.unloads.get(digest)) is not None:
            # The load must not overtake the unload that is under way.
            await leaving.wait()
        if again:
            engine.resident -= {digest}
        if digest not in engine.resident:
            load = moving.loads.get(digest)
            if load is None:
                load = moving.loads[digest] = asyncio.create_task(self._load(engine, digest))
                load.add_done_callback(lambda done: moving.ended(digest, done))
            # Other requests may wait for the same load, so a client that leaves must not end it.
            await asyncio.shield(load)
        await self._unload_surplus(engine, moving)

    async def _load(self, engine: EngineRecord, digest: str) -> None:
        path = await asyncio.to_thread(self._store.path, digest)
        if path is None:
            raise UpstreamFailed("The adapter is not in the adapter store.")
        started = time.monotonic()
        status, message = await self._post(engine, "load", {"lora_name": digest_name(digest), "lora_path": str(path)})
        if status != 200 and not (status == 400 and "already been loaded" in message):
            log.error("engine %s could not load adapter %s: %d %s", engine.url, digest, status, message)
            raise UpstreamFailed(f"The engine could not load the adapter (it answered {status}).")
        engine.load_seconds += 0.3 * (time.monotonic() - started - engine.load_seconds)
        engine.resident |= {digest}

    async def _unload_surplus(self, engine: EngineRecord, moving: "_Moving") -> None:
        """Unload the least recently used adapters beyond the server's limit, whichever gateway loaded or used them."""
        if len(engine.resident) <= engine.address.adapters or not self._idle(engine, moving):
            return
        async with moving.unloading:
            used_at = await self._uses.all(engine.url)
            surplus = max(0, len(engine.resident) - engine.address.adapters)
            for digest in sorted(self._idle(engine, moving), key=lambda each: used_at.get(each, 0.0))[:surplus]:
                engine.resident -= {digest}
                with moving.leaving(digest):
                    try:
                        status, message = await self._post(engine, "unload", {"lora_name": digest_name(digest)})
                    except (ClientError, OSError, TimeoutError) as error:
                        status, message = 0, type(error).__name__
                if status not in (200, 404):
                    log.warning("engine %s could not unload adapter %s: %d %s", engine.url, digest, status, message)

    def _idle(self, engine: EngineRecord, moving: "_Moving") -> list[str]:
        return [each for each in engine.resident if not engine.serving.get(each) and each not in moving.loads]

    async def _post(self, engine: EngineRecord, verb: str, body: dict[str, str]) -> tuple[int, str]:
        """Return the status and the engine's message, for the log."""
        url = f"{engine.url}/v1/{verb}_lora_adapter"
        async with self._session.post(
            url, json=body, headers=engine.address.bearer, timeout=LOAD_TIMEOUT, allow_redirects=False
        ) as response:
            text = await response.text(errors="replace")
        try:
            return response.status, str(msgspec.json.decode(text)["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return response.status, text[:500]


class _Moving:
    """Running loads and unloads of a server. unloading: held while adapters to unload are chosen."""

    def __init__(self) -> None:
        self.loads: dict[str, asyncio.Task[None]] = {}
        self.unloads: dict[str, asyncio.Event] = {}
        self.unloading = asyncio.Lock()

    @contextmanager
    def leaving(self, digest: str) -> Iterator[None]:
        gone = self.unloads[digest] = asyncio.Event()
        try:
            yield
        finally:
            del self.unloads[digest]
            gone.set()

    def ended(self, digest: str, load: "asyncio.Task[None]") -> None:
        self.loads.pop(digest, None)
        if not load.cancelled() and load.exception() is not None:
            log.info("adapter %s was not loaded", digest)
