"""The engine: one base model with many adapters in one batch. A step is schedule, launch, commit, sample.

With async scheduling the host works while the device computes: it plans a step and launches its forward pass before it
reads the tokens of the step before. It reads and commits these while the pass runs, so that sampling knows every
earlier token; requests that ended then are dropped from the in-flight step. The answers are the same. Drafts follow the
newest token, so before and after a step with drafts the tokens are read first.

Independent of HTTP and text; without threads except the adapter loaders'. All methods are called from one thread.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adapters.tiers.host_cache import HostCache
from engine.build import build, kv_bytes_per_token, resolve_dtypes
from engine.config import EngineConfig
from engine.execution.runner import StepTokens, tokens_by_request
from engine.memory import most_prompt_logits
from engine.progress import StartProgress
from engine.scheduling.drafter import Drafter
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.launch_timer import LaunchTimer
from engine.scheduling.outputs import StepOutputs
from engine.scheduling.pacing import Pacer
from engine.scheduling.plan import StepLimits
from engine.scheduling.proposer import PromptLookups
from engine.scheduling.request import NewRequest, Request, Status
from engine.scheduling.scheduler import Scheduler
from engine.state import EngineFacts, EngineState
from engine.step_log import StepLog, StepWork
from kernels.platform import platform_of
from kernels.roofline import measure_roofline
from wire.errors import BadRequest

log = logging.getLogger(__name__)

# Limit of the tenants in /state and of the values of the metrics' label `tenant`.
REPORTED_TENANTS = 20


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step whose tokens the host has not read. launched: its forward pass, kept for steps with drafts only. started:
    perf_counter at the start of its planning. is_short: whether it leaves streams out. is_catching_up: whether its
    drafts took more work than usual. context: tokens of its requests. prompts: requests whose prompt log-probabilities
    it computes.
    """

    sampling: StepTokens
    launched: Any
    started: float
    num_decodes: int
    num_prompt_tokens: int
    is_short: bool
    is_catching_up: bool
    context: int
    prompts: list[Request]


