"""The engine's state: returned on request, or pushed to followers.

A follower receives a line when it connects, after each change of residency, load or draining, and every second without
a change; a longer silence means a fault.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version

import msgspec

from engine.answering.model_names import ModelRegistry
from engine.answering.usage_log import UsageLog
from engine.core.client import CoreClient
from engine.errors import EngineUnavailable
from engine.state import EngineState
from wire.responses import EngineStateResponse, Preempted, StepSecond, TenantFairShare

# Minimum interval between pushed changes, and maximum interval between lines. A reading waits for the step to end; if
# it takes longer than a heartbeat, the last reading is sent again. Beyond USUAL_FOLLOWERS, changes are pushed less
# often, because each line costs the engine and every gateway time.
SPACING_S = 0.05
USUAL_FOLLOWERS = 16
MAX_SPACING_S = 0.5
HEARTBEAT_S = 1.0


class StateFeed:
    """Readings of one engine's state. Call every method on the event loop."""

    def __init__(
        self,
        core: CoreClient,
        models: ModelRegistry,
        usage_log: UsageLog,
        base_digest: str | None = None,
    ) -> None:
        self._core = core
        self._models = models
        self._usage_log = usage_log
        self.base_digest = base_digest
        self._instance = uuid.uuid4().hex
        self._revision = 0
        self._readings = 0
        self._residency_version = 0
        self._host_version = -1
        self._host: list[str] = []
        # Values at the last increment of `_revision`.
        self._numbered: tuple[object, ...] = ()
        self._last: EngineStateResponse | None = None
        self._line = b""
        # `_moved` wakes the pump to read the state; `_news` wakes the followers to send the new line.
        self._moved = asyncio.Event()
        self._news = asyncio.Event()
        self._followers = 0
        self._draining = False
        self._closed = False
        self._pump = asyncio.create_task(self._push())

    async def read(self) -> EngineStateResponse:
        """Return the state between two steps. Raises EngineUnavailable."""
        reading = await self._core.state(self._host_version)
        if reading.host is not None:
            self._host_version, self._host = reading.host_version, reading.host
        return self._take(self._response(reading.state))

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Yield lines of JSON, each an EngineStateResponse, until the engine stops. A slow follower skips lines that
        newer ones replaced. Raises EngineUnavailable.
        """
        await self.read()
        self._followers += 1
        sent: list[str] | None = None
        try:
            closed = False
            while not closed:
                news, closed, before, sent = self._news, self._closed, sent, self._host
                yield self._line if sent is before else msgspec.json.encode(self._last) + b"\n"
                if not closed:
                    await news.wait()
        finally:
            self._followers -= 1

    def stepped(self) -> None:
        """Report that a step has ended."""
        if self._followers:
            self._moved.set()

    def moved(self) -> None:
        """Report a change made outside a step."""
        self._moved.set()

    def drain(self) -> None:
        """Push `draining` at once, without waiting for a step."""
        self._draining = True
        if self._last is not None:
            self._take(msgspec.structs.replace(self._last, draining=True))
            self._announce()

    async def close(self) -> None:
        """End the followers' streams."""
        self._closed = True
        self._moved.set()
        await self._pump

    async def _push(self) -> None:
        sent_at, revision = 0.0, 0
        while not self._closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._moved.wait()
            self._moved.clear()
            if not self._followers:
                continue
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self.read()
            except EngineUnavailable:
                # The engine has failed or is closed; /health reports which.
                self._closed = True
            if revision != self._revision or time.monotonic() - sent_at >= HEARTBEAT_S:
                sent_at, revision = time.monotonic(), self._revision
                self._announce()
            await asyncio.sleep(spacing(self._followers))
        self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _take(self, state: EngineStateResponse) -> EngineStateResponse:
        """Number a reading and keep it as the latest."""
        values = (self._residency_version, self._host_version, state.running, state.waiting, state.draining)
        if values != self._numbered:
            self._numbered = values
            self._revision += 1
        self._readings += 1
        state.revision, state.readings = self._revision, self._readings
        self._last = state
        self._line = msgspec.json.encode(msgspec.structs.replace(state, adapters_host=msgspec.UNSET)) + b"\n"
        return state

    def _response(self, state: EngineState) -> EngineStateResponse:
        facts = self._core.facts
        self._residency_version = state.residency_version
        return EngineStateResponse(
            instance=self._instance,
            draining=self._draining,
            revision=self._revision,
            readings=self._readings,
            model=self._models.base_name,
            base_digest=self.base_digest,
            version=version("loraplex"),
            max_model_len=facts.max_model_len,
            max_num_seqs=facts.max_num_seqs,
            max_lora_rank=facts.config.max_lora_rank,
            max_adapter_bytes=state.tiers.host.max_bytes,
            running=state.num_running,
            waiting=state.num_waiting,
            kv_blocks_total=state.num_blocks,
            kv_blocks_free=state.num_free_blocks,
            adapters_resident=list(state.resident_adapters),
            adapters_activated=[digest for digest in state.resident_adapters if self._models.is_activated(digest)],
            adapters_host=self._host,
            adapter_pages_total=state.num_adapter_pages,
            adapter_pages_free=state.num_free_adapter_pages,
            adapter_loads=state.num_adapter_loads,
            adapter_load_seconds=self._models.load_seconds,
            adapter_evictions=state.num_adapter_evictions,
            preemptions=state.num_preemptions,
            steps=state.num_steps,
            prompt_tokens=state.num_prompt_tokens,
            generated_tokens=state.num_generated_tokens,
            prefix_hit_tokens=state.prefix_hit_tokens,
            prefix_query_tokens=state.prefix_query_tokens,
            ended_requests=self._usage_log.num_ended,
            ended_prompt_tokens=self._usage_log.prompt_tokens,
            ended_completion_tokens=self._usage_log.completion_tokens,
            tenants=[
                TenantFairShare(
                    t.tenant_id, t.weight, t.counter, t.running, t.waiting, t.oldest_wait, t.share, t.entitled
                )
                for t in state.tenants
            ],
            preempted=[Preempted(*count) for count in state.preempted],
            recent_steps=[StepSecond(**asdict(each)) for each in state.recent_steps],
        )


def spacing(followers: int) -> float:
    """Return the minimum number of seconds between two pushed changes."""
    return min(SPACING_S * max(1.0, followers / USUAL_FOLLOWERS), MAX_SPACING_S)
