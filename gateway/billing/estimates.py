"""Estimated completion of a whole answer without a count, behind a server that reports no counts of ended requests.

Such a server (vLLM, SGLang) counts a whole answer's tokens only in the answer. If the client leaves before it, or the
count is one that no request can have, the server has generated tokens that nobody counted. The gateway knows the time
that the server had, and the speed of the server's earlier answers.
"""

from typing import Protocol

from gateway.billing.charges import Ending
from gateway.billing.used_engines import UsedEngines
from gateway.errors import TimeLimitExceeded
from gateway.fleet.calls.answers import AnswerTooLarge
from wire.bounded_dict import BoundedDict

# Share of a server's answers that are slower than its speed. Most estimates are then not too low.
QUANTILE = 0.9
# The speed rises by 22 % with a faster answer and falls by 2 % with a slower one.
GAIN = 1.25
# Tokens a second of a choice, of a server without a known answer: slow, because the client pays for them.
FIRST_SPEED = 20.0
# Seconds without a finished answer of the server that count as work: it may stand still.
SILENT_SECONDS = 120.0
# Tokens of a choice from which a speed is learnt. Most of a shorter answer's time is its prompt's.
MIN_TOKENS = 16
MIN_SECONDS = 0.001
MAX_ENGINES = 1000


class Request(Protocol):
    """A request's account (`gateway.billing.account.Account`)."""

    used_engines: UsedEngines
    ending: Ending
    choices: int
    completion_tokens: int
    is_counted: bool
    is_whole: bool
    is_clients_cause: bool

    def set_completion(self, tokens: int) -> None: ...


class Speeds:
    """Tokens a second of a choice by engine, from the arrival of the request there to the end of its answer.

    A speed follows a quantile by stochastic approximation, as the expected completions do
    (gateway/quota/growing_hold.py).
    """

    def __init__(self) -> None:
        self._speeds = BoundedDict[str, float](MAX_ENGINES)
        # End of the last finished answer (monotonic) by engine.
        self._finished = BoundedDict[str, float](MAX_ENGINES)

    def count_unread(self, request: Request, ended: float) -> None:
        """Estimate a request's completion if nobody has counted it, or learn from one that was counted.

        ended: the request's end (monotonic).
        """
        used = request.used_engines
        if not request.is_whole or used.engine is None or used.remembers:
            return
        seconds, is_finished = used.seconds(ended), request.ending is Ending.FINISHED
        if is_finished:
            self._finished.put(used.engine, ended)
        if request.is_counted:
            if is_finished:
                self.learn(used.engine, request.completion_tokens / request.choices, seconds)
        elif is_finished:
            request.set_completion(request.choices * max(1, self.tokens(used.engine, seconds)))
        elif request.is_clients_cause or request.ending in (Ending.CANCELLED, Ending.REVOKED):
            silent = min(seconds, ended - self._finished.get(used.engine, 0.0))
            worked = seconds - max(0.0, silent - SILENT_SECONDS)
            request.set_completion(request.choices * self.tokens(used.engine, worked))

    def learn(self, engine: str, tokens: float, seconds: float) -> None:
        """Update an engine's speed with the tokens of a choice of a whole answer."""
        if tokens < MIN_TOKENS:
            return
        observed = tokens / max(seconds, MIN_SECONDS)
        speed = self._speeds.get(engine, observed)
        step = QUANTILE if observed > speed else QUANTILE - 1 if observed < speed else 0.0
        self._speeds.put(engine, speed * GAIN**step)

    def tokens(self, engine: str, seconds: float) -> int:
        """Return the tokens that an engine has generated of a choice after `seconds`."""
        return round(self._speeds.get(engine, FIRST_SPEED) * seconds)


def is_clients_cause(error: Exception) -> bool:
    """Return whether an error ended an answer, by the size or the duration that its request caused."""
    return isinstance(error, AnswerTooLarge | TimeLimitExceeded)
