"""Adapters of servers with a runtime API: loaded by name, and unloaded when the server is full (`unloading.py`).

A name contains the digest, so it stands for the same bytes whichever gateway loaded it. Another gateway may unload an
adapter at any time: the request then fails before any work, and is sent again after a load. A server with our plugin
(loraplex/vllm_plugin/) loads the adapter for the request by itself, so the gateway only unloads. Gateways share their
uses of adapters through Redis, so that no gateway unloads an adapter that another gateway is using.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import msgspec
from aiohttp import ClientTimeout

from adapters.fair_threads import FairThreads
from adapters.manifest import AdapterError, AdapterNotFound
from adapters.verified_files import VerifiedFiles
from gateway.errors import GatewayError, RankNotServed, UpstreamFailed
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.kinds.kind import FilesMissing, Services, read_body, read_detail
from gateway.fleet.kinds.unloading import victims
from wire.bounded_dict import BoundedDict
from wire.digests import digest_name
from wire.errors import BadRequest
from wire.escaping import escaped
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

# Threads that read adapters' files, or download them from a bucket. The loads of one tenant leave one to others. The
# default pool's threads are for uploads.
FILE_THREADS = 4
# Loads of one tenant that a server gets at once. A load stops the server's batch, and loads wait for each other there.
TENANT_LOADS = 2
# A failed load is not repeated for this time, in seconds, however many requests need it. Number of failures kept.
FAILURE_SECONDS, MAX_FAILURES = 5.0, 1024
LOAD_TIMEOUT = ClientTimeout(total=120.0)
# Characters of an engine's message in the log.
MAX_LOGGED = 500


class AdapterApi(msgspec.Struct, frozen=True, kw_only=True):
    """Routes of a server's runtime API for adapters.

    load, unload: paths. is_loaded, is_unloaded: return from an answer's status and body and the adapter's name whether
    the adapter is loaded, or is not loaded, after the call. name: returns the server's name for a digest. rank_refusal:
    pattern of a refused load's message whose group 1 is the largest rank that the server takes; None: its message names
    no rank.
    """

    load: str
    unload: str
    is_loaded: Callable[[int, bytes, str], bool]
    is_unloaded: Callable[[int, bytes, str], bool]
    name: Callable[[str], str] = digest_name
    rank_refusal: re.Pattern[bytes] | None = None


class RuntimeAdapters:
    """Adapters of all servers of a kind."""

    def __init__(self, services: Services, api: AdapterApi) -> None:
        self._session = services.session
        self._store = services.store
        self._uses = services.uses
        self._verified = VerifiedFiles()
        self._api = api
        self._threads = FairThreads(FILE_THREADS, "adapter-files", max_pending=0, max_pending_per_tenant=0)
        self._server_loads: WeakKeyDictionary[EngineRecord, _ServerLoads] = WeakKeyDictionary()

    async def ensure(
        self,
        engine: EngineRecord,
        digest: str,
        on_sent: Callable[[], None] = lambda: None,
        tenant_id: str = "",
        *,
        again: bool = False,
    ) -> None:
        """Load the adapter unless the engine has it, or finds it by itself; concurrent callers share a load.

        on_sent: called before a load is sent, because it may be the cause of the server's death. tenant_id: whose turn
        the reading of the files takes. again: whether the engine has just answered that it lacks the adapter, so that
        it must be loaded. Raises the protocol's BadRequest for an activated LoRA, RankNotServed, UpstreamFailed,
        ClientError, OSError, TimeoutError.
        """
        server = self._server_loads.setdefault(engine, _ServerLoads())
        self._uses.note(engine.url, digest, tenant_id)
        while (unload := server.unload_events.get(digest)) is not None:
            # The load must not overtake the unload in flight.
            await unload.wait()
        if again:
            engine.resident -= {digest}
        elif engine.state.finds_adapters:
            engine.resident |= {digest}
        if digest not in engine.resident:
            server.check(digest)
            load = server.loads.get(digest)
            if load is None:
                load = server.loads[digest] = Load()
                load.task = asyncio.create_task(self._load_in_turn(engine, digest, load, tenant_id, server))
                load.task.add_done_callback(lambda done: server.ended(digest, done))
            await load.wait(on_sent)
        await self._make_room(engine, server)

    def note_running(self, engine: EngineRecord) -> None:
        """Record a use of each adapter that requests of this process use now.

        So an adapter with a long answer counts as recently used, and no other process unloads it. SGLang delays an
        unload, and all loads after it, until the adapter's answers have ended.
        """
        for digest in engine.requests.by_digest:
            if digest is not None:
                self._uses.note_again(engine.url, digest)

    def refused_above(self, engine: EngineRecord) -> int:
        """Return the largest rank that the server takes, by its refusal of a larger one; 0 without a refusal."""
        server = self._server_loads.get(engine)
        return 0 if server is None else server.max_rank

    def forget_failures(self, engine: EngineRecord) -> None:
        """Forget what refusals of loads have shown, because another server may run now."""
        if (server := self._server_loads.get(engine)) is not None:
            server.max_rank = 0
            server.failures.clear()

    async def _load_in_turn(
        self, engine: EngineRecord, digest: str, load: "Load", tenant_id: str, server: "_ServerLoads"
    ) -> None:
        """Load an adapter beside at most TENANT_LOADS - 1 others of the tenant on the server."""
        async with server.turn(tenant_id):
            if load.waiting:
                await self._load(engine, digest, load, tenant_id, server)

    async def _load(
        self, engine: EngineRecord, digest: str, load: "Load", tenant_id: str, server: "_ServerLoads"
    ) -> None:
        with ExitStack() as stack:
            try:
                opened = partial(stack.enter_context, self._verified.use(self._store, digest))
                checkpoint = await asyncio.wrap_future(self._threads.submit(tenant_id, opened, bounded=False))
            except AdapterNotFound as error:
                raise FilesMissing("The files of the adapter are missing from the adapter store.") from error
            except AdapterError as error:
                damaged = UpstreamFailed("The adapter in the adapter store is damaged.")
                raise server.failed(digest, damaged) from error
            if checkpoint.manifest.invocation:
                # These servers ignore the field, and would apply the adapter to all tokens.
                raise BadRequest("model", "model: this engine serves no activated LoRA (alora_invocation_tokens).")
            if not load.waiting:
                # All clients have left, so nobody would be known as the cause of a death. A request that comes in this
                # moment finds that the server lacks the adapter, and loads it again.
                return
            load.note_sent()
            started = time.monotonic()
            body = {"lora_name": self._api.name(digest), "lora_path": str(checkpoint.folder)}
            status, answer = await self._post(engine, self._api.load, body)
        if not self._api.is_loaded(status, answer, body["lora_name"]):
            log.error("engine %s could not load adapter %s: %d %s", engine.url, digest, status, _message(answer))
            raise server.failed(digest, self._failure(status, answer, server))
        engine.load_seconds += 0.3 * (time.monotonic() - started - engine.load_seconds)
        engine.resident |= {digest}

    def _failure(self, status: int, answer: bytes, server: "_ServerLoads") -> GatewayError:
        """Return the error of a load that the server refused, and note the largest rank that its answer names."""
        pattern = self._api.rank_refusal
        named = pattern.search(answer) if pattern is not None else None
        if named is None:
            return UpstreamFailed(f"The engine could not load the adapter (it answered {status}).")
        server.max_rank = int(named[1])
        return RankNotServed(
            f"model: the adapter's rank is larger than {server.max_rank}, the largest that this engine serves.",
            param="model",
        )

    async def _make_room(self, engine: EngineRecord, server: "_ServerLoads") -> None:
        """If the server holds more adapters than its limit and some are idle, wait for the unloading in progress and
        one more.

        The second begins after this request's load. Further ones make room for loads of others.
        """
        for _ in range(2):
            surplus_task = self._surplus_task(engine, server)
            if surplus_task is None:
                return
            # A client that leaves must not end it, or such clients would fill the server.
            await asyncio.shield(surplus_task)

    def _surplus_task(self, engine: EngineRecord, server: "_ServerLoads") -> "asyncio.Task[None] | None":
        """Return the task that unloads the surplus, and start it unless it runs. Return None without a surplus."""
        if len(engine.resident) <= engine.address.adapters or not self._idle(engine, server):
            return None
        if server.surplus_task is None:
            server.surplus_task = asyncio.create_task(self._unload_surplus(engine, server))
        return server.surplus_task

    async def _unload_surplus(self, engine: EngineRecord, server: "_ServerLoads") -> None:
        """Unload adapters beyond the server's limit, whichever gateway loaded or used them."""
        try:
            uses = await self._uses.all(engine.url)
            surplus = max(0, len(engine.resident) - engine.address.adapters)
            for digest in victims(self._idle(engine, server), engine.resident, uses, surplus):
                engine.resident -= {digest}
                with server.unload(digest):
                    try:
                        body = {"lora_name": self._api.name(digest)}
                        status, answer = await self._post(engine, self._api.unload, body)
                    except HTTP_ERRORS as error:
                        status, answer = 0, type(error).__name__.encode()
                if not self._api.is_unloaded(status, answer, body["lora_name"]):
                    reason = _message(answer)
                    log.warning("engine %s could not unload adapter %s: %d %s", engine.url, digest, status, reason)
        finally:
            server.surplus_task = None
        # Adapters may have been loaded meanwhile, and the clients that would unload others for them may have left.
        self._surplus_task(engine, server)

    def _idle(self, engine: EngineRecord, server: "_ServerLoads") -> list[str]:
        return [
            each for each in engine.resident if not engine.requests.by_digest.get(each) and each not in server.loads
        ]

    async def _post(self, engine: EngineRecord, path: str, body: dict[str, str]) -> tuple[int, bytes]:
        """Return the status and the body of the engine's answer."""
        url, headers = engine.url + path, engine.address.bearer
        async with self._session.post(
            url, json=body, headers=headers, timeout=LOAD_TIMEOUT, allow_redirects=False
        ) as response:
            return response.status, await read_body(response)


