"""The outputs of one step of the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from engine.scheduling.request import Request, RequestOutput


@dataclass(slots=True)
class StepOutputs:
    """Outputs of a step. Iterated over before the next step, they are a `RequestOutput` for each request.

    whole: outputs of requests that have news. plain, token_ids: the other requests, and the new token of each. Their
    outputs equal their last ones except for the token and the number of tokens.
    """

    whole: list[RequestOutput] = field(default_factory=list)
    plain: Sequence[Request] = ()
    token_ids: Sequence[int] = ()

    @classmethod
    def of(cls, requests: Sequence[Request], token_ids: Sequence[int], rows: Sequence[int]) -> "StepOutputs":
        """Return the outputs of requests with a new token each. rows: those that have ended or have news."""
        if not rows:
            return cls([], requests, token_ids)
        whole = [requests[row].output([token_ids[row]] if token_ids[row] >= 0 else []) for row in rows]
        is_plain = np.ones(len(requests), np.bool_)
        is_plain[rows] = False
        return cls(whole, list(compress(requests, is_plain)), list(compress(token_ids, is_plain)))

    def add(self, later: "StepOutputs") -> None:
        """Append a later step's outputs."""
        self.whole += later.whole
        if not self.plain:
            self.plain, self.token_ids = later.plain, later.token_ids
        elif later.plain:
            self.plain, self.token_ids = [*self.plain, *later.plain], [*self.token_ids, *later.token_ids]

    def __len__(self) -> int:
        return len(self.whole) + len(self.plain)

    def __iter__(self) -> Iterator[RequestOutput]:
        yield from self.whole
        for request, token_id in zip(self.plain, self.token_ids, strict=True):
            # The next token may be in flight already.
            number = len(request.token_ids) - request.num_prompt_tokens
            yield request.output([token_id])._replace(num_output_tokens=number)


def next_output(last: RequestOutput, token_id: int) -> RequestOutput:
    """Return the output after `last` of a request with one new token and nothing else to report."""
    return RequestOutput(
        last.request_id,
        [token_id],
        None,
        last.num_prompt_tokens,
        last.num_cached_tokens,
        last.num_output_tokens + 1,
        started_at=last.started_at,
        served_digest=last.served_digest,
    )


def without_arrays(output: RequestOutput) -> RequestOutput:
    """Return the output without log-probabilities and logits, so that keeping it takes little memory."""
    if output.logprobs is None and output.prompt_logprobs is None and output.logits is None:
        return output
    return output._replace(logprobs=None, prompt_logprobs=None, logits=None)
