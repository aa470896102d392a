"""State of one choice during generation: its text, log-probabilities and counts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from engine.answering.text import OutputText
from engine.errors import Fault
from engine.scheduling.request import RequestOutput, TokenLogprobs


class EncodedLogprobs(NamedTuple):
    """A token's log-probabilities in the form of its answer. json: the part that takes long to encode."""

    token_id: int
    logprob: float
    json: msgspec.Raw


@dataclass(slots=True)
class Delta:
    """The gain of a choice since its previous delta. `encoded` and then `logprobs` have one entry per token; both are
    empty if none are requested.

    encoded: entries that the answer has encoded (`Answer.encode`). stop_reason: the stop string or stop token id that
    ended the choice; None for any other end. fault: see `RequestOutput`.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    encoded: list[EncodedLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_param: str | None = None
    fault: Fault | None = None

    def add(self, other: "Delta") -> None:
        """Append a later delta of the same choice; its log-probabilities are encoded."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.encoded += other.encoded
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason


class SharedPrompt:
    """Copier of a prompt's log-probabilities from its first choice, which computes them, to its other choices. It holds
    the other choices' deltas until then, because a choice's first delta carries them.
    """

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._found: dict[int, list[TokenLogprobs | None] | None] = {}
        self._held: dict[int, list[Delta]] = {}
        self._begun: set[int] = set()

    def share(self, deltas: list[Delta]) -> list[Delta]:
        """Return the deltas that can be written now, including released ones, in order."""
        ready = []
        for delta in deltas:
            prompt, choice = divmod(delta.index, self._num_choices)
            if choice and prompt not in self._found:
                self._held.setdefault(prompt, []).append(delta)
                continue
            if not choice:
                self._found.setdefault(prompt, delta.prompt_logprobs)
            for released in (delta, *self._held.pop(prompt, ())):
                if released.index not in self._begun:
                    self._begun.add(released.index)
                    released.prompt_logprobs = self._found[prompt]
                ready.append(released)
        return ready


class Sequence:
    """A choice in progress: passes its outputs through the detokenizer and the stop strings."""

    def __init__(
        self,
        index: int,
        text: OutputText,
        *,
        include_stop: bool,
        end_ids: Collection[int],
        stop_ids: Collection[int],
        is_empty: bool = False,
    ) -> None:
        """end_ids, stop_ids: tokens of the model and of the request that end the sequence; they are not part of its
        text, unless `include_stop`. is_empty: the request wants the prompt only, so the generated token is dropped.
        """
        self.index = index
        self._text = text
        self._include_stop = include_stop
        self._end_ids = end_ids
        self._stop_ids = stop_ids
        self._is_empty = is_empty
        self.num_prompt_tokens = 0
        self.served_digest: str | None = None
        self.num_cached_tokens = 0
        self.finished = False

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def take(self, outputs: Iterable[RequestOutput]) -> Delta:
        """Return the sum of the outputs, which are in order."""
        delta = Delta(self.index)
        for output in outputs:
            if not self.finished:
                self._take(output, delta)
        return delta

    def _take(self, output: RequestOutput, delta: Delta) -> None:
        self.num_prompt_tokens = output.num_prompt_tokens
        self.served_digest = output.served_digest or self.served_digest
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = output.prompt_logprobs
        if self._is_empty and output.error is None:
            delta.finish_reason, self.finished = "length", True
            return
        ids = output.token_ids
        if output.finish_reason is None and not self._text.has_stops:
            # The usual output: the sequence goes on, and all of its text can be sent.
            delta.text += self._text.push(ids)
            delta.token_ids += ids
            if output.logprobs is not None:
                delta.logprobs += output.logprobs
            return
        last = ids[-1] if ids and output.finish_reason == "stop" else None
        unseen = not self._include_stop and (last in self._end_ids or last in self._stop_ids)
        before = self._text.num_tokens
        delta.text += self._text.push(ids[:-1] if unseen else ids)
        finish_reason: str | None = output.finish_reason
        if finish_reason is not None and not self._text.stopped:
            delta.text += self._text.finish()
            if unseen and not self._text.stopped:
                self._text.count_unseen()
        if self._text.stopped:
            finish_reason, delta.stop_reason = "stop", self._text.stop
        elif last in self._stop_ids and last not in self._end_ids:
            delta.stop_reason = last
        taken = self._text.num_tokens - before
        delta.token_ids += ids[:taken]
        if output.logprobs is not None:
            delta.logprobs += output.logprobs[:taken]
        delta.finish_reason, delta.error, delta.error_param = finish_reason, output.error, output.error_param
        delta.fault = output.fault
        self.finished = finish_reason is not None
