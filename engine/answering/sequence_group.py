"""The sequences of one HTTP request in the engine, and their outputs on the event loop."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine.scheduling.request import RequestOutput, TokenLogprobs


class Releases(Protocol):
    """Methods of `engine.answering.in_flight.InFlight` that a group calls."""

    def abort(self, request_id: str, *, is_complete: bool = False) -> None: ...
    def released(self, request_id: str) -> None: ...


def _nothing() -> None:
    pass


class SequenceGroup:
    """The sequences of one HTTP request. A context manager: its exit aborts the sequences that still run.

    num_generated: per sequence, all tokens that the engine generated, including those after the exit.
    on_gone: called after the exit, once the engine has released all sequences; the counts are final then.
    allowance: limit of the tokens of all sequences together; at the limit they end with "length". None: no limit.
    ended_by_allowance: indices of the sequences that the allowance ended.
    """

    def __init__(self, owner: Releases, ids: list[str]) -> None:
        self._owner = owner
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
        # Log-probabilities of unfinished prompts, by sequence.
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def news(self) -> list[tuple[int, RequestOutput]]:
        """Wait for outputs. Return all since the last call, at least one: (index of the sequence, output).

        Raises BadRequest if the engine refuses a sequence, EngineUnavailable if the engine failed.
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
        """Return whether the engine refused a sequence, or failed."""
        return self._error is not None

    @property
    def choices(self) -> int:
        """Return the number of sequences."""
        return len(self._ids)

    @property
    def left(self) -> int | None:
        """Return the unused tokens of the allowance, None without an allowance."""
        return None if self.allowance is None else self.allowance - self.total_generated

    def allow(self, tokens: int) -> None:
        """Raise the allowance; it is never lowered."""
        self.allowance = max(self.allowance or 0, tokens)

    def stop(self, index: int) -> None:
        """Abort one sequence whose text is complete. The engine drops it before the next step."""
        request_id = self._ids[index]
        if request_id in self._live:
            del self._live[request_id]
            self._owner.abort(request_id, is_complete=True)

    def __enter__(self) -> "SequenceGroup":
        return self

    def __exit__(self, *_: object) -> None:
        for request_id in self._live:
            self._owner.abort(request_id)
        self._live.clear()
        self._left = True
        if not self._in_engine:
            self.on_gone()

    def deliver(self, index: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None or index in self._prompts:
            self._keep(index, output.prompt_logprobs or [])
            if not output.token_ids and output.finish_reason is None:
                return
            output = output._replace(prompt_logprobs=self._prompts.pop(index))
        kept = output if self.ended_by_allowance else self._count(index, output)
        if output.request_id in self._live:
            self._news.append((index, kept))
            self._last[index] = kept
            self._wake()
        if kept.finish_reason is not None:
            self._owner.released(output.request_id)
        if self._live and (left := self.left) is not None and left <= 0:
            self._end_by_allowance()
        if kept is not output and output.finish_reason is not None:
            self._owner.released(output.request_id)

    def _keep(self, index: int, entries: list[TokenLogprobs | None]) -> None:
        """Keep a part of a prompt's log-probabilities. The first entry of a prompt is None."""
        if entries and entries[0] is None:
            # A prompt that was preempted begins again.
            self._prompts[index] = entries
        else:
            self._prompts[index] += entries

    def _count(self, index: int, output: RequestOutput) -> RequestOutput:
        """Count an output's tokens. Return the output cut to the allowance; a cut output has no finish reason.

        A step may have several tokens beyond the allowance.
        """
        left = self.left
        new = output.num_output_tokens - self.num_generated[index]
        if left is not None and new > left:
            kept, logprobs = len(output.token_ids) - (new - left), output.logprobs
            output = output._replace(
                token_ids=output.token_ids[:kept],
                finish_reason=None,
                num_output_tokens=output.num_output_tokens - (new - left),
                logprobs=None if logprobs is None else logprobs[:kept],
            )
        self.total_generated += output.num_output_tokens - self.num_generated[index]
        self.num_generated[index] = output.num_output_tokens
        return output

    def _end_by_allowance(self) -> None:
        """End the running sequences. Tokens of the in-flight step are dropped, because no reservation covers them."""
        for request_id in self._live:
            index = self._ids.index(request_id)
            self.ended_by_allowance.add(index)
            last = self._last[index] or RequestOutput(request_id, [], None, 0, 0, 0)
            end = last._replace(token_ids=[], finish_reason="length", logprobs=None, prompt_logprobs=None)
            self._news.append((index, end))
            self._owner.abort(request_id)
        self._live.clear()
        self._wake()

    def released(self, request_id: str) -> None:
        """Record that the engine has dropped a sequence, so no further output arrives."""
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
