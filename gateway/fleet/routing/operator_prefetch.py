"""Prefetch of adapters into an engine's host memory on an operator's order."""

from msgspec import MsgspecError

from gateway.errors import BadRequest, Unavailable
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.routing.prefetch import SendHint
from gateway.records.bases.base import Binding
from wire.http_errors import HTTP_ERRORS


class OperatorPrefetch:
    """Tells engines to load adapters that an operator names."""

    def __init__(self, registry: Registry, send: SendHint) -> None:
        self._registry = registry
        self._send = send

    @property
    def up(self) -> list[EngineRecord]:
        """Return the engines that are up."""
        return self._registry.up

    def engines(self, binding: Binding) -> list[EngineRecord]:
        """Return the engines that can load adapters with this binding."""
        return [each for each in self._registry.up if each.address.traits.takes_hints and each.serves(binding)]

    async def load(self, url: str, digest: str, binding: Binding, tenant_id: str) -> EngineRecord:
        """Make an engine load an adapter, and return the engine. tenant_id: the owner, whose turn the load takes.

        Raises BadRequest for an engine that cannot serve it, Unavailable if the engine did not load it.
        """
        able = self.engines(binding)
        found = next((each for each in able if each.url == url.rstrip("/")), None)
        if found is None:
            known = ", ".join(each.url for each in able) or "none"
            raise BadRequest(
                "engine: expected an engine that is up, loads adapters ahead of requests and serves the version's "
                f"base model: {known}.",
                param="engine",
            )
        try:
            is_loaded = await self._send(found, digest, tenant_id)
        except (*HTTP_ERRORS, MsgspecError) as error:
            raise Unavailable(f"The engine did not load the adapter: {type(error).__name__}.") from error
        if not is_loaded:
            raise Unavailable(
                "The engine did not load the adapter: its files are missing there, or the tenant's loads already fill "
                "their part of the host memory."
            )
        found.prefetched.add(digest)
        return found
