"""Note of a request's lease: the data with which another gateway settles the request if this one dies.

The gateways of a deployment may be of two releases. A gateway refuses to settle a lease whose note has an unknown
field, so newer fields are in the field `weights`, whose unknown fields every release ignores.
"""

from typing import Any

import msgspec

from gateway.access.auth import TenantPrincipal
from gateway.billing.charges import TokenRateWeights
from gateway.records.adapters.catalog import Model
from gateway.records.money.prices import Price


class NoteExtension(TokenRateWeights, frozen=True, kw_only=True, omit_defaults=True):
    """Field `weights` of a lease's note: the weights in the token rates, and every newer field.

    version: the adapter's version. parts: name and version of each part of a mixture. end_user, base: as in the usage
    row.
    """

    version: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    end_user: str | None = None
    base: str | None = None


def lease_note(
    principal: TenantPrincipal,
    endpoint: str,
    model: Model,
    price: Price,
    weights: TokenRateWeights,
    end_user: str | None = None,
    base: str | None = None,
) -> dict[str, Any]:
    """Return the note of a request's lease: the constant fields of its usage row, its price, and its NoteExtension
    unless all have their defaults.
    """
    extension = NoteExtension(
        prompt=weights.prompt,
        completion=weights.completion,
        version=model.version,
        parts=model.versions if model.parts else (),
        end_user=end_user,
        base=base,
    )
    return {
        **({} if extension == NoteExtension() else {"weights": extension}),
        "tenant": principal.tenant.name,
        "key_id": principal.key_id,
        "endpoint": endpoint,
        "model": model.name,
        "adapter_digest": model.digest,
        "price": price,
    }


def note_extension(note: dict[str, Any]) -> NoteExtension:
    """Return the weights and the newer fields of a lease's note."""
    return msgspec.convert(note.get("weights", {}), NoteExtension)


def noted_versions(note: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the adapters' versions that a lease's request uses, each with its name."""
    extension = note_extension(note)
    return extension.parts if extension.version is None else ((note["model"], extension.version),)
