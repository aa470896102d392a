"""`/admin/api/settings`: the effective settings without secrets, and the condition of the gateway."""

import inspect
from typing import Any, Literal

import msgspec
from aiohttp import web
from msgspec import Struct, defstruct

from gateway.api.condition import Condition, Conditions
from gateway.api.requests.fields import json_response
from gateway.api.shown_settings import ShownSetting


class Disk(Struct, frozen=True, kw_only=True):
    """Free and all bytes of a folder's disk."""

    free: int
    bytes: int


class _Settings(Struct, frozen=True, kw_only=True):
    object: Literal["settings"] = "settings"
    settings: list[ShownSetting]


# The settings, then the fields of the condition.
SettingsAnswer: Any = defstruct(
    "SettingsAnswer",
    [
        (field.name, dict[str, Disk] if field.name == "disks" else field.type)
        for field in msgspec.structs.fields(Condition)
    ],
    bases=(_Settings,),
    frozen=True,
    kw_only=True,
    namespace={"__doc__": f"The settings, without secrets. {inspect.getdoc(Condition)}"},
)


class AdminSettings:
    """Route for settings. The answer contains no secret, so the role viewer suffices."""

    def __init__(self, *, shown: list[ShownSetting], conditions: Conditions) -> None:
        self._shown = shown
        self._conditions = conditions

    async def get(self, _: web.Request) -> web.Response:
        condition = await self._conditions.read()
        shown = msgspec.structs.asdict(condition)
        shown["disks"] = {name: Disk(free=free, bytes=total) for name, (free, total) in condition.disks.items()}
        return json_response(SettingsAnswer(settings=self._shown, **shown))
