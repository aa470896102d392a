"""One choice of an answer while it is generated: its text, log-probabilities and counts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from engine.scheduling.request import RequestOutput, TokenLogprobs
from engine.server.text import OutputText


@dataclass(slots=True)
class Delta:
    """What a choice gained since the last one. `logprobs` has one entry a token, empty if none were asked for."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    error: str | None = None
    error_param: str | None = None

    def add(self, other: "Delta") -> None:
        """Appends a later delta of the same choice."""
        self.text += other.text
        self.logprobs += other.logprobs
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.finish_reason = other.finish_reason


class Sequence:
    """Feeds a choice's outputs through its detokenizer and stop strings."""

    def __init__(self, index: int, text: OutputText, *, include_stop: bool, stop_ids: Collection[int]) -> None:
        """stop_ids: tokens that end the sequence and are not part of its text, unless `include_stop`."""
        self.index = index
        self._text = text
        self._include_stop = include_stop
        self._stop_ids = stop_ids
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.finished = False

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def take(self, outputs: Iterable[RequestOutput]) -> Delta:
        """The sum of some outputs, in their order."""
        delta = Delta(self.index)
        for output in outputs:
            if not self.finished:
                self._take(output, delta)
        return delta

    def _take(self, output: RequestOutput, delta: Delta) -> None:
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = output.prompt_logprobs
        ids = output.token_ids
        unseen = output.finish_reason == "stop" and not self._include_stop and bool(ids) and ids[-1] in self._stop_ids
        before = self._text.num_tokens
        delta.text += self._text.push(ids[:-1] if unseen else ids)
        finish_reason: str | None = output.finish_reason
        if finish_reason is not None and not self._text.stopped:
            delta.text += self._text.finish()
            if unseen and not self._text.stopped:
                self._text.count_unseen()
        if self._text.stopped:
            finish_reason = "stop"
        if output.logprobs is not None:
            delta.logprobs += output.logprobs[: self._text.num_tokens - before]
        delta.finish_reason, delta.error, delta.error_param = finish_reason, output.error, output.error_param
        self.finished = finish_reason is not None
