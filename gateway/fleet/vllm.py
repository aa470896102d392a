"""What driving a vLLM server takes that our engine does by itself: adapters are loaded by name through its runtime API
(VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), and unloaded again, the longest unused first.

A name is `sha256:<digest>`, so a name that is there already, whoever loaded it, stands for the same bytes. Another
gateway may unload it at any time: the request then fails with 404 before any work, and is sent again after a load.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

from adapters.store import Store
from gateway.errors import UpstreamFailed
from gateway.fleet.registry import EngineRecord

log = logging.getLogger(__name__)

LOAD_TIMEOUT = ClientTimeout(total=120.0)


class VllmAdapters:
    """The adapters of every vLLM engine."""

    def __init__(self, session: ClientSession, internal_token: str, store: Store) -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {internal_token}"}
        self._store = store
        self._loaded: WeakKeyDictionary[EngineRecord, _Loaded] = WeakKeyDictionary()

    async def ensure(self, engine: EngineRecord, digest: str, *, again: bool = False) -> None:
        """Returns when the engine can be asked for the adapter; any number of callers cause one load.

        again: the engine has just said that it does not have it. Raises UpstreamFailed, ClientError, OSError,
        TimeoutError.
        """
        loaded = self._loaded.setdefault(engine, _Loaded())
        while (leaving := loaded.unloads.get(digest)) is not None:
            # The load must not overtake the unload on its way there.
            await leaving.wait()
        if again:
            loaded.names.pop(digest, None)
            engine.resident -= {digest}
        if digest in loaded.names or digest in engine.resident:
            loaded.use(digest)
            # More than there is room for, if all were in use when the last was loaded.
            await self._unload_surplus(engine, loaded)
            return
        load = loaded.loads.get(digest)
        if load is None:
            load = loaded.loads[digest] = asyncio.create_task(self._load(engine, loaded, digest))
            load.add_done_callback(lambda done: loaded.ended(digest, done))
        # Others may wait for the same load: one client that leaves must not end it.
        await asyncio.shield(load)

    async def _load(self, engine: EngineRecord, loaded: "_Loaded", digest: str) -> None:
        path = await asyncio.to_thread(self._store.path, digest)
        if path is None:
            raise UpstreamFailed("The adapter is not in the adapter store.")
        started = time.monotonic()
        status, message = await self._post(engine, "load", {"lora_name": name(digest), "lora_path": str(path)})
        if status != 200 and not (status == 400 and "already been loaded" in message):
            log.error("engine %s could not load adapter %s: %d %s", engine.url, digest, status, message)
            raise UpstreamFailed(f"The engine could not load the adapter (it answered {status}).")
        engine.load_seconds += 0.3 * (time.monotonic() - started - engine.load_seconds)
        engine.resident |= {digest}
        loaded.use(digest)
        await self._unload_surplus(engine, loaded)

    async def _unload_surplus(self, engine: EngineRecord, loaded: "_Loaded") -> None:
        if len(loaded.names.keys() | engine.resident) <= engine.address.adapters:
            return
        for digest in engine.resident - loaded.names.keys():
            # Loaded before this gateway was started, or by another: the first to go.
            loaded.names[digest] = None
            loaded.names.move_to_end(digest, last=False)
        surplus = len(loaded.names) - engine.address.adapters
        idle = [digest for digest in loaded.names if not engine.serving[digest] and digest not in loaded.loads]
        for digest in idle[: max(0, surplus)]:
            loaded.names.pop(digest)
            engine.resident -= {digest}
            with loaded.leaving(digest):
                try:
                    status, message = await self._post(engine, "unload", {"lora_name": name(digest)})
                except (ClientError, OSError, TimeoutError) as error:
                    status, message = 0, type(error).__name__
            if status not in (200, 404):
                log.warning("engine %s could not unload adapter %s: %d %s", engine.url, digest, status, message)

    async def _post(self, engine: EngineRecord, verb: str, body: dict[str, str]) -> tuple[int, str]:
        """The status and what the engine says of it, for the log."""
        url = f"{engine.url}/v1/{verb}_lora_adapter"
        async with self._session.post(url, json=body, headers=self._headers, timeout=LOAD_TIMEOUT) as response:
            text = await response.text(errors="replace")
        try:
            return response.status, str(msgspec.json.decode(text)["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return response.status, text[:500]


class _Loaded:
    """names: the adapters known to be loaded in one engine, the longest unused first. loads, unloads: on their way."""

    def __init__(self) -> None:
        self.names: OrderedDict[str, None] = OrderedDict()
        self.loads: dict[str, asyncio.Task[None]] = {}
        self.unloads: dict[str, asyncio.Event] = {}

    @contextmanager
    def leaving(self, digest: str) -> Iterator[None]:
        gone = self.unloads[digest] = asyncio.Event()
        try:
            yield
        finally:
            del self.unloads[digest]
            gone.set()

    def use(self, digest: str) -> None:
        self.names[digest] = None
        self.names.move_to_end(digest)

    def ended(self, digest: str, load: "asyncio.Task[None]") -> None:
        self.loads.pop(digest, None)
        if not load.cancelled() and load.exception() is not None:
            log.info("adapter %s was not loaded", digest)


def name(digest: str) -> str:
    """The adapter's name in every engine."""
    return f"sha256:{digest}"
