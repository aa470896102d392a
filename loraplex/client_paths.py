"""Paths and query parameters of the gateway's routes, for the client of the command line."""

from urllib.parse import quote

import click

from wire.model_names import Reference


def force_query(force: bool) -> dict[str, str]:
    """Return the query of a call that may name models that do not exist."""
    return {"force": "true"} if force else {}


def engine_query(url: str | None) -> dict[str, str]:
    return {} if url is None else {"engine": url}


def named_path(collection: str, name: str) -> str:
    """Return the path of an entry of a collection. Raises UsageError for an empty name, which would be another path."""
    if not name:
        raise click.UsageError(f"expected a name among the {collection.rsplit('/', 1)[-1]}, got an empty text")
    return f"{collection}/{quote(name, safe='')}"


def uploads_path(tenant: str | None) -> str:
    """Return the route of uploads in parts, for a tenant or with a tenant's own key."""
    return "/v1/adapter-uploads" if tenant is None else named_path("/admin/api/tenants", tenant) + "/adapter-uploads"


def adapters_path(tenant: str | None) -> str:
    return "/v1/adapters" if tenant is None else named_path("/admin/api/tenants", tenant) + "/adapters"


def mixtures_path(tenant: str | None) -> str:
    return "/v1/mixtures" if tenant is None else named_path("/admin/api/tenants", tenant) + "/mixtures"


def version_path(tenant: str | None, version: Reference) -> str:
    return f"{named_path(adapters_path(tenant), version.name)}/versions/{version.version}"


def alias_path(tenant: str | None, alias: Reference) -> str:
    return f"{named_path(adapters_path(tenant), alias.name)}/aliases/{alias.alias}"


def keys_path(tenant: str | None, as_tenant: bool) -> str:
    if as_tenant:
        return "/v1/keys"
    return "/admin/api/keys" if tenant is None else named_path("/admin/api/tenants", tenant) + "/keys"