class Engine:
    """An engine, which loads its model on construction. Raises ConfigError for a model or configuration that cannot be
    served.

    host_cache: source of adapters; it outlives the engine and is closed by its owner.
    """

    def __init__(self, config: EngineConfig, host_cache: HostCache, progress: StartProgress | None = None) -> None:
        parts = build(config, host_cache, progress or (lambda *_: None))
        self.config = config
        self.model_config = parts.model
        self.eos_token_ids = self.model_config.eos_token_ids
        self.device = parts.device
        self.max_model_len = parts.limits.max_model_len
        self.max_num_seqs = parts.sizes.max_num_seqs
        self.adapters = parts.adapters
        self.runner = parts.runner
        # On the CPU the step occupies the host's cores, so reading its tokens later would only delay them.
        wanted, speculation = config.async_scheduling, config.speculative_config
        self._async = not platform_of(self.device).is_host if wanted is None else wanted
        self._in_flight: StepInFlight | None = None
        self._last_commit = 0.0
        self._launch_timer = LaunchTimer()
        self._pacer = Pacer(config.prefill_stretch, platform_of(self.device).min_prompt_tokens)
        self.scheduler = Scheduler(
            KVCache(parts.limits.num_blocks, config.block_size, config.enable_prefix_caching),
            self.adapters,
            StepLimits(
                parts.sizes.max_num_seqs,
                parts.sizes.max_num_batched_tokens,
                config.enable_chunked_prefill,
                max_prompt_logits=most_prompt_logits(self.model_config),
            ),
            policy=parts.policy,
            pacer=self._pacer,
        )
        if speculation is not None:
            most_logits = max(parts.sizes.max_num_seqs, most_prompt_logits(self.model_config))
            self.scheduler.drafter = Drafter(
                parts.proposer or PromptLookups(speculation.prompt_lookup_min, speculation.prompt_lookup_max),
                speculation.num_speculative_tokens,
                self.scheduler.cache,
                parts.policy,
                min(most_logits, parts.sizes.max_num_batched_tokens),
            )
        self._dtype, kv_dtype, _ = resolve_dtypes(config, self.model_config)
        kv_bytes = kv_bytes_per_token(self.model_config, kv_dtype)
        self._steps = StepLog(StepWork.of(self.model_config, parts.step_bytes, kv_bytes))
        self._seeds = torch.Generator().manual_seed(config.seed)
        self._arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    def add_request(self, new: NewRequest) -> None:
        """Queue a request. Raises BadRequest that names the parameter, for a request that could never run."""
        if new.request_id in self.scheduler.requests:
            raise BadRequest("request_id", f"request_id: {new.request_id} is already in flight.")
        new.check(self.max_model_len, self.model_config.vocab_size)
        params = new.params
        seed = params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        self._arrivals += 1
        self.scheduler.add(Request(new, arrival_number=self._arrivals, seed=seed, stop_ids=stop_ids))

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            self.config,
            self.max_model_len,
            self.max_num_seqs,
            self.model_config.vocab_size,
            self.eos_token_ids,
            self.adapters.page_bytes,
        )

    def abort(self, request_id: str, *, is_complete: bool = False) -> None:
        """End a request at once, in any state. Its blocks and its adapter's pin are free on return.

        is_complete: whether a stop string ended its text.
        """
        self.scheduler.abort(request_id, is_complete=is_complete)

    def has_work(self) -> bool:
        return bool(self.scheduler.requests) or self._in_flight is not None

    @property
    def is_waiting_for_adapters(self) -> bool:
        """Return whether all work waits for adapters to load, so that the thread may sleep."""
        return not self.scheduler.running and self._in_flight is None and self.adapters.is_loading

    @property
    def spare_seconds(self) -> float:
        """Return the seconds until the next step has to be planned: 0 or less if the device computes no step."""
        step = self._in_flight
        if step is None or step.sampling.is_ready:
            return 0.0
        expected = self._pacer.step_seconds(step.num_decodes, step.num_prompt_tokens)
        begun = max(step.started, self._last_commit)
        # The tokens of a step with drafts are read before the next plan, so an earlier plan would only wait for them.
        delay = expected if step.launched is not None else self._launch_timer.delay(expected)
        return begun + delay - time.perf_counter()

    def step(self) -> StepOutputs:
        """Run a step. Return an output for each request that received a token or ended; with async scheduling, the
        tokens are those of the step before.
        """
        started = time.perf_counter()
        outputs = self._commit() if self._must_read_first() else StepOutputs()
        self.scheduler.policy.forgive_elsewhere(time.monotonic())
        plan = self.scheduler.schedule(may_draft=self._in_flight is None)
        outputs.whole += [request.output([]) for request in self.scheduler.take_failed()]
        launched = self.runner.forward(plan) if plan else None
        if launched is not None and self._in_flight is not None:
            is_late = self._in_flight.sampling.is_ready
            self._launch_timer.observe(time.perf_counter() - started, is_late=is_late)
        outputs.add(self._commit())
        if launched is not None:
            num_decodes, drafter = self.scheduler.num_decodes, self.scheduler.drafter
            num_drafts = 0 if drafter is None else sum(request.num_drafted for request in plan)
            num_prompt_tokens = launched.layout.num_tokens - num_decodes - num_drafts
            self.scheduler.advance(plan)
            sampling = self.runner.sample(launched)
            for request in sampling.requests:
                request.num_pending = 1
            self._in_flight = StepInFlight(
                sampling,
                launched if num_drafts else None,
                started,
                num_decodes,
                num_prompt_tokens,
                self.scheduler.is_short,
                drafter is not None and drafter.is_catching_up,
                launched.layout.context,
                [rows.request for rows in launched.layout.prompt_rows],
            )
            self._num_steps += 1
            self._num_prompt_tokens += num_prompt_tokens
            if not self._async:
                outputs.add(self._commit())
        return outputs

    def _must_read_first(self) -> bool:
        """Return whether the tokens in flight are read before the next plan: those of a step with drafts, whose number
        is unknown, and those that drafts are likely to follow.
        """
        step, drafter = self._in_flight, self.scheduler.drafter
        if step is None or drafter is None:
            return False
        if step.launched is not None:
            return True
        running = [request for request in step.sampling.requests if request.status is Status.RUNNING]
        # Other running requests have prompts in progress, and steps with prompts have no drafts.
        return len(running) == len(self.scheduler.running) and drafter.expects(running)

    def _commit(self) -> StepOutputs:
        """Read the tokens of the in-flight step, if there is one, and append them to its requests."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return StepOutputs()
        num_tokens = self._num_generated_tokens
        outputs = self._accept(step) if step.launched is None else self._accept_drafts(step)
        num_tokens = self._num_generated_tokens - num_tokens
        # A long prompt's log-probabilities are sent after each step: together they would stall step loop and front.
        parts = [each for each in step.prompts if each.prompt_logprobs and each.status is Status.RUNNING]
        outputs.whole += [request.output([]) for request in parts]
        drafter = self.scheduler.drafter
        num_drafts = 0 if drafter is None else drafter.end_step()
        now = time.perf_counter()
        # The step ran from its start, or from the end of the step before it if that was later.
        seconds = now - max(step.started, self._last_commit)
        if not (step.is_short or step.is_catching_up or num_drafts):
            self._pacer.observe(seconds, step.num_decodes, step.num_prompt_tokens)
        if drafter is not None and not step.is_short and not step.num_prompt_tokens:
            drafter.observe(seconds, step.num_decodes, num_drafts, num_tokens, step.is_catching_up)
        decodes = step.num_decodes + num_drafts
        self._steps.add(seconds, decodes=decodes, prompt_tokens=step.num_prompt_tokens, context=step.context)
        self._last_commit = now
        return outputs

    def _accept(self, step: StepInFlight) -> StepOutputs:
        """Commit the tokens of a step without drafts, one of each request, and return the outputs."""
        outputs = StepOutputs.commit(step.sampling.requests, step.sampling.wait(), self.scheduler.commit)
        self._num_generated_tokens += len(outputs)
        return outputs

    def _accept_drafts(self, step: StepInFlight) -> StepOutputs:
        """Commit the tokens of a step with drafts: one of each request, and one more for each accepted draft. Return
        the outputs.

        Tokens are committed one place after the other. A plain request's tokens are all sampled already; each token of
        another request is sampled after the previous one is committed, from the same state as without drafts.
        """
        drafter, number = self.scheduler.drafter, 0
        sampled = tokens_by_request(step.sampling)
        accepted: dict[Request, list[int]] = {}
        left = list(sampled)
        while left:
            unknown = [request for request in left if len(sampled[request]) == number]
            if unknown:
                after = self.runner.sample_after_drafts(step.launched, unknown, number)
                for request, token in zip(after.requests, after.wait(), strict=True):
                    sampled[request].append(token)
            moved = self.scheduler.commit({request: sampled[request][number] for request in left})
            self._num_generated_tokens += len(moved)
            for request in moved:
                new = accepted.setdefault(request, [])
                if (token := sampled[request][number]) >= 0:
                    new.append(token)
            left = [] if drafter is None else drafter.confirm(moved)
            number += 1
        return StepOutputs([request.output(token_ids) for request, token_ids in accepted.items()])

    def measure_roofline(self) -> None:
        """Measure the device, so that the steps' times can be compared with its limits. Call it before the first
        request: a step beside it would make the device look slower.
        """
        if not platform_of(self.device).has_ops:
            return
        try:
            self._steps.roofline = measure_roofline(self.device, self._dtype, self._steps.work.weight_bytes)
        except RuntimeError as error:  # no memory left for the measurement
            log.warning("the device was not measured: %s", error)

    def adapter_ready(self, digest: str) -> bool:
        return self.adapters.is_resident(digest)

    def unload_adapter(self, digest: str) -> bool:
        """Free the adapter's pages. Return False while a request uses them; they are then evicted when their room is
        needed.
        """
        return self.adapters.evict(digest)

    def add_service_elsewhere(self, tenants: Mapping[str, float]) -> int:
        """Add tenants' service at other engines, in cost units. Return the number of those with requests here."""
        return self.scheduler.policy.add_service_elsewhere(tenants, time.monotonic())

    def state(self) -> EngineState:
        scheduler, cache, pool = self.scheduler, self.scheduler.cache, self.adapters
        return EngineState(
            residency_version=pool.residency_version,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=cache.num_blocks,
            num_free_blocks=cache.num_free,
            resident_adapters=tuple(pool.resident),
            num_adapter_pages=pool.num_pages,
            num_free_adapter_pages=pool.num_free_pages,
            num_adapter_loads=pool.num_loads,
            num_adapter_evictions=pool.num_evictions,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            prefix_hit_tokens=cache.hit_tokens,
            prefix_query_tokens=cache.query_tokens,
            num_met=scheduler.targets.num_met,
            num_missed=scheduler.targets.num_missed,
            tenants=scheduler.tenants(REPORTED_TENANTS),
            preempted=scheduler.preempted.largest(REPORTED_TENANTS),
            tiers=pool.tier_state(),
            recent_steps=self._steps.recent(),
            drafts=() if scheduler.drafter is None else scheduler.drafter.counts(),
            draft_steps={} if scheduler.drafter is None else scheduler.drafter.outcomes(),
        )

    def close(self) -> None:
        self.adapters.close()
