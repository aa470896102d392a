"""Checks of model names in keys, limits and prices: a name that does not exist is usually a typing error."""

from collections.abc import Iterable

from aiohttp import web

from gateway.api.requests.fields import read_flag
from gateway.errors import BadRequest
from gateway.records.adapters.catalog import Catalog
from gateway.records.tenants.tenants import ANY_ADAPTER, Tenant

FORCE = "To accept a name that does not exist yet, use --force or ?force=true"
# Most names that a message lists.
MAX_NAMES = 20


async def check_models(
    request: web.Request,
    catalog: Catalog,
    tenant: Tenant | None,
    names: Iterable[str],
    param: str,
    **accepted: bool,
) -> None:
    """Check the names like `check_names`, unless the request has `?force=true`: an adapter may be pushed later."""
    if not read_flag(request, "force"):
        await check_names(catalog, tenant, names, param, **accepted)


async def check_names(
    catalog: Catalog,
    tenant: Tenant | None,
    names: Iterable[str],
    param: str,
    *,
    any_adapter: bool = False,
    saved_mixtures: bool = False,
) -> None:
    """Check that each name is a base model's or a plain name of the tenant's adapters. Raises BadRequest.

    tenant: None for a new tenant, which has base models only. any_adapter: accept "*". saved_mixtures: accept names
    of saved mixtures, on which limits and prices have no effect.
    """
    for name in names:
        if any_adapter and name == ANY_ADAPTER:
            continue
        if saved_mixtures and tenant is not None and await catalog.mixtures.find(tenant, name) is not None:
            continue
        if not await _exists(catalog, tenant, name):
            known = [
                *(base.name for base in catalog.bases.listed),
                *(adapter.name for adapter in (await catalog.list(tenant) if tenant else ())),
            ]
            listed = ", ".join(known[:MAX_NAMES]) + (", ..." if len(known) > MAX_NAMES else "")
            whose = f"tenant '{tenant.name}'" if tenant else "a new tenant"
            message = f"{param}: {whose} has no model '{name}', only: {listed}. {FORCE}."
            raise BadRequest(message, param=param, code="unknown_model")


async def _exists(catalog: Catalog, tenant: Tenant | None, name: str) -> bool:
    if tenant is None:
        return catalog.bases.named(name) is not None
    return await catalog.knows(tenant, name)
