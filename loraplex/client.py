"""Client of the gateway's HTTP API for the command line: operators' routes, and a tenant's own adapters and models."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import aiohttp

from loraplex.client_paths import (
    adapters_path,
    alias_path,
    engine_query,
    force_query,
    keys_path,
    mixtures_path,
    named_path,
    uploads_path,
    version_path,
)
from wire.model_names import Reference
from wire.sse import read_events

# Limits silence, not total time, because a large adapter on a slow line may take long.
UPLOAD_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class GatewayError(Exception):
    """A refusal by the gateway, or a failure to reach it; `status` is 0 in the latter case.

    `code` is the API's error code.
    """

    def __init__(self, message: str, status: int = 0, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class GatewayUnreachable(GatewayError):
    """No connection to the gateway."""


def reason(error: Exception) -> str:
    """Return the reason why a server could not be reached, in the system's words instead of the HTTP client's."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        # A number below 0 means an unknown host name; os.strerror has no text for it.
        return os.strerror(number) if number is not None and number > 0 else str(error.strerror)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


class GatewayClient:
    """Client for one gateway with one key (an operator's or a tenant's). An async context manager."""

    def __init__(self, url: str, key: str, timeout: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=timeout)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, *, expected: int = 200, **request: Any) -> Any:
        """Send a request and return the answer's JSON (None if empty).

        Raises GatewayError for a status of 400 or more other than `expected`.
        """
        try:
            async with self._session.request(method, self.url + path, **request) as response:
                body = await response.read()
                if response.status >= 400 and response.status != expected:
                    raise _refusal(response.status, body)
                return await response.json() if body else None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayUnreachable(f"cannot reach the gateway at {self.url}: {reason(error)}") from error

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event of a streamed answer.

        Raises GatewayError, also for an error event.
        """
        try:
            async with self._session.post(self.url + path, json=body | {"stream": True}) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                async for data in read_events(response.content.iter_any()):
                    event = json.loads(data)
                    if "error" in event:
                        raise _refusal(response.status, data)
                    yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayUnreachable(f"cannot reach the gateway at {self.url}: {reason(error)}") from error

    async def download(self, path: str, file: BinaryIO, **request: Any) -> None:
        """Write the answer's body to a file as it arrives. Raises GatewayError, also for an incomplete body."""
        try:
            async with self._session.get(self.url + path, timeout=UPLOAD_TIMEOUT, **request) as response:
                if response.status >= 400:
                    raise _refusal(response.status, await response.read())
                async for piece in response.content.iter_any():
                    file.write(piece)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayError(f"the gateway at {self.url} sent no whole file: {reason(error)}") from error

    async def listed(self, path: str, **request: Any) -> list[dict[str, Any]]:
        return (await self.call("GET", path, **request))["data"]

    async def create_tenant(self, name: str, *, force: bool = False, **fields: Any) -> dict[str, Any]:
        return await self.call("POST", "/admin/api/tenants", json={"name": name} | fields, params=force_query(force))

    async def tenants(self, **query: str) -> list[dict[str, Any]]:
        """Return all tenants that match. query: plan, tag, suspended, over_budget, q, idle_days, sort, order."""
        return await self._all_pages("/admin/api/tenants", query)

    async def _all_pages(self, path: str, query: dict[str, str]) -> list[dict[str, Any]]:
        """Return the entries of all pages of a list."""
        found: list[dict[str, Any]] = []
        while True:
            page = await self.call("GET", path, params=query)
            found += page["data"]
            # A gateway of the previous release sends all entries in one page, without `next`.
            if page.get("next") is None:
                return found
            query = query | {"after": page["next"]}

    async def change_tenants(self, body: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Change all tenants that match the body's filter. dry_run: only list them with their changes."""
        params = {"dry_run": "true"} if dry_run else {}
        return await self.call("POST", "/admin/api/tenants/bulk", json=body, params=params)

    async def tenant(self, name: str) -> dict[str, Any]:
        return await self.call("GET", named_path("/admin/api/tenants", name))

    async def update_tenant(self, name: str, *, force: bool = False, **changes: Any) -> dict[str, Any]:
        return await self.call("PATCH", named_path("/admin/api/tenants", name), json=changes, params=force_query(force))

    async def delete_tenant(self, name: str) -> None:
        await self.call("DELETE", named_path("/admin/api/tenants", name))

    async def create_key(
        self, tenant: str | None, *, as_tenant: bool = False, force: bool = False, **fields: Any
    ) -> dict[str, Any]:
        """Create a key. tenant: None for an operator's key, or with `as_tenant` for the calling tenant's."""
        return await self.call("POST", keys_path(tenant, as_tenant), json=fields, params=force_query(force))

    async def keys(self, tenant: str | None, *, as_tenant: bool = False) -> list[dict[str, Any]]:
        return await self.listed(keys_path(tenant, as_tenant))

    async def rotate_key(self, key_id: str, grace_seconds: int, *, as_tenant: bool = False) -> dict[str, Any]:
        path = named_path(keys_path(None, as_tenant), key_id) + "/rotate"
        return await self.call("POST", path, json={"grace_seconds": grace_seconds})

    async def revoke_key(self, key_id: str, *, as_tenant: bool = False) -> None:
        await self.call("DELETE", named_path(keys_path(None, as_tenant), key_id))

    async def version(self) -> str:
        return (await self.call("GET", "/admin/api/version"))["version"]

    async def queue(self) -> dict[str, Any]:
        return await self.call("GET", "/admin/api/queue")

    async def ready(self) -> dict[str, Any]:
        """Return the state of the gateway's parts. A gateway that is not ready raises no error."""
        return await self.call("GET", "/readyz", expected=503)

    async def engines(self) -> list[dict[str, Any]]:
        return await self.listed("/admin/api/engines")

    async def drain_engine(self, url: str) -> dict[str, Any]:
        return await self.call("POST", "/admin/api/engines/drain", json={"url": url})

    async def resume_engine(self, url: str) -> dict[str, Any]:
        return await self.call("POST", "/admin/api/engines/resume", json={"url": url})

    async def end_quarantine(self, tenant: str) -> dict[str, Any]:
        return await self.call("DELETE", named_path("/admin/api/tenants", tenant) + "/quarantine")

    async def adapters(self, tenant: str | None) -> list[dict[str, Any]]:
        return await self.listed(adapters_path(tenant))

    async def delete_adapter(self, tenant: str | None, reference: Reference, *, force: bool = False) -> None:
        """Delete an adapter's name, or the version that the reference names."""
        path = named_path(adapters_path(tenant), reference.name)
        if reference.version is not None:
            path = version_path(tenant, reference)
        await self.call("DELETE", path, params=force_query(force))

    async def versions(self, tenant: str | None, name: str) -> list[dict[str, Any]]:
        return await self.listed(named_path(adapters_path(tenant), name) + "/versions")

    async def change_version(
        self, tenant: str | None, version: Reference, changes: dict[str, Any], *, force: bool
    ) -> dict[str, Any]:
        return await self.call("PATCH", version_path(tenant, version), json=changes, params=force_query(force))

    async def aliases(self, tenant: str | None, name: str) -> list[dict[str, Any]]:
        return await self.listed(named_path(adapters_path(tenant), name) + "/aliases")

    async def move_alias(
        self, tenant: str | None, alias: Reference, targets: list[dict[str, int]], etag: str | None = None
    ) -> dict[str, Any]:
        """Point an alias to versions. etag: the replaced state's ETag; None takes the present one, if any."""
        is_new = etag is None and all(each["alias"] != alias.alias for each in await self.aliases(tenant, alias.name))
        return await self._put_matching(alias_path(tenant, alias), {"targets": targets}, etag, is_new=is_new)

    async def rollback_alias(self, tenant: str | None, alias: Reference) -> dict[str, Any]:
        return await self.call("POST", alias_path(tenant, alias) + "/rollback")

    async def delete_alias(self, tenant: str | None, alias: Reference) -> None:
        await self.call("DELETE", alias_path(tenant, alias))

    async def mixtures(self, tenant: str | None) -> list[dict[str, Any]]:
        return await self.listed(mixtures_path(tenant))

    async def save_mixture(self, tenant: str | None, name: str, model: str, etag: str | None = None) -> dict[str, Any]:
        """Save a mixture under a name. etag: the replaced mixture's ETag; None takes the present one, if any."""
        is_new = etag is None and all(each["name"] != name for each in await self.mixtures(tenant))
        path = named_path(mixtures_path(tenant), name)
        return await self._put_matching(path, {"model": model}, etag, is_new=is_new)

    async def delete_mixture(self, tenant: str | None, name: str) -> None:
        await self.call("DELETE", named_path(mixtures_path(tenant), name))

    async def _put_matching(self, path: str, body: dict[str, Any], etag: str | None, *, is_new: bool) -> dict[str, Any]:
        """Replace a record of this ETag, with or without its quotes, by default of its present one, or create it.

        is_new: the record does not exist. To ask for it would leave a refused request in the tenant's request log.
        """
        if etag is None:
            etag = None if is_new else (await self.call("GET", path))["etag"]
        elif etag != "*" and not etag.endswith('"'):
            etag = f'"{etag}"'
        headers = {} if etag is None else {"If-Match": etag}
        return await self.call("PUT", path, json=body, headers=headers)

    async def collect_adapters(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Remove content from the store that no tenant's adapter name refers to."""
        done: dict[str, Any] = await self.call(
            "POST", "/admin/api/adapters/collect", params={"dry_run": "true"} if dry_run else {}
        )
        return done

    async def push_adapter(self, tenant: str | None, name: str, path: Path, **base: str) -> dict[str, Any]:
        """Upload a PEFT folder or an archive of one, for `tenant`, or with a tenant's own key if None.

        Raises FileNotFoundError naming the missing file.
        """
        form = aiohttp.FormData({"name": name} | base)
        with ExitStack() as files:
            for field, file in upload_files(path).items():
                form.add_field(field, files.enter_context(file.open("rb")), filename=file.name)
            return await self.call("POST", adapters_path(tenant), data=form, timeout=UPLOAD_TIMEOUT)

    async def import_adapter(self, tenant: str | None, name: str, source: str, **base: str) -> dict[str, Any]:
        """Make the gateway import an adapter from a source that it allows."""
        path = uploads_path(tenant).removesuffix("uploads") + "imports"
        query = {"name": name, "source": source} | base
        return await self.call("POST", path, params=query, timeout=UPLOAD_TIMEOUT)

    async def probe(self, tenant: str | None, version: Reference) -> dict[str, Any]:
        """Return the newest probe of a version."""
        return await self.call("GET", version_path(tenant, version) + "/probe")

    async def verify(self, tenant: str | None, version: Reference, engine: str | None = None) -> dict[str, Any]:
        """Probe a version again. engine: URL of the only engine to ask."""
        return await self.call("POST", version_path(tenant, version) + "/probe", params=engine_query(engine))

    async def golden(self, tenant: str | None, version: Reference) -> dict[str, Any]:
        """Return the golden answers of a version, with their checks."""
        return await self.call("GET", version_path(tenant, version) + "/golden")

    async def set_golden(self, tenant: str | None, version: Reference, prompts: Any) -> dict[str, Any]:
        """Ask prompts and keep the golden answers of a version."""
        path = version_path(tenant, version) + "/golden"
        return await self.call("PUT", path, json={"prompts": prompts}, timeout=UPLOAD_TIMEOUT)

    async def delete_golden(self, tenant: str | None, version: Reference) -> None:
        await self.call("DELETE", version_path(tenant, version) + "/golden")

    async def check_golden(
        self, tenant: str | None, version: Reference, engine: str | None = None
    ) -> list[dict[str, Any]]:
        """Check the golden answers of a version; return the results by engine, none if it has no golden answers."""
        path = version_path(tenant, version) + "/golden"
        try:
            await self.call("GET", path)
        except GatewayError as error:
            if error.status != 404:
                raise
            return []
        return (await self.call("POST", f"{path}/check", params=engine_query(engine), timeout=UPLOAD_TIMEOUT))["checks"]

    async def bases(self) -> list[dict[str, Any]]:
        return await self._all_pages("/admin/api/bases", {})

    async def usage(self, **query: str) -> Any:
        """Return the usage of all tenants or of one. query: tenant, since, until and group_by."""
        return await self._all_usage("/admin/api/usage", query)

    async def own_key(self) -> dict[str, Any]:
        """Return the calling tenant's key with the remaining amounts of its limits."""
        return await self.call("GET", "/v1/key")

    async def own_usage(self, **query: str) -> Any:
        """Return the usage of a tenant's own key. query: since, until and group_by."""
        return await self._all_usage("/v1/usage", query)

    async def _all_usage(self, path: str, query: dict[str, str]) -> Any:
        """Read a report up to its last page; return it as one, with the last page's total."""
        groups: list[Any] = []
        while True:
            page = await self.call("GET", path, params=query)
            groups += page["data"]
            following = page.pop("next", None)
            if following is None:
                return page | {"data": groups}
            query = query | {"after": following}

    async def audit(self, *, as_tenant: bool = False, **query: Any) -> Any:
        """Return a page of the audit log. query: the route's parameters. as_tenant: only the key's own tenant."""
        return await self.call("GET", "/v1/audit" if as_tenant else "/admin/api/audit", params=query)

    async def plans(self) -> list[dict[str, Any]]:
        return await self.listed("/admin/api/plans")

    async def plan(self, name: str) -> dict[str, Any]:
        return await self.call("GET", named_path("/admin/api/plans", name))

    async def set_plan(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Create a plan or replace it. fields: its terms and prices."""
        return await self.call("PUT", named_path("/admin/api/plans", name), json=fields)

    async def delete_plan(self, name: str) -> None:
        await self.call("DELETE", named_path("/admin/api/plans", name))

    async def webhooks(self) -> list[dict[str, Any]]:
        return await self.listed("/admin/api/webhooks")

    async def set_webhook(self, name: str, **fields: Any) -> dict[str, Any]:
        return await self.call("PUT", named_path("/admin/api/webhooks", name), json=fields)

    async def test_webhook(self, name: str) -> dict[str, Any]:
        return await self.call("POST", f"{named_path('/admin/api/webhooks', name)}/test")

    async def delete_webhook(self, name: str) -> None:
        await self.call("DELETE", named_path("/admin/api/webhooks", name))

    async def list_events(self, **query: Any) -> Any:
        """Return a page of events. query: tenant, type, since, until, limit and after."""
        return await self.call("GET", "/admin/api/events", params=query)

    async def prices(self) -> list[dict[str, Any]]:
        return await self.listed("/admin/api/prices")

    async def set_price(self, model: str, *, force: bool = False, **price: Any) -> dict[str, Any]:
        return await self.call("PUT", named_path("/admin/api/prices", model), json=price, params=force_query(force))

    async def delete_price(self, model: str) -> None:
        await self.call("DELETE", named_path("/admin/api/prices", model))


def upload_files(path: Path) -> dict[str, Path]:
    """Return the form fields of an upload: the two files of a PEFT folder, or an archive. Raises FileNotFoundError."""
    if path.is_file():
        return {"file": path}
    if not path.is_dir():
        raise FileNotFoundError(f"no such folder or archive: {path}")
    for file in ADAPTER_FILES:
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path} is not a PEFT adapter folder: it has no {file}")
    return {file: path / file for file in ADAPTER_FILES}


def _refusal(status: int, body: bytes) -> GatewayError:
    try:
        error = json.loads(body)["error"]
        return GatewayError(str(error["message"]), status, error.get("code"))
    except (ValueError, KeyError, TypeError):
        return GatewayError(f"status {status}: {body[:200].decode(errors='replace')}", status)
