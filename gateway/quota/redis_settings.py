"""Check of Redis: a server that evicts keys or does not persist loses the state of limits, and keys of a newer release
cannot be shared.
"""

import asyncio
import logging
from functools import partial
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ResponseError

from gateway.errors import Unavailable
from gateway.quota.fallback import Check
from gateway.quota.store import QuotaStore
from gateway.redis import key_format
from gateway.redis.client import Client

log = logging.getLogger(__name__)

CHECK_SECONDS = 30.0
SETTINGS = ("maxmemory-policy", "appendonly", "save")


class SettingsCheck:
    """Check at the start and every 30 s. state: the result for `/readyz`, which fails unless it begins with "ok"."""

    def __init__(self, redis: Client, store: QuotaStore, mode: Check) -> None:
        self._redis = redis
        self._store = store
        self._mode = mode
        self.state = "ok: not checked" if mode == "off" else "ok: not checked yet"

    async def watch(self) -> None:
        """Check repeatedly until cancelled. Run it as a task."""
        while True:
            try:
                if newer := await self._store.call(partial(key_format.find_problem, self._redis)):
                    self._set(f"refused: {newer}", logging.ERROR)
                elif self._mode != "off":
                    self._tell(await self._store.call(self._problems))
            except Unavailable:
                log.debug("the settings of redis are unknown: it is unreachable")
            await asyncio.sleep(CHECK_SECONDS)

    def _tell(self, problems: list[str] | None) -> None:
        if problems is None:
            self._set("ok: unknown, CONFIG GET is forbidden", logging.WARNING)
        elif not problems:
            self._set("ok", logging.INFO)
        else:
            self._set(("refused: " if self._mode == "refuse" else "ok: ") + "; ".join(problems), logging.WARNING)

    def _set(self, state: str, level: int) -> None:
        if state != self.state:
            self.state = state
            log.log(level, "settings of redis: %s", state)

    async def _problems(self) -> list[str] | None:
        """Return the problems in the settings of all servers, None if a server forbids reading them."""
        found: list[str] = []
        try:
            if isinstance(self._redis, RedisCluster):
                for node in self._redis.get_primaries():
                    found += describe(await self._read(target_nodes=node), f"{node.name}: ")
            else:
                found += describe(await self._read())
        except ResponseError:
            return None
        return found

    async def _read(self, **target: Any) -> dict[str, str]:
        settings: dict[str, str] = {}
        for name in SETTINGS:
            answer = await self._redis.execute_command("CONFIG GET", name, **target)
            if isinstance(answer, list):
                answer = dict(zip(answer[::2], answer[1::2], strict=True))
            settings |= {_text(key): _text(value) for key, value in answer.items()}
        return settings


def describe(settings: dict[str, str], where: str = "") -> list[str]:
    """Return a sentence for each setting that loses data."""
    problems = []
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        problems.append(f"{where}maxmemory-policy is {policy}, expected noeviction: limits and usage may be evicted")
    if settings.get("appendonly", "yes") == "no" and not settings.get("save", "yes").strip():
        problems.append(f"{where}nothing is kept on disk, expected appendonly yes or a save interval")
    return problems


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
