"""Check of the Redis server. It must not evict keys and must persist them, else limits lose their state; it must allow
`INFO`, else such a loss is not noticed; it must not hold keys of a newer release.
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
CONFIG_FORBIDDEN = "unknown, CONFIG GET is forbidden"
# `quota.lua` compares the run id.
NO_RUN_ID = "INFO is forbidden or has no run_id: a server that returns with older limits and usage is not noticed"


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
                    self._tell(*await self._store.call(self._problems))
            except Unavailable:
                log.debug("the settings of redis are unknown: it is unreachable")
            await asyncio.sleep(CHECK_SECONDS)

    def _tell(self, problems: list[str], is_known: bool) -> None:
        unknown = [] if is_known else [CONFIG_FORBIDDEN]
        if problems and self._mode == "refuse":
            self._set(f"refused: {'; '.join(problems + unknown)}", logging.WARNING)
        elif problems or unknown:
            self._set(f"ok: {'; '.join(problems + unknown)}", logging.WARNING)
        else:
            self._set("ok", logging.INFO)

    def _set(self, state: str, level: int) -> None:
        if state != self.state:
            self.state = state
            log.log(level, "settings of redis: %s", state)

    async def _problems(self) -> tuple[list[str], bool]:
        """Return the problems of all servers, and whether each allows reading its settings."""
        nodes = self._redis.get_primaries() if isinstance(self._redis, RedisCluster) else [None]
        found, is_known = [], True
        for node in nodes:
            where, target = ("", {}) if node is None else (f"{node.name}: ", {"target_nodes": node})
            try:
                found += describe(await self._read(**target), where)
            except ResponseError:
                is_known = False
            if not await self._tells_run_id(**target):
                found.append(where + NO_RUN_ID)
        return found, is_known

    async def _tells_run_id(self, **target: Any) -> bool:
        try:
            return "run_id" in await self._redis.execute_command("INFO", "server", **target)
        except ResponseError:
            return False

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
