"""The engines: which are up, what they hold, how busy we keep them."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
POLL_TIMEOUT = ClientTimeout(total=3.0)
# A refused connection is down at once; an engine busy with a long step may miss a poll or two.
MISSES_UNTIL_DOWN = 3


@dataclass(slots=True, eq=False)
class EngineRecord:
    """One engine as this gateway sees it. resident: digests (no prefix) of the adapters on its device. problem: why it
    gets no requests although it lives, and what to do about it."""

    url: str
    healthy: bool = False
    resident: frozenset[str] = frozenset()
    in_flight: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    misses: int = 0
    problem: str | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one request for as long as it is with this engine."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def mark_down(self, reason: str) -> None:
        if self.healthy:
            log.warning("engine %s is down: %s", self.url, reason)
        self.healthy, self.problem = False, None
        self.resident = frozenset()

    def mark_misconfigured(self, problem: str) -> None:
        if self.problem != problem:
            log.error("engine %s is misconfigured: %s", self.url, problem)
        self.healthy, self.misses, self.problem = False, 0, problem
        self.resident = frozenset()

    def mark_up(self) -> None:
        if not self.healthy:
            log.info("engine %s is up", self.url)
        self.healthy, self.misses, self.problem = True, 0, None


class Registry:
    """A fixed list of engines, polled every second. base_model: the name under which they must serve the base."""

    def __init__(self, urls: Sequence[str], session: ClientSession, internal_token: str, base_model: str) -> None:
        self.engines = tuple(EngineRecord(url) for url in urls)
        self._session = session
        self._base_model = base_model
        self._headers = {"x-loraplex-internal-token": internal_token}

    @property
    def healthy(self) -> list[EngineRecord]:
        return [engine for engine in self.engines if engine.healthy]

    @property
    def problems(self) -> list[str]:
        """What is wrong with engines that live and cannot be used; each once."""
        return sorted({engine.problem for engine in self.engines if engine.problem})

    async def poll(self) -> None:
        """Asks every engine once."""
        await asyncio.gather(*(self._poll(engine) for engine in self.engines))

    async def watch(self) -> None:
        """Polls for ever. Run it as a task."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_SECONDS)

    async def _poll(self, engine: EngineRecord) -> None:
        try:
            async with self._session.get(f"{engine.url}/health", timeout=POLL_TIMEOUT) as response:
                if response.status != 200:
                    engine.mark_down(f"/health answers {response.status}")
                    return
        except TimeoutError:
            engine.misses += 1
            if engine.misses >= MISSES_UNTIL_DOWN:
                engine.mark_down("no answer to /health in time")
            return
        except (ClientError, OSError) as error:
            engine.mark_down(f"{type(error).__name__} at /health")
            return
        try:
            engine.state = await self._state(engine)
        except (ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            # /state waits for a step to end; until it answers again, what we knew is the best we know.
            log.debug("engine %s: %s at /state", engine.url, type(error).__name__)
        else:
            engine.resident = resident_adapters(engine.state)
        serves, wanted = engine.state.get("model", self._base_model), self._base_model
        if serves == wanted:
            engine.mark_up()
        else:
            engine.mark_misconfigured(
                f"engine serves {serves}, not {wanted}; start it with --served-model-name {wanted}"
            )

    async def _state(self, engine: EngineRecord) -> dict[str, Any]:
        """What the engine says of itself; empty for an engine without /state (vLLM), where any place is as good."""
        async with self._session.get(f"{engine.url}/state", headers=self._headers, timeout=POLL_TIMEOUT) as response:
            if response.status == 404:
                return {}
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=dict[str, Any])


def resident_adapters(state: dict[str, Any]) -> frozenset[str]:
    """The digests in an engine's /state, with or without the `sha256:` prefix."""
    adapters = state.get("adapters_resident")
    if not isinstance(adapters, list):
        return frozenset()
    return frozenset(str(digest).removeprefix("sha256:") for digest in adapters)
