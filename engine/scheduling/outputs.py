"""The outputs of one step of the engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.scheduling.request import NOT_FINITE, Request, RequestOutput, Status


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
    def commit(
        cls,
        requests: Sequence[Request],
        token_ids: Sequence[int],
        commit_some: Callable[[Mapping[Request, int]], Sequence[Request]],
    ) -> "StepOutputs":
        """Commit a step without drafts, a token of each request, and return its outputs.

        commit_some: `Scheduler.commit`. The loop runs for every stream in every step, so it does by itself what
        `commit_some` does for a request that goes on.
        """
        running, not_finite = Status.RUNNING, NOT_FINITE  # members of enumerations are slow to look up
        others = list[int]()
        for row, (request, token) in enumerate(zip(requests, token_ids, strict=True)):
            known = request.token_ids
            if (
                request.has_news
                or request.status is not running
                or token in request.stop_ids
                or token == not_finite
                or len(known) + 1 >= request.max_num_tokens
            ):
                others.append(row)
            else:
                known.append(token)
                request.num_pending = 0
        if not others:
            return cls([], requests, token_ids)
        whole, plain, plain_ids = list[RequestOutput](), [*requests], [*token_ids]
        for row in reversed(others):
            del plain[row], plain_ids[row]
        for row in others:
            request, token = requests[row], token_ids[row]
            if not commit_some({request: token}):
                continue
            if request.has_news:
                whole.append(request.output([token] if token != NOT_FINITE else []))
            else:
                plain.append(request)
                plain_ids.append(token)
        return cls(whole, plain, plain_ids)

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
