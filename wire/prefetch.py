"""Hints from gateways to engines: adapters that waiting requests will need, and adapters that the operator pinned."""

from msgspec import Struct

from wire.digests import bare_digest, named_digest
from wire.errors import BadRequest

# Maximum length of a tenant's id.
MAX_TENANT_CHARS = 256
# Time for which a pin lasts; gateways repeat the pins before it ends. Maximum pins of a request.
PIN_SECONDS = 30.0
MAX_PINNED = 1000


class PrefetchRequest(Struct):
    """Body of `POST /prefetch`. adapter: `sha256:<digest>`. tenant: id of the tenant whose request waits."""

    adapter: str
    tenant: str = ""

    @property
    def digest(self) -> str:
        """Return the adapter's digest without prefix, after `check`."""
        return bare_digest(self.adapter)

    def check(self) -> None:
        if named_digest(self.adapter) is None:
            message = f"adapter: expected sha256: and 64 hexadecimal digits, got {self.adapter[:100]!r}."
            raise BadRequest("adapter", message)
        if len(self.tenant) > MAX_TENANT_CHARS:
            raise BadRequest("tenant", f"tenant: expected at most {MAX_TENANT_CHARS} characters.")


class Prefetched(Struct):
    """Response to a hint. is_loaded: whether the adapter is in the engine's memory now."""

    is_loaded: bool


class PinRequest(Struct):
    """Body of `POST /pins`. adapters: `sha256:<digest>` of adapters to pin in host memory for PIN_SECONDS."""

    adapters: list[str]

    @property
    def digests(self) -> list[str]:
        """Return the digests without prefixes, after `check`."""
        return [bare_digest(adapter) for adapter in self.adapters]

    def check(self) -> None:
        if len(self.adapters) > MAX_PINNED:
            message = f"adapters: expected at most {MAX_PINNED} adapters, got {len(self.adapters)}."
            raise BadRequest("adapters", message)
        for adapter in self.adapters:
            if named_digest(adapter) is None:
                message = f"adapters: expected sha256: and 64 hexadecimal digits, got {adapter[:100]!r}."
                raise BadRequest("adapters", message)


class PinResult(Struct):
    """Response to pins. num_kept: number of adapters that stay in host memory; the others failed or found no room."""

    num_kept: int
