"""Names that `model` accepts: the base model, a name given to /v1/load_lora_adapter, `sha256:<digest>` from the store,
or a mixture of such adapters (wire/mixtures.py).
"""

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from adapters.manifest import AdapterError, AdapterNotFound
from engine.answering.duty_cycle import DutyCycle
from engine.answering.errors import ApiError, ModelNotFound
from engine.answering.in_flight import InFlight
from engine.core.client import CoreClient
from engine.core.messages import AdapterFacts, Inspection
from engine.errors import EngineUnavailable, QueueFull
from wire.bounded_dict import BoundedDict
from wire.digests import digest_name, named_digest
from wire.error_codes import ADAPTER_FILES_UNREADABLE, ADAPTER_REFUSED, GENERATION_FAILED
from wire.errors import BadRequest
from wire.mixtures import Mixture, Term, is_mixture, parse_terms
from wire.responses import Model

logger = logging.getLogger(__name__)

# Weight of the newest load in the moving average of load times.
LOAD_SHARE = 0.3
# Maximum share of the time that loads by name use while requests run: each takes a part of a core, and a step waits for
# the slower core.
NAMED_SHARE = 0.1
# Maximum number of adapters whose invocation tokens are cached; a device holds fewer.
MAX_INVOCATIONS = 1 << 14


class Served(NamedTuple):
    """The adapter of a request, None for the base model. invocation: see `AdapterManifest`."""

    digest: str | None
    invocation: tuple[int, ...] = ()


