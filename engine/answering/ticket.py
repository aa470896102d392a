"""What one HTTP request has in the engine: the sequences it asked for and the news of them, on the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.scheduling.request import RequestOutput, SamplingParams


class EngineUnavailable(RuntimeError):
    """The engine takes no requests: it is loading, failed, or is going down (`retry_after` in seconds).

    The gateway gives no further request of any tenant to an engine that answers with this.
    """

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(EngineUnavailable):
    """The engine cannot serve this request now, and serves others."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to generate. prefix_keys: the prompt's, shared by its choices; empty: computed when needed."""

    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    prefix_keys: Sequence[bytes] = ()


class Releases(Protocol):
    """What a generation needs of engine.answering.engine_thread.EngineLoop."""

    def abort(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...


def _nothing() -> None:
    pass


class Generation:
    """The sequences of one HTTP request. Use as a context manager: leaving it aborts what is still running.

    num_generated: of each sequence, all tokens that the engine chose, also after nobody wanted them any more.
    on_gone: called once the engine has let go of all sequences and this was left; the counts are final then.
    allowance: the tokens that all sequences together may have; at it they end as if at their longest. None: no bound.
    ended_by_allowance: the sequences that it ended.
    """

    def __init__(self, loop: Releases, ids: list[str]) -> None:
        self._loop = loop
        self._ids = ids
        self._live = dict.fromkeys(ids)
        self._in_engine = set(ids)
        self._left = False
        self.num_generated = [0] * len(ids)
        self.on_gone: Callable[[], None] = _nothing
        self.allowance: int | None = None
        self.ended_by_allowance: set[int] = set()
        self.total_generated = 0
        self._last: list[RequestOutput | None] = [None] * len(ids)
        self._news: list[tuple[int, RequestOutput]] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def news(self) -> list[tuple[int, RequestOutput]]:
        """All that has come since the last call, at least one: (index of the sequence, output).

        Raises RequestError if the engine refuses a sequence, EngineUnavailable if the engine failed.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        news, self._news = self._news, []
        return news

    @property
    def failed(self) -> bool:
        """Whether the engine refused a sequence, or failed."""
        return self._error is not None

    @property
    def choices(self) -> int:
        """Return the number of sequences."""
        return len(self._ids)

    @property
    def left(self) -> int | None:
        """Return the tokens that are left of the allowance, None without a bound."""
        return None if self.allowance is None else self.allowance - self.total_generated

    def allow(self, tokens: int) -> None:
        """Raise the allowance; it is never lowered."""
        self.allowance = max(self.allowance or 0, tokens)

    def stop(self, index: int) -> None:
        """Ends one sequence: its request is gone from the engine before the next step."""
        request_id = self._ids[index]
        if request_id in self._live:
            del self._live[request_id]
            self._loop.abort(request_id)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in self._live:
            self._loop.abort(request_id)
        self._live.clear()
        self._left = True
        if not self._in_engine:
            self.on_gone()

    def deliver(self, index: int, output: RequestOutput) -> None:
        if not self.ended_by_allowance:
            self.total_generated += output.num_output_tokens - self.num_generated[index]
            self.num_generated[index] = output.num_output_tokens
        if output.request_id in self._live:
            self._news.append((index, output))
            self._last[index] = output
            self._wake()
        if output.finish_reason is not None:
            self._loop.release(output.request_id)
        if self._live and (left := self.left) is not None and left <= 0:
            self._end_by_allowance()

    def _end_by_allowance(self) -> None:
        """End the sequences that run. The tokens of a step in flight are dropped, because nothing holds them."""
        for request_id in self._live:
            index = self._ids.index(request_id)
            self.ended_by_allowance.add(index)
            last = self._last[index] or RequestOutput(request_id, [], None, 0, 0, 0)
            end = replace(last, token_ids=[], finish_reason="length", logprobs=None, prompt_logprobs=None)
            self._news.append((index, end))
            self._loop.abort(request_id)
        self._live.clear()
        self._wake()

    def released(self, request_id: str) -> None:
        """The engine has let go of it: nothing more is delivered."""
        self._live.pop(request_id, None)
        self._in_engine.discard(request_id)
        if self._left and not self._in_engine:
            self.on_gone()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
