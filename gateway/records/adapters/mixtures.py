"""Resolution of a request's model: an adapter's reference, a mixture of a tenant's adapters (wire/mixtures.py), or a
saved mixture (gateway/records/adapters/saved_mixtures.py).
"""

from collections.abc import Sequence

import msgspec

from gateway.errors import BadRequest, ModelNotFound
from gateway.records.adapters.catalog import Catalog, Model
from gateway.records.adapters.saved_mixtures import MAX_CHARS
from gateway.records.bases.registry import Bases
from gateway.records.tenants.tenants import Tenant
from wire.mixtures import Mixture, is_mixture, parse_terms
from wire.model_names import parse_reference


def names_in(model: str, bases: Bases) -> list[str]:
    """Return the plain names in a request's `model`. The key needs permission for each of them.

    A text that is no reference is returned as it is. Raises the protocol's BadRequest.
    """
    if bases.named(model) is not None:
        return [model]
    texts = [term.name for term in parse_terms(model)] if is_mixture(model) else [model]
    references = [parse_reference(text) if bases.named(text) is None else None for text in texts]
    return [text if found is None else found.name for text, found in zip(texts, references, strict=True)]


async def resolve_model(catalog: Catalog, tenant: Tenant, model: str, user: str | None = None) -> Model:
    """Return the model or mixture that `model` names. Raises ModelNotFound and BadRequest, which name the term.

    user: see `Catalog.resolve`.
    """
    if catalog.bases.named(model) is not None:
        return await catalog.resolve(tenant, model, user)
    if is_mixture(model):
        mixed = await _mix(catalog, tenant, model, user)
        return mixed if mixed.name == model else msgspec.structs.replace(mixed, requested=model)
    saved = await catalog.mixtures.cached(tenant, model)
    if saved is None:
        try:
            return await catalog.resolve(tenant, model, user)
        except ModelNotFound:
            saved = await catalog.mixtures.find(tenant, model)
            if saved is None:
                raise
    return msgspec.structs.replace(await _mix(catalog, tenant, saved.model, user), requested=model)


def _canonical_name(parts: Sequence[Model], mixture: Mixture) -> str:
    """Return the name of a mixture in usage rows: plain names and weights, however the request's text writes them.

    Otherwise each spelling of a weight would add rows to the usage sums, which are kept forever.
    """
    names: dict[str | None, str] = {}
    for part in parts:
        names[part.digest] = min(part.name, names.get(part.digest, part.name))
    return "+".join(sorted(f"{names[digest]}*{weight:.12g}" for digest, weight in mixture.parts))


async def _resolve_term(catalog: Catalog, tenant: Tenant, name: str, user: str | None) -> Model:
    """Return the adapter or base model that a term names. Raises ModelNotFound; BadRequest for a saved mixture."""
    try:
        return await catalog.resolve(tenant, name, user)
    except ModelNotFound:
        if await catalog.mixtures.find(tenant, name) is None:
            raise
    raise BadRequest(f"model: '{name}' is a saved mixture; expected an adapter in each term.", param="model")


async def _mix(catalog: Catalog, tenant: Tenant, model: str, user: str | None) -> Model:
    """Return the mixture of a text. Raises ModelNotFound and BadRequest, which name the term."""
    if len(model) > MAX_CHARS:
        raise BadRequest(f"Expected a mixture of at most {MAX_CHARS} characters.", param="model")
    terms = parse_terms(model)
    parts = [await _resolve_term(catalog, tenant, term.name, user) for term in terms]
    for part in parts:
        if part.digest is None:
            raise BadRequest(f"Expected an adapter in each term, got the base model '{part.name}'.", param="model")
        if part.base != parts[0].base:
            own = [f"'{each.shown}' is of '{catalog.bases.name_of(each.base)}'" for each in (parts[0], part)]
            raise BadRequest(f"Expected adapters of one base model: {' and '.join(own)}.", param="model")
    mixture = Mixture.of(terms, [part.digest for part in parts if part.digest is not None])
    return Model(
        name=_canonical_name(parts, mixture),
        digest=mixture.digest,
        names=tuple(dict.fromkeys(name for part in parts for name in part.names)),
        base=parts[0].base,
        parts=tuple(parts),
        mixture=mixture,
    )
