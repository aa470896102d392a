"""What one HTTP request has in the engine: the sequences it asked for and the news of them, on the event loop."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.request import RequestOutput, SamplingParams


class EngineUnavailable(RuntimeError):
    """The engine takes no requests: it failed, is going down, or its queue is full (`retry_after` in seconds)."""

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to generate."""

    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


class Releases(Protocol):
    """What a generation needs of engine.server.loop.EngineLoop."""

    def abort(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...


class Generation:
    """The sequences of one HTTP request. Use as a context manager: leaving it aborts what is still running."""

    def __init__(self, loop: Releases, ids: list[str]) -> None:
        self._loop = loop
        self._ids = ids
        self._live = dict.fromkeys(ids)
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

    def stop(self, index: int) -> None:
        """Ends one sequence: its request is gone from the engine before the next step."""
        request_id = self._ids[index]
        if request_id in self._live:
            self.forget(request_id)
            self._loop.abort(request_id)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in list(self._live):
            self.forget(request_id)
            self._loop.abort(request_id)

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._loop.release(request_id)

    def deliver(self, index: int, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self.forget(output.request_id)
        self._news.append((index, output))
        self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None
