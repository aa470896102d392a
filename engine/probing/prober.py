"""Probe of an adapter: fixed prompts with and without it, as ordinary requests of the adapter's tenant.

The rows join the step loop as two requests of a few tokens at a time, so running streams are delayed as by any short
prompt. The scheduler counts its service for the tenant, and the device pool evicts by its usual rules. Probes take
turns. A probe pauses after each of its jobs (`answering/duty_cycle.py`), which are the load and each pass over a
prompt, so the delay of requests stays small, however many probes there are. A job that takes longer than TURN_S does
not compute but waits: a heavy tenant's load rests, or a pass is behind the tenant's own requests. The next probe then
has the turn until the job has ended. Independent of HTTP.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

import numpy as np

from engine.answering.activation import adapter_start
from engine.answering.duty_cycle import DutyCycle
from engine.answering.in_flight import InFlight
from engine.answering.model_names import ModelRegistry, Served
from engine.core.messages import Inspection
from engine.errors import EngineUnavailable, QueueFull, TenantQueueFull
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams
from engine.state import EngineFacts
from wire.deadlines import MAX_PRIORITY
from wire.digests import digest_name
from wire.probes import AdapterProbe, ProbeReason

# Prompts of a probe, and tokens of each. The ids are spread over the vocabulary. A prompt is short because running
# streams wait for the step that computes it, with and without the adapter.
NUM_PROMPTS, PROMPT_TOKENS = 3, 4
_STRIDE = 0.6180339887
# Limit of one tenant's running and waiting probes, and the time limit of a probe from its first turn.
MAX_OF_TENANT = 8
PROBE_S = 60.0
# Time of a job after which its probe leaves the turn to the next one.
TURN_S = 5.0
# Maximum share of the time that the jobs of probes use while requests run.
SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of two rows of logits, see `AdapterProbe`; largest is 0.0 for equal rows, None if not finite."""

    largest: float | None
    divergence: float | None


class _Turn:
    """The turn of a probe, from its entry to its exit. While a job takes longer than TURN_S, others have the turn.

    entry, lock: common to all turns. New probes wait for the lock one at a time, the others for the entry, so a probe
    that returns to its turn waits for the present one and one new one at most, besides others that return.
    """

    def __init__(self, tenant_id: str, entry: asyncio.Lock, lock: asyncio.Lock, duty_cycle: DutyCycle) -> None:
        self.tenant_id = tenant_id
        self._entry, self._lock, self._duty_cycle = entry, lock, duty_cycle
        self._is_held = False

    async def __aenter__(self) -> Self:
        async with self._entry:
            await self.take()
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._leave()

    @asynccontextmanager
    async def job(self) -> AsyncIterator[None]:
        """Wait for the end of the pause, and for the turn if it was left, then run the job in the block."""
        await self.take()
        await self._duty_cycle.wait()
        limit = asyncio.get_running_loop().call_later(TURN_S, self._leave)
        try:
            with self._duty_cycle.measure():
                yield
        finally:
            limit.cancel()

    async def take(self) -> None:
        """Wait for the turn if it was left."""
        if not self._is_held:
            await self._lock.acquire()
            self._is_held = True

    def _leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._lock.release()