def _message(answer: bytes) -> str:
    """Return the beginning of the engine's message, for the log."""
    return escaped(read_detail(answer).message or answer[:MAX_LOGGED].decode(errors="replace"), MAX_LOGGED)


class Load:
    """A load of an adapter. waiting: the `on_sent` of each request that waits for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.waiting: list[Callable[[], None]] = []
        self._is_sent = False

    async def wait(self, on_sent: Callable[[], None]) -> None:
        """Wait until the adapter is loaded. Raises the protocol's BadRequest, RankNotServed, UpstreamFailed,
        ClientError, OSError, TimeoutError.
        """
        assert self.task is not None
        if self._is_sent:
            on_sent()
        self.waiting.append(on_sent)
        try:
            # Other requests may wait for the same load, so a client that leaves must not end it.
            await asyncio.shield(self.task)
        except GatewayError as error:
            # Each request adds its own headers to its error.
            raise copy(error) from error
        finally:
            self.waiting.remove(on_sent)

    def note_sent(self) -> None:
        """Note that the server gets the load now."""
        self._is_sent = True
        for on_sent in self.waiting:
            on_sent()


class _ServerLoads:
    """Running loads and unloads of a server, and what its refusals of loads have shown.

    unload_events: set at the end of each running unload, by digest. surplus_task: unloads the adapters beyond the
    server's limit; None if it does not run.
    """

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.unload_events: dict[str, asyncio.Event] = {}
        self.surplus_task: asyncio.Task[None] | None = None
        # The largest rank that the server takes, by its refusal of a larger one; 0: unknown.
        self.max_rank = 0
        self.failures = BoundedDict[str, tuple[float, GatewayError]](MAX_FAILURES)
        # By tenant, while it has loads.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def failed(self, digest: str, error: GatewayError) -> GatewayError:
        """Note the error of a failed load, and return it."""
        self.failures.put(digest, (time.monotonic() + FAILURE_SECONDS, error))
        return copy(error)

    def check(self, digest: str) -> None:
        """Raise the error of a load that failed within the last FAILURE_SECONDS."""
        until, error = self.failures.get(digest, (0.0, None))
        if error is not None and time.monotonic() < until:
            # Each request adds its own headers to its error.
            raise copy(error)

    def turn(self, tenant_id: str) -> asyncio.Semaphore:
        """Return the semaphore of the tenant's loads."""
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Semaphore(TENANT_LOADS)
        return turn

    @contextmanager
    def unload(self, digest: str) -> Iterator[None]:
        gone = self.unload_events[digest] = asyncio.Event()
        try:
            yield
        finally:
            del self.unload_events[digest]
            gone.set()

    def ended(self, digest: str, load: "asyncio.Task[None]") -> None:
        self.loads.pop(digest, None)
        if not load.cancelled() and load.exception() is not None:
            log.info("adapter %s was not loaded", digest)
