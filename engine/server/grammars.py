"""Grammars by spec: compiled in threads of their own and kept while they are used."""

import asyncio
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from engine.scheduling.request import RequestError
from engine.server.generation import EngineUnavailable
from engine.structured.compiler import Grammar, GrammarCompiler
from engine.structured.spec import GrammarSpec

# One that is cached has cost up to a few MiB; ordinary ones cost kilobytes.
MAX_CACHED = 64
# Compiling cannot be interrupted: with two threads one slow grammar does not hold up the others.
COMPILE_THREADS = 2
COMPILE_SECONDS = 5.0
# More requests than this waiting for the threads are refused rather than kept.
MAX_PENDING = 64


class Grammars:
    """Used on the event loop only. Holds the last `MAX_CACHED` grammars and those on their way."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, "grammar")
        self._compiled: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._pending: dict[GrammarSpec, tuple[Future[Grammar], asyncio.Future[Grammar]]] = {}

    async def get(self, spec: GrammarSpec) -> Grammar:
        """Raises RequestError for a grammar that does not compile (in time), EngineUnavailable when too many wait."""
        grammar = self._compiled.get(spec)
        if grammar is not None:
            self._compiled.move_to_end(spec)
            return grammar.blaming(spec.param)
        if spec not in self._pending:
            if len(self._pending) >= MAX_PENDING:
                raise EngineUnavailable(f"{MAX_PENDING} grammars wait to be compiled, the most allowed", retry_after=1)
            job = self._threads.submit(self._compiler.compile, spec)
            self._pending[spec] = job, asyncio.wrap_future(job)
            self._pending[spec][1].add_done_callback(lambda done: self._keep(spec, done))
        job, compiled = self._pending[spec]
        try:
            # Shielded: others may wait for the same one, and the thread could not be stopped anyway.
            async with asyncio.timeout(COMPILE_SECONDS):
                return (await asyncio.shield(compiled)).blaming(spec.param)
        except TimeoutError:
            if not job.running():
                raise EngineUnavailable("other grammars are still being compiled", retry_after=1) from None
            raise RequestError(spec.param, f"it did not compile within {COMPILE_SECONDS:g} s") from None
        except RequestError as exc:
            raise RequestError(spec.param, exc.message) from None

    def close(self) -> None:
        """Drops what waits; a compilation that runs ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, spec: GrammarSpec, done: "asyncio.Future[Grammar]") -> None:
        del self._pending[spec]
        if done.cancelled() or done.exception() is not None:
            return
        self._compiled[spec] = done.result()
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