class Prober:
    """Prober of one engine. base_digest: digest of the base model's weights. Call every method on the event loop."""

    def __init__(self, facts: EngineFacts, in_flight: InFlight, models: ModelRegistry, base_digest: str | None) -> None:
        self._facts = facts
        self._in_flight = in_flight
        self._models = models
        self._base_digest = base_digest
        self._prompts = fixed_prompts(facts.vocab_size)
        # A tenant holds its lock while it waits for the turn, so each tenant has at most one place in the queue.
        self._entry, self._turn = asyncio.Lock(), asyncio.Lock()
        self._duty_cycle = DutyCycle(SHARE, in_flight.wait_idle)
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def probe(self, digest: str, tenant_id: str) -> AdapterProbe:
        """Probe an adapter of the store. digest: without the prefix `sha256:`.

        Raises ModelNotFound, ApiError if it cannot be loaded, QueueFull or TenantQueueFull if there is no room for a
        probe now, EngineUnavailable.
        """
        async with self._turn_of(tenant_id) as turn:
            try:
                async with asyncio.timeout(PROBE_S):
                    return await self._probe(digest, turn)
            except TimeoutError:
                raise QueueFull(f"The probe took longer than {PROBE_S:g} s.", retry_after=5) from None

    @asynccontextmanager
    async def _turn_of(self, tenant_id: str) -> AsyncIterator[_Turn]:
        if self._waiting[tenant_id] >= MAX_OF_TENANT:
            raise TenantQueueFull(f"{MAX_OF_TENANT} of your adapters are being probed here already.", retry_after=1)
        self._waiting[tenant_id] += 1
        try:
            turn = _Turn(tenant_id, self._entry, self._turn, self._duty_cycle)
            async with self._locks.setdefault(tenant_id, asyncio.Lock()), turn:
                yield turn
        finally:
            self._waiting[tenant_id] -= 1
            if not self._waiting[tenant_id]:
                del self._waiting[tenant_id], self._locks[tenant_id]

    async def _probe(self, digest: str, turn: _Turn) -> AdapterProbe:
        async with AsyncExitStack() as stack:
            async with turn.job():
                served = await stack.enter_async_context(self._models.using(digest_name(digest), turn.tenant_id))
                inspected = await self._models.inspect(digest, turn.tenant_id)
            if not inspected.has_effect:
                text = (
                    "its weights change nothing: in every module lora_A, lora_B or the scale is zero, as in an adapter "
                    "that has not been trained"
                )
                return self._result(inspected, [ProbeReason(text, code="adapter_without_effect")], [])
            prompts = [[*prompt, *served.invocation] for prompt in (*self._prompts, *inspected.trained_tokens)]
            await turn.take()  # a probe that only waits takes no places
            with self._in_flight.place(2, turn.tenant_id):
                # Loads the adapter onto the device, so that the two rows of each later pair share one step.
                [first] = await self._logits(prompts[:1], [served], turn)
                found: list[Difference] = []
                reasons = [] if np.isfinite(first).all() else [_not_finite(0, len(prompts))]
                for number, prompt in enumerate(prompts if not reasons else ()):
                    plain, changed = await self._logits([prompt] * 2, [Served(None), served], turn)
                    if not np.isfinite(plain).all():
                        raise EngineUnavailable("The base model's scores are not finite.")
                    found.append(await asyncio.to_thread(compare, plain, changed))
                    if found[-1].largest is None:
                        reasons.append(_not_finite(number, len(prompts)))
        if found and all(each.largest == 0 for each in found):
            text = "with it the model computes the same scores as without it, to the last bit"
            reasons.append(ProbeReason(text, code="adapter_without_effect"))
        return self._result(inspected, reasons, found)

    async def _logits(self, prompts: Sequence[list[int]], models: Sequence[Served], turn: _Turn) -> list[np.ndarray]:
        """Return the next token's logits `[vocab]` fp32 of each prompt with its model."""
        run_id = uuid.uuid4().hex
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, keep_logits=True)
        sequences = [
            NewRequest(
                f"probe-{run_id}-{number}",
                prompt,
                params,
                adapter_digest=served.digest,
                tenant_id=turn.tenant_id,
                priority=MAX_PRIORITY,
                cache_salt=run_id,
                adapter_start=adapter_start(prompt, served.invocation),
            )
            for number, (prompt, served) in enumerate(zip(prompts, models, strict=True))
        ]
        found: dict[int, RequestOutput] = {}
        async with turn.job():
            with self._in_flight.submit(sequences) as group:
                while len(found) < len(sequences):
                    news = await group.news()
                    found |= {index: output for index, output in news if output.finish_reason is not None}
        rows = [found[index].logits for index in range(len(sequences))]
        for index, row in enumerate(rows):
            if row is None:
                raise QueueFull(found[index].error or "The engine dropped the probe.", retry_after=1)
        return [np.frombuffer(row, np.float32) for row in rows if row is not None]

    def _result(self, inspected: Inspection, reasons: list[ProbeReason], differences: list[Difference]) -> AdapterProbe:
        adapter = inspected.adapter
        largest = [each.largest for each in differences if each.largest is not None]
        divergence = [each.divergence for each in differences if each.divergence is not None]
        return AdapterProbe(
            digest=digest_name(adapter.digest),
            reasons=tuple(reasons),
            rank=adapter.rank,
            num_modules=inspected.num_modules,
            host_bytes=adapter.num_bytes,
            device_bytes=adapter.num_pages * self._facts.page_bytes + inspected.embedding_head_bytes,
            device_pages=adapter.num_pages,
            largest_difference=max(largest) if largest and len(largest) == len(differences) else None,
            divergence=max(divergence) if divergence and len(divergence) == len(differences) else None,
            base_digest=self._base_digest,
            engine_version=version("loraplex"),
        )


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """Return the prompts' token ids, the same for every engine of a vocabulary."""
    ids = [int((i + 1) * _STRIDE % 1 * vocab_size) for i in range(NUM_PROMPTS * PROMPT_TOKENS)]
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, len(ids), PROMPT_TOKENS)]


def compare(plain: np.ndarray, changed: np.ndarray) -> Difference:
    """Compare two rows of logits `[vocab]`. plain: finite."""
    if not np.isfinite(changed).all():
        return Difference(None, None)
    plain, changed = plain.astype(np.float64), changed.astype(np.float64)
    before, after = _log_softmax(plain), _log_softmax(changed)
    divergence = float((np.exp(before) * (before - after)).sum())
    return Difference(float(np.abs(plain - changed).max()), max(0.0, divergence))


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


def _not_finite(number: int, total: int) -> ProbeReason:
    text = f"its weights are too large: they give NaN or infinity for prompt {number + 1} of {total} of the probe"
    return ProbeReason(text, code="adapter_not_finite")
