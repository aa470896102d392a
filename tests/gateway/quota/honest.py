"""A simulation of honest clients whose reservations grow while they run, checked against the reference leaky bucket."""

from collections.abc import Callable

from engine.answering.report import REPORT_SECONDS
from gateway.quota.growing_hold import Expectations, Pace
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from gateway.records.money.prices import FREE
from tests.gateway.quota.scripted import SECOND, START, Bucket, demand
from wire.responses import ASK_TOKENS

LIMIT = Limit("tenant:t", "tenant", "t", 60_000)
PROMPT = 20


class Answer:
    """A running request on its engine. made: tokens generated; reported: tokens reported to its gateway."""

    def __init__(self, pace: Pace, completion: int, lasts: float, begun: float) -> None:
        self.pace, self.completion, self.lasts, self.begun = pace, completion, lasts, begun
        self.made = self.reported = 0
        self.reported_at = begun
        self.allowance = pace.allowed - PROMPT

    def generate(self, seconds: float) -> int:
        """Generate tokens within the allowance and return how many are new."""
        due = min(self.completion, int(self.completion * (seconds - self.begun) / self.lasts))
        before, self.made = self.made, max(self.made, min(due, self.allowance))
        return self.made - before

    def report(self, seconds: float) -> None:
        if self.allowance - self.made < ASK_TOKENS or seconds - self.reported_at >= REPORT_SECONDS:
            self.reported, self.reported_at = self.made, seconds


class Clients:
    """Clients of one tenant that send the next request as soon as they may, on a clock of quarter-second steps.

    An engine's report reaches the gateway a quarter second later, and a raised allowance reaches the engine a quarter
    second after that.
    """

    def __init__(
        self,
        at_once: int,
        max_tokens: int,
        completion: Callable[[], int],
        seconds: Callable[[int], float],
        *,
        streamed: bool,
    ) -> None:
        self.limits, self.expectations = LocalLimits(), Expectations()
        self.at_once, self.max_tokens, self.completion, self.seconds = at_once, max_tokens, completion, seconds
        self.streamed = streamed
        self.used = self.ended = self.cut = self.calls = 0
        self.running: dict[str, Answer] = {}
        self.bucket = Bucket(LIMIT)
        self._asks_again = 0.0

    def run(self, minutes: int) -> None:
        for quarter in range(minutes * 240):
            seconds = quarter / 4
            now = START + int(seconds * SECOND)
            for request_id in list(self.running):
                self._go_on(request_id, seconds, now)
            if quarter % 40 == 0:
                # Extends the leases.
                for request_id, answer in self.running.items():
                    self.limits.grow("", request_id, answer.pace.delivered, 0, 0, now)
            if seconds >= self._asks_again:
                self._begin(seconds, now)

    def _begin(self, seconds: float, now: int) -> None:
        while len(self.running) < self.at_once:
            expected = min(self.max_tokens, self.expectations.expect("", ""))
            request_id = f"r{self.ended}.{len(self.running)}.{seconds}"
            need = demand(request_id, PROMPT, self.max_tokens, self.max_tokens, FREE, expected)
            answer = self.limits.acquire([LIMIT], need, now)
            if not answer.allowed:
                self._asks_again = seconds + 0.5
                return
            self.bucket.use(PROMPT, now - START)
            pace, completion = Pace(PROMPT, expected, PROMPT + self.max_tokens, 1), self.completion()
            self.running[request_id] = Answer(pace, completion, self.seconds(completion), seconds)

    def _go_on(self, request_id: str, seconds: float, now: int) -> None:
        answer = self.running[request_id]
        pace = answer.pace
        answer.allowance = pace.allowed - PROMPT
        pace.used = PROMPT + (answer.made if self.streamed else answer.reported)
        if wanted := pace.wanted(seconds):
            self.calls += 1
            grown = self.limits.grow("", request_id, pace.delivered, wanted, 0, now)
            assert grown is not None
            pace.grown(grown, seconds)
        self.bucket.use(answer.generate(seconds), now - START)
        answer.report(seconds)
        is_cut = answer.made == answer.allowance == pace.allowed - PROMPT < answer.completion
        if is_cut or answer.made == answer.completion:
            self.cut += is_cut
            self.ended += 1
            self.used += PROMPT + answer.made
            self.limits.settle("", request_id, PROMPT + answer.made, 0, counts=True, now=now)
            self.expectations.learn("", "", answer.made, seconds - answer.begun)
            del self.running[request_id]
