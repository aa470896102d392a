"""`/admin/api/settings`: the effective settings without secrets, and the status of the gateway."""

import inspect
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import Struct, defstruct

from gateway.api.deployment_status import DeploymentStatus, StatusReader
from gateway.api.requests.fields import json_response
from gateway.api.shown_settings import ShownSetting


class Disk(Struct, frozen=True, kw_only=True):
    """Free and all bytes of a folder's disk."""

    free: int
    bytes: int


class _Settings(Struct, frozen=True, kw_only=True):
    object: Literal["settings"] = "settings"
    settings: list[ShownSetting]


# The settings, then the fields of the status.
SettingsAnswer: Any = defstruct(
    "SettingsAnswer",
    [
        (field.name, dict[str, Disk] if field.name == "disks" else field.type)
        for field in msgspec.structs.fields(DeploymentStatus)
    ],
    bases=(_Settings,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": f"The settings, without secrets. {inspect.getdoc(DeploymentStatus)}"},
)


class AdminSettings:
    """Route for settings. The answer contains no secret, so the role viewer suffices."""

    def __init__(self, *, shown: list[ShownSetting], status_reader: StatusReader) -> None:
        self._shown = shown
        self._status_reader = status_reader

    async def get(self, _: web.Request) -> web.Response:
        status = await self._status_reader.read()
        shown = msgspec.structs.asdict(status)
        shown["disks"] = {name: Disk(free=free, bytes=total) for name, (free, total) in status.disks.items()}
        return json_response(SettingsAnswer(settings=self._shown, **shown))
