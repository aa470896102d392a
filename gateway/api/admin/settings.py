"""`/admin/api/settings`: the effective settings without secrets, and the condition of the gateway."""

from typing import Any

import msgspec
from aiohttp import web

from gateway.api.condition import Condition, Conditions
from gateway.api.requests.fields import json_response
from gateway.api.shown_settings import ShownSetting


class AdminSettings:
    """Route for settings. The answer contains no secret, so the role viewer suffices."""

    def __init__(self, *, shown: list[ShownSetting], conditions: Conditions) -> None:
        self._shown = shown
        self._conditions = conditions

    async def get(self, _: web.Request) -> web.Response:
        return json_response(
            {"object": "settings", "settings": self._shown, **_condition_as_json(await self._conditions.read())}
        )


def _condition_as_json(condition: Condition) -> dict[str, Any]:
    shown = msgspec.structs.asdict(condition)
    shown["disks"] = {name: {"free": free, "bytes": total} for name, (free, total) in condition.disks.items()}
    return shown
