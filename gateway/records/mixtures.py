"""Resolution of mixtures of a tenant's adapters (wire/mixtures.py). The catalog resolves the name of each term."""

from gateway.errors import BadRequest
from gateway.records.catalog import Catalog, Model
from gateway.records.tenants import Tenant
from wire.mixtures import Mixture, is_mixture, parse_terms

# Maximum length of a model's name in the usage ledger.
MAX_CHARS = 256


def names_in(model: str, base_model: str) -> list[str]:
    """Return the names in a request's `model`. The key needs permission for each of them.

    Raises the protocol's BadRequest.
    """
    if model == base_model or not is_mixture(model):
        return [model]
    return [term.name for term in parse_terms(model)]


async def resolve_model(catalog: Catalog, tenant: Tenant, model: str) -> Model:
    """Return the model or mixture that `model` names. Raises ModelNotFound and BadRequest, which name the term."""
    if model == catalog.base_model or not is_mixture(model):
        return await catalog.resolve(tenant, model)
    if len(model) > MAX_CHARS:
        raise BadRequest(f"Expected a mixture of at most {MAX_CHARS} characters.", param="model")
    terms = parse_terms(model)
    parts = [await catalog.resolve(tenant, term.name) for term in terms]
    for part in parts:
        if part.digest is None:
            raise BadRequest(f"Expected an adapter in each term, got the base model '{part.name}'.", param="model")
    mixture = Mixture.of(terms, [part.digest for part in parts if part.digest is not None])
    return Model(
        name=model,
        digest=mixture.digest,
        names=tuple(dict.fromkeys(name for part in parts for name in part.names)),
        parts=tuple(parts),
        mixture=mixture,
    )