class ModelRegistry:
    """Adapter names of this engine. Loads adapters into host memory before their requests are queued."""

    def __init__(
        self,
        base_name: str,
        core: CoreClient,
        in_flight: InFlight,
        refused: Callable[[], object],
    ) -> None:
        """refused: called for each load that fails outside the host tier, which counts its own failures."""
        self._refused = refused
        self.base_name = base_name
        self._core = core
        self._names: dict[str, str] = {}
        # Time in seconds since 1970 at which each name was loaded.
        self._named_at: dict[str, int] = {}
        # Number of requests, from arrival to end, that use each digest. An adapter in use is not freed.
        self._users: Counter[str] = Counter()
        # Digests to free after their last request, unless they have a name by then.
        self._unloaded: set[str] = set()
        # Mixtures in use. The end of the last request frees a mixture's host memory, but not its device pages.
        self._mixtures: set[str] = set()
        # Invocation tokens of recently used adapters. A request for an adapter without an entry loads it into host
        # memory, even if it is on the device.
        self._invocations = BoundedDict[str, tuple[int, ...]](MAX_INVOCATIONS)
        # Serializes the registration and the removal of folders, so that neither undoes the other.
        self._folders = asyncio.Lock()
        self._duty_cycle = DutyCycle(NAMED_SHARE, in_flight.wait_idle)
        self._created = int(time.time())
        # Moving average of the time to load an adapter.
        self.load_seconds = 0.0

    def resolve(self, model: str) -> str | Mixture | None:
        """Return the digest of the adapter that `model` names, a mixture, or None for the base model.

        Raises ModelNotFound, and BadRequest for a mixture that cannot be made.
        """
        if model == self.base_name:
            return None
        if (digest := self._names.get(model)) is not None:
            return digest
        if (digest := named_digest(model)) is not None:
            return digest
        if not is_mixture(model):
            raise ModelNotFound(model)
        terms = parse_terms(model)
        return Mixture.of(terms, [self._part(term) for term in terms])

    def _part(self, term: Term) -> str:
        digest = self._names.get(term.name) or named_digest(term.name)
        if digest is None and term.name == self.base_name:
            raise BadRequest("model", f"model: expected an adapter in each term, got the base model '{term.name}'.")
        if digest is None:
            raise ModelNotFound(term.name)
        return digest

    @asynccontextmanager
    async def using(self, model: str, tenant_id: str = "", weight: float | None = None) -> AsyncIterator[Served]:
        """Load the adapter that `model` names and yield it; the adapter stays registered until the exit.

        weight: the tenant's share of the loading threads; None if unknown.
        Raises ModelNotFound, ApiError if the adapter cannot be served or read now, and QueueFull if host memory is full
        or too many loads of the tenant wait.
        """
        found = self.resolve(model)
        if found is None:
            yield Served(None)
            return
        async with AsyncExitStack() as stack:
            if isinstance(found, Mixture):
                for part, _ in found.parts:
                    await stack.enter_async_context(self._kept(part))
                self._core.add_mixture(found)
                self._mixtures.add(found.digest)
            digest = found.digest if isinstance(found, Mixture) else found
            await stack.enter_async_context(self._kept(digest))
            await self._load_to_host(digest, model, tenant_id, weight)
            yield Served(digest, self._invocations[digest])

    async def _load_to_host(self, digest: str, model: str, tenant_id: str, weight: float | None) -> None:
        """Load the adapter unless it is in host or device memory, and store its invocation tokens."""
        started, is_known = time.monotonic(), digest in self._invocations
        with _named(model):
            adapter = await self._core.load_adapter(digest, tenant_id, weight=weight, may_be_on_device=is_known)
        if adapter is None:
            self._invocations.move_to_end(digest)
            return
        self._note_invocation(adapter)
        if adapter.is_new:
            self.load_seconds += LOAD_SHARE * (time.monotonic() - started - self.load_seconds)
            _log_load(model, adapter, started)

    async def inspect(self, digest: str, tenant_id: str) -> Inspection:
        """Load an adapter and inspect its weights. Raises ModelNotFound, ApiError, QueueFull."""
        with _named(digest_name(digest)):
            return await self._core.inspect_adapter(digest, tenant_id)

    def is_activated(self, digest: str) -> bool:
        """Return whether a recently used adapter is an activated LoRA."""
        return bool(self._invocations.get(digest))

    def _note_invocation(self, adapter: AdapterFacts) -> None:
        self._invocations.put(adapter.digest, adapter.invocation)

    async def load(self, name: str, path: str, replace: bool = False) -> str:
        """Register an adapter folder under a name, load it and return its digest. Repeating the call changes nothing.

        While requests run, a load soon after another one waits, see `NAMED_SHARE`.
        replace: allow a name that another adapter has. Requests in flight end with the adapter that they began with.
        Raises ApiError.
        """
        if name == self.base_name or named_digest(name) is not None:
            raise ApiError(400, f"lora_name: the name {name!r} is taken.", param="lora_name")
        await self._duty_cycle.wait()
        started = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self._duty_cycle.measure())
                async with self._folders:
                    digest = await self._add_path(path)
                    await stack.enter_async_context(self._kept(digest))
                self._unloaded.add(digest)  # freed at the exit, unless it gets the name
                adapter = await self._core.load_adapter(digest, "")
                assert adapter is not None
                before = self._names.get(name, digest)
                if before != digest and not replace:
                    raise ApiError(
                        400,
                        f"lora_name: the name {name!r} is taken by another adapter; unload it first, or send "
                        "load_inplace.",
                        param="lora_name",
                    )
                if self._names.get(name) != digest:
                    self._named_at[name] = int(time.time())
                self._names[name] = digest
        except AdapterNotFound as exc:
            _log_failure(name, exc)
            raise ApiError(404, _as_given(exc, path), param="lora_path", code="adapter_not_found") from None
        except AdapterError as exc:
            _log_failure(name, exc)
            raise ApiError(400, _as_given(exc, path), param="lora_path", code=ADAPTER_REFUSED) from None
        except OSError as exc:
            _log_failure(name, exc)
            raise ApiError(400, f"lora_path: the folder cannot be read: {exc.strerror}.", param="lora_path") from None
        _log_load(name, adapter, started)
        if before != digest:
            await self._forget(before)
        return digest

    async def unload(self, name: str) -> str:
        """Remove a name; the last name of an adapter frees its memory. Requests in flight end with the adapter that
        they began with.

        Raises ApiError (404) for an unknown name.
        """
        digest = self._names.pop(name, None)
        self._named_at.pop(name, None)
        if digest is None:
            raise ApiError(
                404, f"lora_name: no adapter is loaded as {name[:200]!r}.", param="lora_name", code="adapter_not_found"
            )
        logger.info("adapter %s unloaded: %s", name, digest_name(digest))
        await self._forget(digest)
        return digest

    @asynccontextmanager
    async def _kept(self, digest: str) -> AsyncIterator[None]:
        """Keep an adapter's memory during the block. If it is unloaded during that time, the last block to end frees
        it.
        """
        self._users[digest] += 1
        try:
            yield
        finally:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                if digest in self._mixtures:
                    self._mixtures.discard(digest)
                    self._core.remove_mixture(digest)
                elif digest in self._unloaded:
                    await self._forget(digest)

    async def _forget(self, digest: str) -> None:
        """Free an adapter that has no name: at once, or when the last request that uses it ends."""
        async with self._folders:
            self._unloaded.discard(digest)
            if digest in self._names.values():
                return
            if digest in self._users:
                self._unloaded.add(digest)
                return
            # A failed engine has nothing to free.
            with suppress(EngineUnavailable):
                await self._core.forget_adapter(digest)

    def list(self, max_model_len: int) -> list[Model]:
        base = Model(self.base_name, self._created, max_model_len, root=self.base_name)
        named = [
            Model(name, self._named_at[name], max_model_len, root=digest_name(digest), parent=self.base_name)
            for name, digest in self._names.items()
        ]
        return [base, *named]

    def one(self, name: str, max_model_len: int) -> Model:
        """Return one entry of the list. Raises ModelNotFound."""
        for model in self.list(max_model_len):
            if model.id == name:
                return model
        raise ModelNotFound(name)

    def names_of(self, digests: Iterable[str]) -> tuple[str, ...]:
        """Return every name by which requests select these adapters, sorted."""
        wanted = set(digests)
        given = [name for name, digest in self._names.items() if digest in wanted]
        return tuple(sorted([*map(digest_name, wanted), *given]))

    async def _add_path(self, path: str) -> str:
        try:
            return await self._core.register_folder(path)
        except (AdapterError, OSError):
            self._refused()
            raise


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Translate the errors of a load."""
    try:
        yield
    except (AdapterError, OSError) as exc:
        raise load_error(model, exc) from exc


def load_error(model: str, error: Exception) -> ApiError | QueueFull:
    """Return the answer's error for a load that failed, before its request was queued or while it waits for the device.

    It names the adapter as the client did.
    """
    if isinstance(error, AdapterNotFound):
        return ModelNotFound(model)
    _log_failure(model, error)
    if isinstance(error, AdapterError):
        return ApiError(400, f"The adapter cannot be served: {error}.", param="model", code=ADAPTER_REFUSED)
    if not isinstance(error, OSError):
        return ApiError(500, "The adapter could not be loaded.", kind="server_error", code=GENERATION_FAILED)
    if error.errno == errno.ENOMEM:
        return QueueFull(f"The adapter cannot be loaded: {error.strerror}.", retry_after=1)
    # The store failed, not the adapter: another engine may be able to read it.
    return ApiError(
        503,
        f"The adapter's files cannot be read: {error.strerror or 'the store failed'}.",
        kind="server_error",
        param="model",
        code=ADAPTER_FILES_UNREADABLE,
        headers={"Retry-After": "1"},
    )


def _log_load(name: str, adapter: AdapterFacts, started: float) -> None:
    milliseconds = (time.monotonic() - started) * 1000
    digest = digest_name(adapter.digest)
    # Requests of a gateway name an adapter by its digest.
    shown = "" if name == digest else f"{digest}, "
    text = "adapter %s loaded: %srank %d, %d pages, %.0f ms"
    logger.info(text, name, shown, adapter.rank, adapter.num_pages, milliseconds)


def _log_failure(name: str, error: Exception) -> None:
    logger.warning("adapter %s not loaded: %s", name, " ".join(str(error).split()))


def _as_given(error: Exception, path: str) -> str:
    """Return the message with the path as the client wrote it, which hides the server's folders."""
    return str(error).replace(str(Path(path).absolute()), path)
