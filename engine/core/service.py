"""The core's side of the messages: an engine with its adapters in host memory and its compiled grammars.

`receive` runs on an event loop, which may be the front's own (`InThread`) or that of a process (`engine.core.process`).
Loads and compilations run on threads of their own, steps on the engine's thread, so no command waits for a step unless
it touches the engine.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adapters.fair_threads import TooManyPending, Yielding
from adapters.manifest import BaseShape
from adapters.open_store import open_store
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.device_size import device_size
from adapters.tiers.host_cache import YIELDING, HostCache
from adapters.tiers.state import LoadResult
from engine.build import resolve_device, resolve_dtype
from engine.core import messages
from engine.core.grammars import Grammars
from engine.core.inspecting import has_effect, trained_tokens
from engine.core.messages import AdapterFacts, Inspection, Question, StateReading, TokenRules
from engine.core.prefetching import PinnedAdapters, Prefetching
from engine.core.step_thread import StepThread
from engine.engine import Engine
from engine.errors import Fault, QueueFull, TenantQueueFull
from engine.model.config import read_config
from engine.model.families import parse_model_config
from engine.model.weights import base_tensor
from engine.scheduling.request import NewRequest
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from engine.state import EngineFacts
from engine.structured.compiler import GrammarCompiler
from kernels.platform import platform_of
from wire.errors import ConfigError
from wire.mixtures import Mixture

# Adapters in host memory that a state lists.
REPORTED_ON_HOST = 512
# If steps run on the CPU, a heavy tenant's loads take at most a fifth of a core. At full speed they doubled a
# neighbour's time to first token (docs/lab-notes.md).
HOST_YIELDING = Yielding(rest=4.0)
# Maximum tokens of banned words compiled on the event loop; a thousand words take about 2 ms.
QUICK_RULES = 256


class CoreService:
    """An engine's core. Call `receive` on the event loop of the constructor.

    send: called with each frame for the front, on any thread, one at a time and in the order of the events. loaded:
    called once the model is loaded and grammars can be compiled.
    """

    engine: Engine
    host_cache: HostCache

    def __init__(self, send: Callable[[bytes], None], loaded: Callable[[], None] = lambda: None) -> None:
        self._send_frame, self._loaded = send, loaded
        self._event_loop = asyncio.get_running_loop()
        self._sending = threading.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Sequences whose rules are being compiled: id -> (the request's sequences that are not aborted, their task).
        self._preparing: dict[str, tuple[dict[str, NewRequest], asyncio.Task[None]]] = {}
        # Closes the objects that `_load` creates, in reverse order.
        self._open = AsyncExitStack()

    def receive(self, frame: bytes | memoryview) -> None:
        """Carry out a frame of commands."""
        for command in messages.decode_commands(frame):
            match command:
                case messages.Add():
                    self._add(command)
                case messages.Abort(request_id, is_complete):
                    self._abort(request_id, is_complete)
                case messages.Ask(call, question):
                    task = self._event_loop.create_task(self._reply(call, question))
                    self._tasks[call] = task
                case messages.Cancel(call):
                    if (found := self._tasks.pop(call, None)) is not None:
                        found.cancel()
                case messages.AddMixture(parts):
                    self.host_cache.add_mixture(Mixture(parts))
                case messages.RemoveMixture(digest):
                    self.host_cache.remove_mixture(digest)

    def send(self, event: messages.Event) -> None:
        """Send an event. Callable on any thread."""
        frame = messages.encode(event)
        with self._sending:
            self._send_frame(frame)

    def _sent_by_steps(self, event: messages.Event) -> None:
        self.send(event)
        if isinstance(event, messages.Failed):
            self._event_loop.call_soon_threadsafe(self._steps.fail_calls, event.reason)

    # Sequences.

    def _add(self, add: messages.Add) -> None:
        new_requests = add.new_requests()
        if not add.rules:
            for new in new_requests:
                self._steps.add(new)
            return
        left = {new.request_id: new for new in new_requests}
        task = self._event_loop.create_task(self._add_with_rules(left, add.rules))
        for new in new_requests:
            self._preparing[new.request_id] = left, task

    async def _add_with_rules(self, left: dict[str, NewRequest], rules: TokenRules) -> None:
        """Compile a request's rules and queue those of its sequences that were not aborted by then."""
        try:
            compiled = await self._compile(rules, next(iter(left.values())).tenant_id)
        except Exception as error:  # noqa: BLE001 - sent to the front
            for request_id in left:
                self.send(messages.Refused(request_id, Fault.of(error)))
        else:
            for new in left.values():
                self._steps.add(replace(new, params=replace(new.params, **compiled)))
        finally:
            for request_id in left:
                del self._preparing[request_id]

    async def _compile(self, rules: TokenRules, tenant_id: str) -> dict[str, Any]:
        """Return the fields of SamplingParams."""
        allowed = AllowedTokens(np.frombuffer(rules.allowed, np.int32)) if rules.allowed else None
        banned = None
        if rules.banned:
            is_quick = sum(map(len, rules.banned)) <= QUICK_RULES
            banned = BannedWords(rules.banned) if is_quick else await asyncio.to_thread(BannedWords, rules.banned)
        grammar = None if rules.grammar is None else await self._grammars.get(rules.grammar, tenant_id)
        return {"grammar": grammar, "allowed": allowed, "bad_words": banned, "logit_bias": rules.bias}

    def _abort(self, request_id: str, is_complete: bool) -> None:
        if request_id not in self._preparing:
            self._steps.abort(request_id, is_complete=is_complete)
            return
        left, task = self._preparing.pop(request_id)
        del left[request_id]
        if not left:
            task.cancel()
        self.send(messages.Released(request_id))

    # Questions.

    async def _reply(self, call: int, question: Question) -> None:
        try:
            answer = messages.Reply(call, msgspec.Raw(messages.encode(await self._work_on(question))))
        except Exception as error:  # noqa: BLE001 - sent to the front
            answer = messages.Reply(call, msgspec.Raw(b"\xc0"), Fault.of(error))
        self._tasks.pop(call, None)
        self.send(answer)

    def _work_on(self, question: Question) -> Coroutine[Any, Any, Any]:
        match question:
            case messages.LoadModel():
                return self._load(question)
            case messages.PrepareGrammars(tokenizer):
                return self._prepare_grammars(tokenizer)
            case messages.ReadState(host_version):
                return self._read_state(host_version)
            case messages.MeasureRoofline():
                return self._steps.call(self.engine.measure_roofline)
            case messages.LoadAdapter():
                return self._load_adapter(question)
            case messages.InspectAdapter(digest, tenant_id):
                return self._inspect(digest, tenant_id)
            case messages.RegisterFolder(path):
                return _result(asyncio.wrap_future(self.host_cache.register(path)))
            case messages.ForgetAdapter(digest):
                self.host_cache.drop(digest)
                return self._steps.call(partial(self.engine.unload_adapter, digest))
            case messages.Prefetch(digest, tenant_id):
                return self._prefetching.load(digest, tenant_id)
            case messages.PinAdapters(digests):
                return self._pinned.pin(digests)
            case messages.ChargeElsewhere(tenants):
                return self._steps.call(partial(self.engine.add_service_elsewhere, tenants))
            case messages.Close():
                return self._close()

    async def _load(self, load: messages.LoadModel) -> EngineFacts:
        self.host_cache = await asyncio.to_thread(self._make_host_cache, load)
        self._open.push_async_callback(asyncio.to_thread, self.host_cache.close)
        self.engine = await asyncio.to_thread(self._make_engine, load)
        self._open.push_async_callback(asyncio.to_thread, self.engine.close)
        self._steps = StepThread(self.engine, self._sent_by_steps)
        self._steps.start()
        self._open.push_async_callback(self._steps.close)
        self._prefetching, self._pinned = Prefetching(self.host_cache), PinnedAdapters(self.host_cache)
        return self.engine.facts

    async def _prepare_grammars(self, tokenizer: str) -> None:
        facts = self.engine.facts
        compiler = GrammarCompiler(lambda: tokenizer, facts.vocab_size, facts.eos_token_ids)
        await asyncio.to_thread(compiler.prepare)
        self._grammars = Grammars(compiler)
        self._open.callback(self._grammars.close)
        self._loaded()

    def _make_engine(self, load: messages.LoadModel) -> Engine:
        return Engine(load.config, self.host_cache, lambda *progress: self.send(messages.Loading(*progress)))

    def _make_host_cache(self, load: messages.LoadModel) -> HostCache:
        config, path = load.config, Path(load.config.model)
        raw_config = read_config(path)
        model = parse_model_config(raw_config)
        dtype = resolve_dtype(config, model)
        try:
            shape = BaseShape.from_config(raw_config)
        except ValueError as error:
            raise ConfigError("model", str(error)) from error
        store = load.adapter_store
        return HostCache(
            None if store is None else open_store(store, Path(load.adapter_cache), load.adapter_cache_bytes),
            shape,
            config.host_adapter_memory,
            dtype,
            base_tensor=partial(base_tensor, path, model, dtype),
            ended=self._load_ended,
            yielding=HOST_YIELDING if platform_of(resolve_device(config)).is_host else YIELDING,
        )

    def _load_ended(self, result: LoadResult, seconds: float) -> None:
        self.send(messages.AdapterLoaded(result, seconds))

    async def _read_state(self, host_version: int) -> StateReading:
        state = await self._steps.state()
        version = self.host_cache.version
        held = None if version == host_version else self.host_cache.held(REPORTED_ON_HOST)
        return StateReading(state, version, held)

    async def _load_adapter(self, asked: messages.LoadAdapter) -> AdapterFacts | None:
        held = self.host_cache.get(asked.digest)
        if held is not None:
            return _facts(held, is_new=False)
        if asked.may_be_on_device:
            is_on_device = partial(self.engine.adapter_ready, asked.digest)
            if await self._steps.call(is_on_device):
                return None
        return _facts(await self._fetch(asked.digest, asked.tenant_id, asked.weight), is_new=True)

    async def _fetch(self, digest: str, tenant_id: str, weight: float | None = None) -> HostAdapter:
        """Wait for a load. A load that has not begun is dropped when the last request that waits for it ends."""
        try:
            load = self.host_cache.fetch(digest, tenant_id, weight)
        except TooManyPending as exc:
            kind = TenantQueueFull if exc.is_tenants else QueueFull
            raise kind(f"Adapters to load: {exc}.", retry_after=exc.retry_after) from None
        try:
            # Shielded, because other requests may wait for the same load.
            return await asyncio.shield(asyncio.wrap_future(load))
        finally:
            self.host_cache.stop_waiting(digest, tenant_id, load)

    async def _inspect(self, digest: str, tenant_id: str) -> Inspection:
        adapter = await self._fetch(digest, tenant_id)
        found, tokens = await asyncio.to_thread(lambda: (has_effect(adapter), trained_tokens(adapter)))
        embedding_head_bytes = device_size(adapter).embedding_head_bytes
        return Inspection(_facts(adapter, is_new=False), len(adapter.modules), embedding_head_bytes, found, tokens)

    async def _close(self) -> None:
        for _, task in list(self._preparing.values()):
            task.cancel()
        await self._open.aclose()


async def _result(future: "asyncio.Future[Any]") -> Any:
    return await future


def _facts(adapter: HostAdapter, *, is_new: bool) -> AdapterFacts:
    size = device_size(adapter)
    return AdapterFacts(adapter.digest, adapter.rank, size.pages, adapter.num_bytes, adapter.invocation, is_new)
