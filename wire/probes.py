"""Probe of an adapter in an engine, before the gateway serves it."""

from msgspec import Struct

from wire.digests import named_digest
from wire.errors import BadRequest


class ProbeRequest(Struct):
    """Body of `POST /probe`. model: `sha256:<digest>`."""

    model: str

    def check(self) -> None:
        if named_digest(self.model) is None:
            raise BadRequest("model", "model: expected sha256: and 64 hexadecimal digits.")


class ProbeReason(Struct, frozen=True):
    """Reason why an adapter is refused."""

    message: str
    code: str


class AdapterProbe(Struct, frozen=True, kw_only=True):
    """Result of a probe. It names no token and no text.

    reasons: empty for an adapter that can be served. largest_difference, divergence: differences of the next token's
    scores from the base model's, the largest over all prompts: of one logit, and Kullback-Leibler in nats; None if one
    is not finite. host_bytes, device_bytes: memory of the adapter in each tier of this engine. base_digest: see
    `engine.probing.base_digest`. engine_version: release of the engine.
    """

    digest: str
    reasons: tuple[ProbeReason, ...]
    rank: int
    num_modules: int
    host_bytes: int
    device_bytes: int
    device_pages: int
    largest_difference: float | None = None
    divergence: float | None = None
    base_digest: str | None = None
    engine_version: str | None = None
