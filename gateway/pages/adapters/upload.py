"""Form that uploads an adapter, with its progress. The upload is that of `POST /v1/adapters`."""

from collections.abc import Sequence

from aiohttp import web

from gateway.access.auth import Authenticator
from gateway.api.adapters.handlers import AdapterIntake
from gateway.api.uploads.checking import EngineLimits
from gateway.errors import BadRequest, Forbidden
from gateway.pages.adapters.subject import PageAdapter, find_adapter
from gateway.pages.frame.frame import Frame
from gateway.quota.quota import Quota
from gateway.records.tenants.tenants import Tenants

QUERY = ("name",)
MAX_NAME = 64


class AdapterUploads:
    """Pages of uploads."""

    def __init__(
        self, *, frame: Frame, tenants: Tenants, auth: Authenticator, quota: Quota, intake: AdapterIntake
    ) -> None:
        self._frame = frame
        self._tenants = tenants
        self._auth = auth
        self._quota = quota
        self._intake = intake

    async def form(self, request: web.Request) -> web.Response:
        adapter = await find_adapter(request, self._tenants)
        if not adapter.may_change:
            raise Forbidden("Only an operator may upload adapters here.", code="role_needed")
        name = request.query.get("name", "")[:MAX_NAME]
        return self._frame.render(
            request,
            "adapter_upload.html",
            title="Upload a version" if name else "Upload an adapter",
            adapter=adapter,
            name=name,
            max_bytes=self._intake.max_bytes,
            limits=self._limits(adapter),
        )

    def _limits(self, adapter: PageAdapter) -> Sequence[tuple[str, EngineLimits]]:
        """Return the engines' limits by base model; none while no base model takes adapters."""
        try:
            return self._intake.limits(adapter.caller)
        except BadRequest:
            return ()

    async def upload(self, request: web.Request) -> web.Response:
        """Take the form of the page's script, and answer in JSON."""
        adapter = await find_adapter(request, self._tenants)
        if not adapter.may_change:
            raise Forbidden("Only an operator may upload adapters here.", code="role_needed")
        size, most = request.content_length, self._intake.max_bytes
        async with adapter.caller.uploading(request, self._auth, self._quota, size=size, most=most) as received:
            return await self._intake.push(request, adapter.caller, received)
